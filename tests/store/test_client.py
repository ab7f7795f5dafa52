"""Clients: what one engine has saved, another loads, in whatever parallel sizes, blocks and layouts the two are."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Blocks, KVPlanError, Model
from kvplan.protocol.page_keys import Chain
from kvplan.protocol.page_shards import shards_of
from kvplan.protocol.retention import keeping
from kvplan_nixl.serving.store import FileBackend, MemoryBackend, MemoryMover, StoreClient, StoreReader
from tests.store.engines import PAGE, PROMPT, QWEN, EngineWithStore

BLOCKS = {"attn": Blocks([3, 9, 5, 1, 7, 30, 2])}
"""Seven blocks of 16 tokens, which the prompt of 100 needs."""


def one_engine(backend: Any, **sizes: Any) -> EngineWithStore:
    """An engine of TP 1 with random memory."""
    return EngineWithStore.of(QWEN, backend, seed=5, **sizes)


@pytest.mark.parametrize("backend", ["memory", "files"])
def test_an_equal_engine_loads_what_was_saved(backend: str, tmp_path: Path) -> None:
    """The blocks of an engine that loads are those of the engine that saved; the last 4 of 100 tokens are no page."""
    kept = MemoryBackend() if backend == "memory" else FileBackend(tmp_path / "kv")
    writer = one_engine(kept)
    assert writer.find(PROMPT) == 0
    assert writer.save(PROMPT, BLOCKS, 100) == 6
    assert writer.save(PROMPT, BLOCKS, 100) == 0
    reader = EngineWithStore.of(QWEN, kept)
    assert reader.find(PROMPT) == 96
    tables = {"attn": Blocks([8, 0, 4, 6, 11, 12])}
    reader.load(PROMPT, tables, 96)
    (before,), (after,) = writer.caches, reader.caches
    assert after.contents(tables["attn"].ids.tolist()) == before.contents(BLOCKS["attn"].ids.tolist()[:6])


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, {"tp": 4}, {"layout": "BLNHC"}, {"tp": 8}])
def test_a_cache_comes_back_through_any_engine(sizes: dict[str, Any]) -> None:
    """TP 1 saves, another engine loads and saves again elsewhere, TP 1 loads that: the first bytes."""
    first, second = MemoryBackend(), MemoryBackend()
    writer = one_engine(first)
    writer.save(PROMPT, BLOCKS, 96)
    other = EngineWithStore.of(QWEN, first, **sizes)
    other.load(PROMPT, {"attn": Blocks([4, 6, 8, 10, 12, 14])}, other.find(PROMPT))
    elsewhere = {"attn": Blocks([4, 6, 8, 10, 12, 14])}
    moved = EngineWithStore(
        tuple(
            attrs.evolve(cache, client=StoreClient(second, cache.worker, tokens_per_page=PAGE))
            for cache in other.caches
        )
    )
    assert moved.save(PROMPT, elsewhere, 96) > 0
    reader = EngineWithStore.of(QWEN, second)
    reader.load(PROMPT, BLOCKS, reader.find(PROMPT))
    ids = BLOCKS["attn"].ids.tolist()[:6]
    assert reader.find(PROMPT) == 96
    assert reader.caches[0].contents(ids) == writer.caches[0].contents(ids)


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_threads_copy_shards_of_many_ranges(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copies its own, of long ranges or of short ones."""
    monkeypatch.setattr("kvplan_nixl.serving.store.mover.LOCKED_ITEMS", 1)
    backend = MemoryBackend()
    writer, reader = one_engine(backend, layout=layout), EngineWithStore.of(QWEN, backend, layout=layout)
    assert writer.save(PROMPT, BLOCKS, 96) == 6
    reader.load(PROMPT, {"attn": Blocks([8, 0, 4, 6, 11, 12])}, 96)
    (before,), (after,) = writer.caches, reader.caches
    assert after.contents([8, 0, 4, 6, 11, 12]) == before.contents(BLOCKS["attn"].ids.tolist()[:6])


