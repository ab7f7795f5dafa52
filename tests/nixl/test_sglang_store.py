"""A storage of SGLang's HiCache without SGLang, whose few names it uses are made here: pages of 16 in pages of 64.

Real engines judge it where SGLang is: tests/engines/stored.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kvplan import KVPlanError
from kvplan_nixl.serving.store import FileBackend, Limits
from tests.bridges.sglang_pools import MHATokenToKVPoolHost
from tests.nixl.sglang_objects import (
    IMAGE,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
    Runtime,
    StorageBackupSpec,
    get_storage_hash_str,
)
from tests.store.test_stalls import HangingBackend, Timed

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
}
PAGE, LAYERS = 16, 2
TOKENS = [*range(1000, 1150)]


@pytest.fixture
def sglang() -> Runtime:
    """What the engine says of itself."""
    return Runtime(CONFIG)


@pytest.fixture
def plugin(sglang: Runtime, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    names = ("changes", "identity", "description", "prompt", "store_prompts", "store", "store_hooks")
    return sglang.plugin(monkeypatch, names)


def host_pool(filled: bool, dtype: Any) -> tuple[Any, MHATokenToKVPoolHost]:
    """The memory of a pool, and the pool."""
    memory = np.zeros((2, LAYERS, 20 * PAGE, 2, 8), dtype)
    if filled:
        memory[:] = np.arange(memory.size).reshape(memory.shape)
    return memory, MHATokenToKVPoolHost(memory, page_size=PAGE, layer_num=LAYERS, dtype=memory.dtype)


class Engine:
    """A rank with a cache in host memory, whose values are all different, or zero, and maybe one of windows."""

    def __init__(
        self,
        plugin: ModuleType,
        folder: Path,
        filled: bool = True,
        dtype: Any = np.float32,
        has_windows: bool = False,
        pp_size: int = 1,
        **extra: Any,
    ) -> None:
        self.plugin = plugin
        self.memory, pool = host_pool(filled, dtype)
        self.windows, window_pool = host_pool(filled, dtype)
        settings = {"backend_name": "kvplan", "interface_v1": 1, "folder": str(folder), **extra}
        config = HiCacheStorageConfig(settings, pp_size=pp_size)
        self.store = plugin.store.KvplanStore(config, {})
        self.store.register_mem_pool_host(pool)
        self.store.register_mem_host_pool_v2(pool, "kv")
        if has_windows:
            self.store.register_mem_host_pool_v2(window_pool, "swa")
        self.store.on_host_pools_registered()

    def prompt(self, tokens: Sequence[int] = TOKENS, pages: Sequence[int] = (), salt: str | None = None) -> Any:
        """A prompt, and where it is in host memory."""
        table = self.plugin.store.pages_of(slots(pages), PAGE, 0) if pages else None
        return self.plugin.store_prompts.PromptPages.of(tokens, None, salt, PAGE, table)

    def exists(self, prompt: Any, start: int = 0) -> int:
        """How many pages are found from one on."""
        return int(self.store.batch_exists(keys(prompt)[start:], told(prompt)))

    def rows(self, pages: Sequence[int]) -> Any:
        """What pages have."""
        return self.memory[:, :, slots(pages)]


def keys(prompt: Any) -> list[str]:
    """SGLang's hashes of whole pages."""
    return get_storage_hash_str(prompt.key.page_aligned(PAGE), page_size=PAGE)


def slots(pages: Sequence[int]) -> Any:
    return torch.tensor([page * PAGE + slot for page in pages for slot in range(PAGE)])


def told(prompt: Any) -> Any:
    """What SGLang hands to its storage with a call."""
    return HiCacheStorageExtraInfo(prompt)


PAGES = [7, 2, 9, 4, 11, 1, 15, 3, 8]
WINDOW_PAGES = [4, 8, 1, 12, 5, 3, 10, 6, 2]


def save(engine: Engine, prompt: Any, *sizes: int) -> None:
    """Back up nodes of some pages each, one after another."""
    start = 0
    for size in sizes:
        node = keys(prompt)[start : start + size]
        assert engine.store.batch_set_v1(node, slots(PAGES[start : start + size]), told(prompt + node)) == [True] * size
        start += size