def test_a_mover_copies_specs_that_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are checked before the first is copied, and are all there afterwards."""
    move = MemoryMover.move
    monkeypatch.setattr(MemoryMover, "move", lambda mover, specs: move(mover, iter(specs)))  # type: ignore[arg-type]
    backend = MemoryBackend()
    writer, reader = one_engine(backend), EngineWithStore.of(QWEN, backend)
    assert writer.save(PROMPT, BLOCKS, 96) == 6
    reader.load(PROMPT, BLOCKS, 96)
    ids = BLOCKS["attn"].ids.tolist()[:6]
    assert reader.caches[0].contents(ids) == writer.caches[0].contents(ids)


def test_a_reader_of_other_blocks_rounds_down() -> None:
    """A reader whose blocks have 64 tokens uses 64 of 96."""
    backend = MemoryBackend()
    one_engine(backend).save(PROMPT, BLOCKS, 96)
    assert one_engine(backend, tokens_per_block=64).find(PROMPT, step=64) == 64
    assert one_engine(backend, tokens_per_block=24).find(PROMPT, step=24) == 96


def test_a_prompt_that_differs_shares_what_is_before() -> None:
    """One other token, or one other fact, ends the prefix at its page."""
    backend = MemoryBackend()
    writer = one_engine(backend)
    writer.save(PROMPT, BLOCKS, 96)
    (cache,) = writer.caches
    assert writer.find([*range(100, 150), 0, *range(151, 200)]) == 48
    assert cache.client.find(cache.client.chain(PROMPT, [(33, "image 7")])) == 32
    assert cache.client.find(cache.client.chain(PROMPT, [(0, "adapter sql")])) == 0


@pytest.mark.parametrize("change", ["model", "dtype", "page"])
def test_another_cache_is_a_miss(change: str) -> None:
    """Another revision, another dtype, another page size: never a hit, never an error."""
    backend = MemoryBackend()
    one_engine(backend).save(PROMPT, BLOCKS, 96)
    model = QWEN
    if change == "model":
        model = attrs.evolve(QWEN, name="a small model, weights 2")
    if change == "dtype":
        model = QWEN.with_dtypes("float16")
    (worker,) = model.engine("e", num_blocks=9)
    reader = StoreReader(backend, worker, tokens_per_page=32 if change == "page" else PAGE)
    assert reader.find(reader.chain(PROMPT)) == 0


def test_the_same_key_with_another_dtype_is_a_miss() -> None:
    """Two engines name their model alike but keep other dtypes: each finds its own pages, beside the other's."""
    backend = MemoryBackend()
    one_engine(backend).save(PROMPT, BLOCKS, 96)
    other = EngineWithStore.of(QWEN.with_dtypes("float16"), backend, seed=7)
    assert other.find(PROMPT) == 0
    assert other.save(PROMPT, BLOCKS, 48) == 3
    assert (other.find(PROMPT), one_engine(backend).find(PROMPT)) == (48, 96)


def test_what_pipeline_stages_saved_apart_is_a_hit_together() -> None:
    """A reader of all layers finds nothing while one stage is missing, and all when it has come."""
    backend = MemoryBackend()
    first, second = EngineWithStore.of(QWEN, backend, seed=3, pp=2).caches
    first.client.save(first.client.chain(PROMPT), BLOCKS, {"attn": (0, 96)})
    assert one_engine(backend).find(PROMPT) == 0
    second.client.save(second.client.chain(PROMPT), BLOCKS, {"attn": (0, 48)})
    assert one_engine(backend).find(PROMPT) == 48


def test_a_window_needs_its_last_positions_alone() -> None:
    """A group with a window of 20 tokens needs no pages before those, and others do."""
    backend = MemoryBackend()
    (cache,) = one_engine(backend).caches
    client = cache.client
    client.save(client.chain(PROMPT), BLOCKS, {"attn": (48, 96)})
    attended = {"attn": lambda position: max(0, position - 19)}
    windowed = StoreReader(backend, cache.worker, tokens_per_page=PAGE, attended=attended)
    chain = windowed.chain(PROMPT)
    assert (windowed.find(chain), client.find(chain)) == (96, 0)
    assert windowed.needs(0, 96) == {"attn": (77, 96)}
    # windows of a shorter prefix may lack what those of a longer one have
    assert (windowed.find(chain, stop=80), windowed.find(chain, stop=64)) == (80, 0)
    backend.delete(f"{chain.space}/{chain.keys[-1]}/{shards_of(cache.worker, PAGE)[0].name}")
    assert windowed.find(chain) == 80


def test_a_window_of_less_than_a_page_is_the_end_of_a_page() -> None:
    """An engine that keeps 7 positions before the next one stores the last 8 of pages of 16, where it has them."""
    backend = MemoryBackend()
    (cache,) = one_engine(backend).caches
    worker = keeping(cache.worker, {"attn": 7})
    client = StoreClient(backend, worker, tokens_per_page=PAGE)
    chain = client.chain(PROMPT)
    assert client.save(chain, BLOCKS, {"attn": (57, 96)}) == 2  # of the page up to 64 there are 7
    assert client.save(chain, BLOCKS, {"attn": (40, 96)}) == 2  # and now 16 in one before
    assert client.save(chain, BLOCKS, {"attn": (0, 96)}) == 2
    whole, *_ = shards_of(cache.worker, PAGE)
    shard, *_ = shards_of(worker, PAGE)
    assert (shard.group.name, shard.num_tokens, shard.tokens_per_page) == ("window", 8, None)
    assert 2 * shard.num_bytes == whole.num_bytes

    stored = [shards_of(keeping(cache.worker, {"attn": window}), PAGE)[0].num_tokens for window in (1, 2, 5, 8, 9, 99)]
    assert stored == [1, 2, 8, 8, 16, 16]

    def reader(window: int) -> EngineWithStore:
        (empty,) = EngineWithStore.of(QWEN, backend).caches
        attended = {"attn": lambda position: max(0, position - window)}
        windowed = StoreClient(backend, empty.worker, tokens_per_page=PAGE, attended=attended)
        return EngineWithStore((attrs.evolve(empty, client=windowed),))

    assert [reader(window).find(PROMPT) for window in (7, 8, 9, 16)] == [96, 96, 0, 0]
    # a prefix that ends inside of a page needs other positions
    assert reader(8).find(PROMPT, step=8) == 0
    loaded = reader(7)
    ids = BLOCKS["attn"].ids.tolist()[2:3]
    loaded.load(PROMPT, BLOCKS, 48)
    after, before = (each.contents(ids) for each in (loaded.caches[0], cache))
    for name in before:
        rows, wanted = (np.frombuffer(each[name], np.uint16).reshape(4, PAGE, -1) for each in (after, before))
        assert not rows[:, :9].any()
        assert (rows[:, 9:] == wanted[:, 9:]).all()