def test_what_one_engine_saves_another_loads(plugin: ModuleType, tmp_path: Path) -> None:
    """Nodes end where they like: a page of the store that two of them have is saved with the second."""
    writer, reader = Engine(plugin, tmp_path), Engine(plugin, tmp_path, filled=False)
    prompt = writer.prompt(pages=PAGES)
    save(writer, prompt, 3)
    assert reader.exists(reader.prompt()) == 0
    for start, num_found in ((3, 4), (6, 8)):
        node = keys(prompt)[start : start + 3]
        assert all(writer.store.batch_set_v1(node, slots(PAGES[start : start + 3]), told(prompt)))
        assert reader.exists(reader.prompt()) == num_found
    assert reader.store.batch_exists(keys(prompt)[:5], told(prompt)) == 5
    places = [5, 0, 13, 6, 2]
    wanted = reader.prompt()
    assert reader.exists(wanted, 3) == 5
    assert reader.store.batch_get_v1(keys(wanted)[3:8], slots(places), told(wanted)) == [True] * 5
    assert (reader.rows(places) == writer.rows(PAGES[3:8])).all()
    assert not reader.memory.sum(axis=(0, 1, 3, 4))[slots([1, 3, 4, 7])].any()


def windowed_config(*kinds: str) -> dict[str, Any]:
    """A model with layers of these kinds, and twice as many."""
    return {
        **CONFIG,
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "num_hidden_layers": 2 * LAYERS,
        "layer_types": [f"{kind}_attention" for kind in kinds] * LAYERS,
    }


@pytest.fixture
def windowed(sglang: Runtime, plugin: ModuleType) -> ModuleType:
    """The plugin of an engine whose windows have a pool of their own."""
    sglang.config = windowed_config("sliding", "full")
    return plugin


def window(hashes: list[str], pages: Sequence[int] = ()) -> Any:
    """PoolTransfer of the last pages of a prompt."""
    return PoolTransfer("swa", slots(pages), hashes)


def backed_up(engine: Engine, num_pages: int, held: int) -> Any:
    """A prompt in host memory, with windows from the page ``held`` on."""
    pages_of = engine.plugin.store.pages_of
    table = pages_of(slots(PAGES[:num_pages]), PAGE, 0)
    window_table = pages_of(slots(WINDOW_PAGES[held:num_pages]), PAGE, held * PAGE)
    tokens = TOKENS[: num_pages * PAGE]
    return engine.plugin.store_prompts.PromptPages.of(tokens, None, None, PAGE, table, window_table)


def save_windows(engine: Engine, first: int, stop: int, held: int) -> None:
    """Back up a node of the pages from ``first`` on."""
    prompt = backed_up(engine, stop, held)
    saved = engine.store.batch_set_v2([window(keys(prompt)[max(first, held) :])], told(prompt))
    assert all(saved["swa"])
    assert all(engine.store.batch_set_v1(keys(prompt)[first:], slots(PAGES[first:stop]), told(prompt)))


def test_windows_are_saved_and_loaded(windowed: ModuleType, tmp_path: Path) -> None:
    """As far as SGLang still has them; a prefix is found where all windows before its end are stored."""
    writer, reader = (Engine(windowed, tmp_path, filled, has_windows=True) for filled in (True, False))
    save_windows(writer, 0, 8, held=3)
    prompt = reader.prompt()
    hashes = keys(prompt)
    # of the store's two pages only the second one has windows
    assert reader.store.batch_exists_v2(hashes, [window(hashes[:2])], told(prompt)) == PoolTransferResult(8, {}, [8])
    assert reader.store.batch_exists_v2(hashes[:7], [window(hashes[:2])], told(prompt)) == PoolTransferResult(
        7, {}, [7]
    )
    assert reader.store.batch_exists_v2(hashes[:5], [window(hashes[:2])], told(prompt)) == PoolTransferResult(0, {}, [])
    assert reader.store.batch_exists(hashes[:5], told(prompt)) == 5
    places = [5, 0, 13, 6, 2, 9, 11, 1]
    assert reader.store.batch_get_v1(hashes[:8], slots(places), told(prompt)) == [True] * 8
    assert not reader.windows.any()
    wanted = [window(hashes[6:8], places[:2])]
    assert reader.store.batch_get_v2(wanted, told(prompt)) == {"swa": [True] * 2}
    assert (reader.rows(places) == writer.rows(PAGES[:8])).all()
    assert (reader.windows[:, :, slots(places[:2])] == writer.windows[:, :, slots(WINDOW_PAGES[6:8])]).all()
    assert not reader.windows[:, :, slots([*range(1, 5), *range(6, 20)])].any()


@pytest.mark.parametrize(("held", "num_found"), [(4, 8), (6, 0)])
def test_a_page_whose_windows_two_nodes_have(windowed: ModuleType, tmp_path: Path, held: int, num_found: int) -> None:
    """It is saved with the second one, if the first one's are there; else the page has none."""
    engine = Engine(windowed, tmp_path, has_windows=True)
    save_windows(engine, 0, 6, held=4)
    save_windows(engine, 6, 8, held=held)
    prompt = engine.prompt()
    found = engine.store.batch_exists_v2(keys(prompt), [window(keys(prompt)[:2])], told(prompt))
    assert found.kv_hit_pages == num_found


def test_windows_of_another_prompt_are_none(windowed: ModuleType, tmp_path: Path) -> None:
    """They are not saved; nor are those that nobody has found in host memory. What is not stored is not loaded."""
    engine = Engine(windowed, tmp_path, has_windows=True)
    prompt = engine.prompt(pages=PAGES)
    hashes = keys(prompt)
    assert engine.store.batch_set_v2([window(hashes)], told(prompt)) == {"swa": [False] * 9}
    in_memory = backed_up(engine, 8, 0)
    assert engine.store.batch_set_v2([window(hashes[1::-1])], told(in_memory)) == {"swa": [False] * 2}
    assert engine.store.batch_get_v2([window(hashes[6:8], [0, 1])], told(prompt)) == {"swa": [False] * 2}


@pytest.mark.parametrize(
    ("kinds", "pp_size", "text"),
    [
        (("sliding", "full"), 2, "expected pp_size = 1, got 2"),
        (("full", "full"), 1, r"expected layers of the host pools = \[4, 0\], got \[2, 2\]"),
    ],
)
def test_pools_of_other_layers_are_refused(
    sglang: Runtime,
    plugin: ModuleType,
    tmp_path: Path,
    kinds: tuple[str, str],
    pp_size: int,
    text: str,
) -> None:
    """As those of a stage, or of a model whose layers share caches."""
    sglang.config = windowed_config(*kinds)
    with pytest.raises(KVPlanError, match=text):
        Engine(plugin, tmp_path, has_windows=True, pp_size=pp_size)


def test_what_decides_a_cache_decides_a_key(sglang: Runtime, plugin: ModuleType, tmp_path: Path) -> None:
    """Other tokens, another salt, weights or namespace are misses; so is what has an image."""
    engine = Engine(plugin, tmp_path)
    save(engine, engine.prompt(pages=PAGES), 8)
    assert engine.exists(engine.prompt()) == 8
    assert engine.exists(engine.prompt([*TOKENS[:70], 5, *TOKENS[71:]])) == 4
    assert engine.exists(engine.prompt(salt="blue")) == 0
    other = plugin.store_prompts.PromptPages.of(TOKENS, "adapter", None, PAGE)
    assert engine.exists(other) == 0
    sglang.serving.weight_version = "2"
    assert engine.exists(engine.prompt()) == 0


def test_a_prompt_ends_before_an_image(plugin: ModuleType, tmp_path: Path) -> None:
    """Its tokens are 30 bits of a hash, which another image may have too."""
    engine = Engine(plugin, tmp_path)
    prompt = engine.prompt([*TOKENS[:100], IMAGE + 5, *TOKENS[101:]], PAGES)
    save(engine, prompt, len(keys(prompt)))
    assert engine.exists(prompt) == 4
    assert {entry.page for entry in FileBackend(tmp_path).entries()} == {
        f"{engine.store._chain(prompt).space}/{key}" for key in engine.store._chain(engine.prompt(TOKENS[:100])).keys
    }