def test_states_are_found_where_they_were_kept() -> None:
    """A hybrid model finds the prefix after which its states were saved, and no longer one."""
    hybrid = Model.shipped("granite-4.0-h-tiny")
    layers = (hybrid.layers[0], next(layer for layer in hybrid.layers if layer[0].paged))
    model = attrs.evolve(hybrid, layers=layers)
    backend = MemoryBackend()
    writer = EngineWithStore.of(model, backend, seed=4, tp=2)
    tables = {"attn": BLOCKS["attn"], "state": Blocks([6], first=2)}
    for cache in writer.caches:
        client = cache.client
        client.save(client.chain(PROMPT), tables, {"attn": (0, 96), "state": (64, 64)})
    reader = EngineWithStore.of(model, backend, tp=1)
    assert reader.find(PROMPT) == 64
    reader.load(PROMPT, {"attn": Blocks([1, 2, 3, 4]), "state": Blocks([9], first=5)}, 64)
    again = EngineWithStore.of(model, backend, tp=2)
    again.load(PROMPT, tables, 64)
    for before, after in zip(writer.caches, again.caches, strict=True):
        states = [view.name for view in before.worker.views if view.group == "state"]
        assert {k: before.contents([6])[k] for k in states} == {k: after.contents([6])[k] for k in states}
    # without the first page there is no prefix, nor a state that ends one
    chain = again.caches[0].client.chain(PROMPT)
    page = f"{chain.space}/{chain.keys[0]}"
    for shard in backend.files(page):
        backend.delete(f"{page}/{shard}")
    assert again.find(PROMPT) == 0


def test_a_small_buffer_is_filled_again_and_again() -> None:
    """A buffer of two pages moves six."""
    backend = MemoryBackend()
    (cache,) = one_engine(backend).caches
    page_bytes = sum(shard.num_bytes for shard in shards_of(cache.worker, PAGE))
    client = StoreClient(backend, cache.worker, tokens_per_page=PAGE, buffer_bytes=2 * page_bytes)
    assert client.save(client.chain(PROMPT), BLOCKS, {"attn": (0, 96)}) == 6
    reader = EngineWithStore.of(QWEN, backend)
    reader.load(PROMPT, BLOCKS, 96)
    ids = BLOCKS["attn"].ids.tolist()[:6]
    assert reader.caches[0].contents(ids) == cache.contents(ids)
    with pytest.raises(KVPlanError, match=r"^MEMORY: cannot place pages of a store: expected a buffer of at least"):
        StoreClient(backend, cache.worker, tokens_per_page=PAGE, buffer_bytes=page_bytes - 1)