def test_bytes_have_the_dtype_that_the_engine_says(sglang: Runtime, plugin: ModuleType, tmp_path: Path) -> None:
    """SGLang keeps all kinds of fp8 as bytes in host memory: pages of one are a miss for another."""
    with pytest.raises(KVPlanError, match="expected kv_cache_dtype = fp8_e4m3 or fp8_e5m2, got auto"):
        Engine(plugin, tmp_path, dtype=np.uint8)
    sglang.model.kv_cache_dtype = "fp8_e4m3"
    engine = Engine(plugin, tmp_path, dtype=np.uint8)
    save(engine, engine.prompt(pages=PAGES), 8)
    assert engine.exists(engine.prompt()) == 8
    sglang.model.kv_cache_dtype = "fp8_e5m2"
    other = Engine(plugin, tmp_path, dtype=np.uint8)
    assert other.exists(other.prompt()) == 0


def test_pages_of_another_prompt_are_none(plugin: ModuleType, tmp_path: Path) -> None:
    """Hashes that are not those of the prompt, in a row, load and save nothing."""
    engine = Engine(plugin, tmp_path)
    prompt, other = engine.prompt(pages=PAGES), engine.prompt(salt="blue", pages=PAGES)
    for wrong in (keys(other), keys(prompt)[::-1], [keys(prompt)[0], *keys(other)[1:]]):
        assert engine.store.batch_set_v1(wrong, slots(PAGES), told(prompt)) == [False] * 9
    assert not [*FileBackend(tmp_path).entries()]
    save(engine, prompt, 8)
    assert engine.store.batch_get_v1(keys(other), slots(PAGES), told(prompt)) == [False] * 9


def test_damaged_pages_are_computed(plugin: ModuleType, tmp_path: Path) -> None:
    """Nothing of a batch with a damaged page is used, and the page is a miss afterwards."""
    engine = Engine(plugin, tmp_path)
    prompt = engine.prompt(pages=PAGES)
    save(engine, prompt, 8)
    backend = FileBackend(tmp_path)
    key = engine.store._chain(prompt).keys[1]
    (entry, *_) = [entry for entry in backend.entries() if key in entry.name]
    path = backend.path_of(entry.name)
    path.write_bytes(path.read_bytes()[:-1])
    assert engine.store.batch_get_v1(keys(prompt)[:8], slots(PAGES[:8]), told(prompt)) == [False] * 8
    assert engine.exists(prompt) == 4
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    assert engine.exists(prompt) == 0


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> HangingBackend:
    """The store of all engines, which may hang."""
    backend = HangingBackend()
    Timed(backend, 1, monkeypatch)
    monkeypatch.setattr("kvplan_nixl.serving.store.open_backend", lambda _: backend)
    return backend


def test_a_store_that_hangs_is_not_waited_for(hanging: HangingBackend, plugin: ModuleType, tmp_path: Path) -> None:
    """Pages are computed, or not saved, and none is loaded later: SGLang may have given them to another prompt."""
    save(Engine(plugin, tmp_path), Engine(plugin, tmp_path).prompt(pages=PAGES), 8)
    engine = Engine(plugin, tmp_path, filled=False, stall_s=0.2, search_timeout_s=0.2)
    prompt = engine.prompt(pages=PAGES)
    hanging.hangs_after = hanging.num_calls
    found = keys(prompt)[:8]
    assert engine.exists(prompt) == 8
    assert engine.store.batch_get_v1(found, slots(PAGES[:8]), told(prompt)) == [False] * 8
    other = engine.prompt([*range(2000, 2150)], PAGES)
    assert engine.store.batch_set_v1(keys(other)[:8], slots(PAGES[:8]), told(other)) == [False] * 8
    hanging.is_search_hanging = True
    assert engine.exists(prompt) == 0
    hanging.is_answering.set()
    for guard in (engine.store._loader, engine.store._saver, engine.store._searcher):
        for call in guard._hanging:
            call.thread.join()
    assert not engine.memory.any()


def test_a_store_that_fails_is_done_without(
    plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: it is raised in threads of SGLang, which would end."""
    engine = Engine(plugin, tmp_path)
    prompt = engine.prompt(pages=PAGES)
    save(engine, prompt, 8)

    def fail(*_: Any) -> None:
        raise MemoryError

    for guard in (engine.store._searcher, engine.store._loader, engine.store._saver):
        monkeypatch.setattr(guard, "call", fail)
    assert engine.exists(prompt) == 0
    found = keys(prompt)[:8]
    assert engine.store.batch_get_v1(found, slots(PAGES[:8]), told(prompt)) == [False] * 8
    assert engine.store.batch_set_v1(found, slots(PAGES[:8]), told(prompt)) == [False] * 8


def test_the_first_rank_keeps_limits(plugin: ModuleType, tmp_path: Path) -> None:
    """Settings say them; without one nothing is evicted, and SGLang closes its storage."""
    eviction = Engine(plugin, tmp_path, max_bytes=10**9).store._eviction
    assert eviction._limits == Limits(max_bytes=9 * 10**8)
    engine = Engine(plugin, tmp_path)
    assert engine.store._eviction is None
    engine.store.close()
    engine = Engine(plugin, tmp_path, max_age_s=60)
    engine.store.close()
    assert engine.store._eviction._is_closed.is_set()
    eviction.close()


def test_a_call_without_a_prompt_is_an_error(plugin: ModuleType, tmp_path: Path) -> None:
    """SGLang's own hashes of pages before say nothing."""
    engine = Engine(plugin, tmp_path)
    for info in (None, told(None), told(["5f"])):
        with pytest.raises(KVPlanError, match="TYPE: cannot use a store: expected the prompt of the pages"):
            engine.store.batch_exists(["5e"], info)


@pytest.mark.parametrize(
    "setting, value, text",
    [
        ("hicache_host_memory_mode", "buffer_only", "expected hicache_host_memory_mode = cache, got buffer_only"),
        ("speculative_algorithm", "EAGLE", "expected speculative_algorithm = None or NGRAM, got EAGLE"),
        ("disaggregation_decode_enable_offload_kvcache", True, "expected disaggregation_decode_enable_offload_kvcache"),
    ],
)
def test_engines_that_are_not_served(
    sglang: Runtime, plugin: ModuleType, tmp_path: Path, setting: str, value: Any, text: str
) -> None:
    """Their caches would be stored wrongly, or not at all."""
    (bag,) = (bag for bag in (sglang.memory, sglang.spec, sglang.disagg) if hasattr(bag, setting))
    setattr(bag, setting, value)
    with pytest.raises(KVPlanError, match=text):
        Engine(plugin, tmp_path)


def test_settings_that_are_not_understood(plugin: ModuleType, tmp_path: Path) -> None:
    """They are refused by name, and so is a pool of another kind."""
    with pytest.raises(KVPlanError, match=r"SETTING: cannot read hicache_storage_backend_extra_config: .* got 'foldr'"):
        Engine(plugin, tmp_path, foldr="kv")
    with pytest.raises(KVPlanError, match="SETTING: cannot set interface_v1"):
        Engine(plugin, tmp_path, interface_v1=0)
    engine = Engine(plugin, tmp_path)
    engine.store.registered_pools["mamba"] = None
    with pytest.raises(KVPlanError, match=r"expected host pools beside kv and swa = \[\], got \['mamba'\]"):
        engine.store.on_host_pools_registered()


class Node(NamedTuple):
    """A node of the tree."""

    node_id: int


class Tree:
    """UnifiedRadixCache with a path of nodes."""

    page_size = PAGE

    def __init__(
        self, engine: Engine, sizes: Sequence[int], storage: Any = None, retained: int | None = None, gone: int = 0
    ) -> None:
        self.swa_retain_window = retained
        self.gone = gone  # the pages at the start whose windows SGLang has evicted
        self.cache_controller = self
        self.storage_backend = storage or engine.store
        self.tree_core = self
        self.sizes = sizes
        self.calls: list[Any] = []

    def collect_path_info(self, node_ids: list[int]) -> Any:
        return (tuple(Node(node) for node in range(node_ids[0] + 1)),)

    def build_storage_backup_spec(self, node_id: int, pass_prefix_keys: bool) -> Any:
        start = sum(self.sizes[:node_id])
        stop = start + self.sizes[node_id]
        tokens = array("q", TOKENS[start * PAGE : stop * PAGE])
        spec = StorageBackupSpec(tokens, slots(PAGES[start:stop]))
        held = max(start, self.gone)
        if self.swa_retain_window is not None and held < stop:
            spec.comp_xfers["swa"] = [PoolTransfer("swa", slots(WINDOW_PAGES[held:stop]))]
        return spec if stop <= 8 else None

    def prefetch_anchor_info(self, node_id: int) -> tuple[None, str]:
        return None, "blue"


def test_hooks_hand_on_the_prompt(plugin: ModuleType, tmp_path: Path) -> None:
    """Nodes are saved with the tokens before them, and requests searched with those that are cached."""
    engine, hooks = Engine(plugin, tmp_path), plugin.store_hooks
    tree = Tree(engine, [3, 3, 2, 1])

    def write(tree: Any, node_id: int) -> None:
        spec = tree.build_storage_backup_spec(node_id, False)
        hooks._write(enqueue, tree.cache_controller, spec.host_value, spec.token_ids, ["hash"], extra_pools=None)

    def enqueue(controller: Any, slots: Any, tokens: Any, hashes: Any, prefix_keys: Any, **options: Any) -> None:
        tree.calls.append(prefix_keys)

    hooks._back_up(write, tree, 1)
    (prompt,) = tree.calls
    assert [*prompt.tokens] == TOKENS[: 6 * PAGE]
    assert (prompt.key.cache_salt, prompt.table.ids.tolist()) == ("blue", PAGES[:6])
    hooks._back_up(write, tree, 3)  # its last node is not in host memory
    assert len(tree.calls) == 1

    def search(tree: Any, *arguments: Any, **options: Any) -> Any:
        return next(value for value in arguments if isinstance(value, plugin.store_prompts.PromptPages))

    known = {"matched_prefix_tokens": TOKENS[:48], "cache_salt": "blue"}
    assert [*hooks._prefetch(search, tree, "r", 0, TOKENS[48:], "last", None, **known).tokens] == TOKENS
    assert [*hooks._query(search, tree, 0, TOKENS[48:], cache_salt="blue").tokens] == TOKENS
    assert hooks._query(search, tree, 3, TOKENS, cache_salt="blue") == 0


@pytest.mark.parametrize(
    ("sizes", "retained", "gone", "held"),
    [
        ([3, 3, 2], 2 * PAGE, 0, range(6, 8)),
        ([3, 3, 2], 2 * PAGE + 1, 0, range(3, 8)),
        ([3, 3, 2], 8 * PAGE, 0, range(8)),
        ([3, 3, 2], 8 * PAGE, 4, range(4, 8)),
        ([3, 3, 2], 8 * PAGE, 6, range(6, 8)),
        ([8], 2 * PAGE, 5, range(5, 8)),
        ([8], 2 * PAGE, 8, range(8, 8)),
    ],
)
def test_windows_that_a_backup_may_read(
    plugin: ModuleType, tmp_path: Path, sizes: list[int], retained: int, gone: int, held: range
) -> None:
    """They are of the nodes that SGLang locks, from the last one on: what it may evict is another prompt's soon."""
    tree = Tree(Engine(plugin, tmp_path), sizes, retained=retained, gone=gone)
    prompt = plugin.store_hooks._backed_up(tree, len(sizes) - 1)
    assert prompt.table.ids.tolist() == PAGES[:8]
    assert prompt.window_table.ids.tolist() == [WINDOW_PAGES[page] for page in held]
    assert prompt.window_table.first == held.start


def test_other_storages_stay_as_they_are(plugin: ModuleType, tmp_path: Path) -> None:
    """Hooks hand on what SGLang has said."""
    hooks, tree = plugin.store_hooks, Tree(Engine(plugin, tmp_path), [3], storage=object())

    def call(*arguments: Any, **options: Any) -> Any:
        return arguments, options

    arguments, _ = hooks._write(call, tree.cache_controller, "slots", "tokens", ["hash"], ["before"])
    assert arguments == (tree.cache_controller, "slots", "tokens", ["hash"], ["before"])
    arguments, _ = hooks._prefetch(call, tree, "r", 0, [5], "last", ["before"])
    assert arguments == (tree, "r", 0, [5], "last", ["before"])
    arguments, _ = hooks._query(call, tree, 0, [5], "last", ["before"])
    assert arguments == (tree, 0, [5], "last", ["before"], None, None)


def test_the_class_comes_with_its_hooks(sglang: Runtime, plugin: ModuleType) -> None:
    """SGLang makes it by the name of the package."""
    assert plugin.KvplanStore is plugin.store.KvplanStore
    assert [target.rpartition(".")[2] for target in sglang.hooks.targets[:4]] == [
        "prefetch_from_storage",
        "query_storage_hit_length",
        "write_backup_storage",
        "write_storage",
    ]