def test_a_backend_at_hand_is_read_in_short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a page at least, however small they are to be, and of no more pages than fit the buffer."""
    backend = MemoryBackend()
    (writer,), (reader,) = one_engine(backend).caches, EngineWithStore.of(QWEN, backend).caches
    runs: list[int] = []
    move = StoreClient._move

    def counted(client: StoreClient, *arguments: Any) -> None:
        runs.append(len(arguments[3]))
        move(client, *arguments)

    monkeypatch.setattr(StoreClient, "_move", counted)
    page_bytes = sum(shard.num_bytes for shard in shards_of(writer.worker, PAGE))
    chain = writer.client.chain(PROMPT)
    for run_bytes, pages in ((1, [1] * 6), (4 * page_bytes, [4, 2]), (1 << 40, [6])):
        runs.clear()
        monkeypatch.setattr("kvplan_nixl.serving.store.client.RUN_BYTES", run_bytes)
        writer.client.save(chain, BLOCKS, {"attn": (0, 96)})
        reader.client.load(chain, BLOCKS, {"attn": (0, 96)})
        assert runs == [*pages, *pages]
        ids = BLOCKS["attn"].ids.tolist()[:6]
        assert reader.contents(ids) == writer.contents(ids)
        for entry in list(backend.entries()):
            backend.delete(entry.name)
        for memory in reader.memory.values():
            memory[:] = 0


def test_engines_of_several_parallel_sizes_write_the_same_files() -> None:
    """TP 1, 2 and 4 write equal names: whoever comes second finds them all."""
    names = []
    for tp in (1, 2, 4):
        shards = [shard.name for worker in QWEN.engine("e", tp=tp, num_blocks=9) for shard in shards_of(worker, PAGE)]
        names.append(shards)
    assert names[0] == names[1] == names[2]


def test_a_worker_has_to_name_its_model() -> None:
    """Without a model's name a key would be anybody's."""
    (worker,) = QWEN.engine("e", num_blocks=9)
    with pytest.raises(KVPlanError, match=r"^MODEL: cannot store pages of e/0"):
        shards_of(attrs.evolve(worker, model=""), PAGE)


def test_chains_bind_all_tokens_before() -> None:
    """Keys differ from the first difference on; the model and the page size count too."""
    chain = Chain.of("m", range(64), tokens_per_page=16)
    other = Chain.of("m", [*range(20), 7, *range(21, 64)], tokens_per_page=16)
    assert [a == b for a, b in zip(chain.keys, other.keys, strict=True)] == [True, False, False, False]
    keys = {*chain.keys, *Chain.of("m2", range(64), tokens_per_page=16).keys}
    assert len(keys | {*Chain.of("m", range(64), tokens_per_page=32).keys}) == 10


class FarBackend(MemoryBackend):
    """A store that answers eight questions at a time: those of one kind only when some of them have come together."""

    at_once = 8

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self._together = ("", 0)
        self._waiting = 0
        self._turn = threading.Condition()
        self._listed: set[str] = set()

    def expect(self, kind: str, together: int) -> None:
        """Forget what was asked, and answer questions of a kind when so many of them are waiting."""
        self.asked.clear()
        self._together = (kind, together)

    def _wait(self, kind: str, name: str) -> None:
        with self._turn:
            self.asked.append(f"{kind} {name}")
            if kind != self._together[0]:
                return
            self._waiting += 1
            if self._waiting == self._together[1]:
                self._together = ("", 0)
                self._waiting = 0
                self._turn.notify_all()
            while kind == self._together[0]:
                assert self._turn.wait(60), f"{self._waiting} of {self._together[1]} questions came"

    def files(self, page: str) -> tuple[str, ...]:
        self._wait("list again" if page in self._listed else "list", page)
        self._listed.add(page)
        return super().files(page)

    def open(self, name: str) -> Any:
        self._wait("open", name)
        return super().open(name)

    def put(self, name: str, chunks: Any) -> bool:
        self._wait("put", name)
        return super().put(name, chunks)


def test_a_store_that_is_far_away_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six pages are listed, read and written together; where the first is none, nothing else is asked for."""
    monkeypatch.setattr("kvplan_nixl.serving.store.client.RUN_BYTES", 1)  # of a backend at hand
    backend = FarBackend()
    writer = one_engine(backend)
    backend.expect("put", 8)
    assert writer.save(PROMPT, BLOCKS, 96) == 6
    reader = EngineWithStore.of(QWEN, backend)
    backend.expect("list", 1)
    assert reader.find([0, *PROMPT[1:]]) == 0
    assert len(backend.asked) == 1
    backend.expect("list", 1)
    assert reader.find([*PROMPT[:16], *range(80)]) == 16
    backend.expect("list", 5)
    assert reader.find([*PROMPT[:16], *range(1, 81)]) == 16
    backend.expect("open", 8)
    reader.load(PROMPT, BLOCKS, 96)
    assert len(backend.asked) == len({*backend.asked})
    ids = BLOCKS["attn"].ids.tolist()[:6]
    assert reader.caches[0].contents(ids) == writer.caches[0].contents(ids)


def test_a_load_that_fails_has_ended() -> None:
    """No read is under way afterwards, which would write to a buffer that the next load uses."""
    backend = FarBackend()
    writer = one_engine(backend)
    writer.save(PROMPT, BLOCKS, 96)
    chain = writer.caches[0].client.chain(PROMPT)
    shard = min(backend.files(f"{chain.space}/{chain.keys[0]}"))
    backend.delete(f"{chain.space}/{chain.keys[0]}/{shard}")
    backend.put(f"{chain.space}/{chain.keys[0]}/{shard}", [b"torn"])
    with pytest.raises(KVPlanError, match=r"^PAGE"):
        writer.load(PROMPT, BLOCKS, 96)
    num_asked = len(backend.asked)
    time.sleep(0.05)
    assert len(backend.asked) == num_asked
