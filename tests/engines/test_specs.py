"""Caches of vLLM's sparse and hybrid models, planned, allocated and kept by vLLM's own code, and moved by plans.

Specs are those of :mod:`tests.engines.specs`. vLLM's planning makes groups of them, its allocation the views that a
connector gets, and its managers give blocks to a request and take them back as it is computed. Rows are written and
read at the addresses of vLLM's kernels, without kvplan. No model type is named to kvplan.

For another release than the one installed, have its Python files first on ``PYTHONPATH``, or their folder in
``KVPLAN_VLLM_FILES``: then :func:`test_of_another_release` runs this file with it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Blocks, Group, KVPlanError, Worker, plan_reads
from kvplan.bridges import RankInfo, from_vllm, vllm_model
from kvplan.protocol import Handoff, Read, Source
from kvplan.protocol.groups import first_listed, whole_blocks
from kvplan.protocol.read import request_of
from tests.engines import specs
from tests.engines.specs import Cached, Caches, allocated, engine_config, label, places, planned, row_bytes, spec_of

block_pool = pytest.importorskip("vllm.v1.core.block_pool")
managers = pytest.importorskip("vllm.v1.core.single_type_kv_cache_manager")
description = pytest.importorskip("kvplan_nixl.vllm.description")
tables = pytest.importorskip("kvplan_nixl.vllm.tables")

TESTS = ("tests/engines/test_specs.py", "tests/engines/test_kinds.py")
"""What runs with another release too."""

NUM_BLOCKS = 320
STEP = 192
"""Tokens that prefill computes in a step."""


@attrs.frozen(eq=False)
class Engine:
    """An engine's model, and one request of it: its blocks in each group, and which of them are null."""

    name: str
    make: Callable[[int], Caches]
    tp: int = 1
    layout: str = "BLHNC"

    @property
    def caches(self) -> Caches:
        """The caches of a rank."""
        return self.make(self.tp)

    @property
    def cache(self) -> Any:
        """The ``KVCacheConfig`` of each rank."""
        return planned(self.caches, self.layout, NUM_BLOCKS)


def managers_of(cache: Any, blocks_used: int) -> list[Any]:
    """vLLM's managers of a cache's groups, over one pool of blocks, of which some are another request's."""
    pool = block_pool.BlockPool(cache.num_blocks, enable_caching=False, hash_block_size=4)
    pool.get_new_blocks(blocks_used)
    return [
        managers.get_manager_for_kv_cache_spec(
            next(iter(getattr(group.kv_cache_spec, "kv_cache_specs", {0: group.kv_cache_spec}).values())),
            max_in_flight_tokens=STEP,
            max_model_len=1 << 16,
            block_pool=pool,
            enable_caching=False,
            kv_cache_group_id=index,
            scheduler_block_size=256,
        )
        for index, group in enumerate(cache.kv_cache_groups)
    ]


def computed(cache: Any, num_tokens: int) -> list[list[int]]:
    """The blocks of a request that vLLM has computed, in steps."""
    kept = managers_of(cache, 3)
    for stop in [*range(STEP, num_tokens, STEP), num_tokens]:
        for manager in kept:
            manager.remove_skipped_blocks("request", max(0, stop - STEP))
            manager.allocate_new_blocks("request", stop, stop)
    return [[block.block_id for block in manager.req_to_blocks["request"]] for manager in kept]


def loaded(cache: Any, num_tokens: int) -> list[list[int]]:
    """The blocks that vLLM gives to a request whose first tokens a connector loads."""
    kept = managers_of(cache, 7)
    for manager in kept:
        manager.add_local_computed_blocks("request", [], 0, num_tokens)
    for manager in kept:
        manager.allocate_external_computed_blocks("request", 0, num_tokens)
    return [[block.block_id for block in manager.req_to_blocks["request"]] for manager in kept]


def described(engine: Engine, cache: Any, views: Mapping[str, Any], rank: int) -> Worker:
    """The worker of a rank, by vLLM's objects alone."""
    layers = {
        name: SimpleNamespace(get_attn_backend=lambda backend=cached.backend: SimpleNamespace(get_name=lambda: backend))
        for name, cached in engine.caches.items()
    }
    heads = {name: cached.heads for name, cached in engine.caches.items() if cached.heads}
    model = vllm_model(
        "a model",
        RankInfo(engine.name, rank, rank, engine.tp),
        cache,
        layers,
        kv_heads=lambda name, *_: heads.get(name, 1),
    )
    return from_vllm(model, RankInfo(engine.name, rank, rank, engine.tp), cache, views, layers)


def rows_of(
    engine: Engine, cache: Any, ids: list[list[int]], rank: int, num_tokens: int, first: Mapping[int, int]
) -> Iterator[tuple[str, int, int, list[tuple[int, int]]]]:
    """What a rank has of a request: each row's layer, number and head, and its bytes.

    ``first`` is the first position that is looked at, by group.
    """
    placed = places(cache)
    for index, group in enumerate(cache.kv_cache_groups):
        for name in group.layer_names:
            cached, spec = engine.caches[name], spec_of(group, name)
            local = int(spec.num_heads)
            begin = 0 if cached.heads is None else rank * cached.heads // engine.tp
            for row, block, slot in _slots(cached, spec, ids[index], num_tokens, first.get(index, 0)):
                for head in range(local):
                    ranges = row_bytes(cached, spec, placed[name], block, slot, head, engine.layout[-3:-1])
                    yield name, row, begin + head, [*ranges]


def _slots(cached: Cached, spec: Any, ids: list[int], num_tokens: int, first: int) -> Iterator[tuple[int, int, int]]:
    """Each row of a request with its block and its slot in it."""
    if cached.ring:
        (block,) = ids
        for slot in range(cached.ring):
            # A slot that no position has filled yet moves too, as the source has it.
            last = num_tokens - 1 - (num_tokens - 1 - slot) % cached.ring
            yield (last if last >= 0 else 1 << 20), block, slot
        return
    tokens = cached.tokens
    for row in range(first // tokens, -(-num_tokens // tokens)):
        block = ids[row * tokens // spec.block_size]
        if block:
            yield row, block, row * tokens % spec.block_size // tokens


def fill(memory: Any, rows: Iterator[tuple[str, int, int, list[tuple[int, int]]]]) -> None:
    """Write the label of each row."""
    for name, row, head, ranges in rows:
        content = label(name, row, head, sum(length for _, length in ranges))
        for offset, length in ranges:
            memory[offset : offset + length], content = content[:length], content[length:]


def read_of(
    source: Any, destination: Any, ids: list[list[int]], local_ids: list[list[int]], tokens: tuple[int, int]
) -> Read:
    """What a connector reads: all positions that a group attends to, in whole blocks as far as they are there."""
    begin, num_tokens = tokens
    remote, local = source.of_ids(ids), destination.of_ids(local_ids)
    kept = {name: first_listed(remote[name], source.block_sizes[name]) for name in source.positioned}
    engine = Source("prefill", "start", "host", 1)
    handoff = Handoff(engine, "lease", num_tokens, "prompt", remote, kept)
    ranges = {}
    for name in destination.positioned:
        attended = description.first_attended(destination.groups[name], num_tokens)
        whole = whole_blocks(
            (begin, num_tokens),
            attended=attended,
            tokens_per_block=destination.block_sizes[name],
            listed=first_listed(local[name], destination.block_sizes[name]),
            kept=handoff.first_kept(name, attended),
        )
        ranges[name] = whole.start, whole.stop
    return Read(request="request", source=engine, lease="lease", local=local, remote=remote, tokens=ranges)


def moved(source: Engine, destination: Engine, num_tokens: int, num_cached: int = 0) -> int:
    """Move a request from a source to all ranks of a destination, and return how many bytes were compared.

    Each row that the destination attends to must be there, and no other byte may change.
    """
    num_compared = 0
    for rank, memory, expected in received_by(source, destination, num_tokens, copy, num_cached=num_cached):
        wrong = np.flatnonzero(memory != expected)
        assert not wrong.size, f"{wrong.size} bytes of rank {rank}, from {wrong[0]} on"
        num_compared += memory.size
    return num_compared


def received_by(
    source: Engine,
    destination: Engine,
    num_tokens: int,
    copy: Callable[[Any], None],
    tell: Callable[[str, Any], None] = lambda engine, memory: None,
    num_cached: int = 0,
) -> Iterator[tuple[int, Any, Any]]:
    """The bytes of each rank of a destination that has read a request, and what they should be.

    ``tell`` gets the memory of each rank before anything moves.
    """
    source_cache, cache = source.cache, destination.cache
    description.check_kinds(source_cache)
    ids, local_ids = computed(source_cache, num_tokens), loaded(cache, num_tokens)
    senders = []
    memories = []
    for rank in range(source.tp):
        memory, views = allocated(source_cache, source.layout, rank)
        fill(memory, rows_of(source, source_cache, ids, rank, num_tokens, {}))
        memories.append(memory)
        senders.append(described(source, source_cache, views, rank))
    sent = tables.BlockTables(engine_config(), source_cache)
    received = tables.BlockTables(engine_config(), cache)
    read = read_of(sent, received, ids, local_ids, (num_cached, num_tokens))
    first = {received.indices[name]: begin for name, (begin, _) in read.tokens.items()}
    for rank in range(destination.tp):
        memory, views = allocated(cache, destination.layout, 100 + rank)
        tell(destination.name, memory)
        expected = memory.copy()
        worker = described(destination, cache, views, rank)
        plan = plan_reads(worker, senders)
        for spec in plan.bind(**request_of(read, plan, to_block_end=False)):
            copy(spec)
        fill(expected, rows_of(destination, cache, local_ids, rank, num_tokens, first))
        yield rank, memory, expected


def copy(read: Any) -> None:
    """Moves the bytes of a read from one part of this process's memory to another."""
    for (local, length, _), (remote, *_) in zip(*(rows.tolist() for rows in read.descriptors()), strict=True):
        ctypes.memmove(local, remote, length)


LENGTHS = (1, 700, 1024)
RANKS = ((1, 1), (1, 2), (2, 1), (4, 8))


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", ["DeepSeek-V4", "DeepSeek-V4.1", "Qwen4-Exp", "GLM-5-Next", "Inkling", "dots3.note"])
def test_ranks(model: str, ranks: tuple[int, int], num_tokens: int) -> None:
    """Each row arrives where the destination's kernels look for it, whatever the number of ranks."""
    make = specs.MODELS[model]
    assert moved(Engine("prefill", make, ranks[0]), Engine("decode", make, ranks[1]), num_tokens)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("ranks", [(2, 2), (2, 4), (4, 2)])
def test_ranks_of_one_head(ranks: tuple[int, int], num_tokens: int) -> None:
    """Summaries and rings of Step-5 are of a head, so ranks divide them as they divide K and V."""
    make = specs.step5
    assert moved(Engine("prefill", make, ranks[0]), Engine("decode", make, ranks[1]), num_tokens)


@pytest.mark.parametrize("num_tokens", [129, 700])
@pytest.mark.parametrize("ranks", [(2, 1), (4, 8)])
@pytest.mark.parametrize(
    ("make", "source", "destination"),
    [
        (specs.deepseek_v4, {}, {"block": 512}),
        (specs.deepseek_v4, {"block": 512}, {"window_block": 128}),
        (specs.deepseek_v4, {"window_block": 32}, {"block": 1024}),
        (specs.deepseek_v41, {}, {"block": 64}),
        (specs.deepseek_v41, {"record": 584, "block": 64}, {"record": 584, "window_block": 64}),
        (specs.deepseek_v41, {"record": 288}, {"record": 288, "block": 64, "window_block": 64}),
        (specs.deepseek_v41, {"replay": False}, {}),
        (specs.qwen4, {}, {"block": 128}),
        (specs.glm5_next, {}, {"block": 256}),
        (specs.inkling, {}, {"block": 32}),
        (specs.dots3_note, {}, {"block": 48}),
    ],
)
def test_blocks(
    make: Any, source: dict[str, Any], destination: dict[str, Any], ranks: tuple[int, int], num_tokens: int
) -> None:
    """Blocks of unequal size divide the rows anew: values and scales of a row have other places in them."""
    prefill = Engine("prefill", partial(make, **source), ranks[0])
    decode = Engine("decode", partial(make, **destination), ranks[1])
    assert moved(prefill, decode, num_tokens)


@pytest.mark.parametrize("num_cached", [512, 1024])
@pytest.mark.parametrize("model", ["DeepSeek-V4", "DeepSeek-V4.1", "Qwen4-Exp", "GLM-5-Next"])
def test_behind_a_cached_prefix(model: str, num_cached: int) -> None:
    """Rows before it stay as they are. Where all is cached, a ring comes all the same."""
    make = specs.MODELS[model]
    assert moved(Engine("prefill", make, 2), Engine("decode", make, 1), 1024, num_cached)


@pytest.mark.parametrize("layouts", [("BLNHC", "BLHNC"), ("BLHNC", "BLNHC")])
@pytest.mark.parametrize("model", ["Qwen4-Exp", "GLM-5-Next", "Inkling"])
def test_layouts(model: str, layouts: tuple[str, str]) -> None:
    """Heads inside or outside of tokens: also the slots of a ring, which a spec counts as heads."""
    make = specs.MODELS[model]
    assert moved(Engine("prefill", make, 1, layouts[0]), Engine("decode", make, 2, layouts[1]), 700)


@pytest.mark.parametrize("make", [specs.plain, specs.windows])
@pytest.mark.parametrize(
    ("layouts", "ranks", "blocks"),
    [
        (("BHLNC", "BHLNC"), (1, 2), (16, 16)),
        (("BHLNC", "BHLNC"), (4, 8), (16, 64)),
        (("BHLNC", "BLHNC"), (2, 4), (16, 16)),
        (("BHLNC", "LBNHC"), (1, 4), (64, 16)),
        (("BLHNC", "BHLNC"), (2, 1), (16, 16)),
    ],
)
def test_heads_outside_layers(
    make: Callable[..., Caches], layouts: tuple[str, str], ranks: tuple[int, int], blocks: tuple[int, int]
) -> None:
    """vLLM's BHLNC: heads of a block side by side, each with all layers of its group."""
    prefill, decode = (
        Engine(name, partial(make, block=block), tp, layout)
        for name, block, tp, layout in zip(("prefill", "decode"), blocks, ranks, layouts, strict=True)
    )
    assert moved(prefill, decode, 200)


def _runs(indices: Any) -> list[tuple[int, int]]:
    """The ranges of ascending indices."""
    parts = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
    return [(part[0], part[-1] + 1) for part in parts if part.size]


def test_regions_by_their_first_address_alone() -> None:
    """vllm-project/vllm#57661: a ring that begins where a window does is sent for the window's length.

    Groups overlay each other, so the first layer of each begins at byte 0. NixlConnector 0.33 finds a region by that
    address and takes the length of the first one: 19,008 bytes in place of 32,768.
    """
    prefill, decode = (Engine(name, partial(specs.deepseek_v41, record=584)) for name in ("prefill", "decode"))
    cache = decode.cache
    (rings,) = [group for group in cache.kv_cache_groups if "compressor" in group.layer_names[0]]
    windows = cache.kv_cache_groups[0]
    placed, window_bytes = places(cache), spec_of(windows, windows.layer_names[0]).page_size_bytes
    ring, window = rings.layer_names[0], windows.layer_names[0]
    ring_bytes = spec_of(rings, ring).page_size_bytes
    assert (placed[ring].offset, window_bytes, ring_bytes) == (placed[window].offset, 19_008, 32_768)
    ((block,),) = [loaded(cache, 700)[cache.kv_cache_groups.index(rings)]]
    begin = placed[ring].offset + block * placed[ring].stride
    base = 0

    def copy_window(read: Any) -> None:
        """Moves what NixlConnector would: all but the end of the first ring."""
        for (local, length, _), (remote, *_) in zip(*(rows.tolist() for rows in read.descriptors()), strict=True):
            into = local - base - begin
            is_lost = np.zeros(length, bool)
            if into < ring_bytes and into + length > 0:
                is_lost[max(0, window_bytes - into) : max(0, ring_bytes - into)] = True
            sent = np.flatnonzero(~is_lost)
            for start, stop in _runs(sent):
                ctypes.memmove(local + int(start), remote + int(start), int(stop - start))

    def regions_of(engine: str, memory: Any) -> None:
        nonlocal base
        base = memory.ctypes.data if engine == "decode" else base

    received = received_by(prefill, decode, 700, copy_window, regions_of)
    ((_, memory, expected),) = received
    wrong = np.flatnonzero(memory != expected) - begin
    assert window_bytes <= wrong.min()
    assert wrong.max() < ring_bytes
    # a byte in 256 is right by chance
    assert 13_500 < wrong.size <= ring_bytes - window_bytes
    assert moved(prefill, decode, 700)


@pytest.mark.parametrize(
    ("make", "source", "destination", "text"),
    [
        (specs.deepseek_v41, {"record": 584}, {}, "cannot pair .*swa_cache.attn"),
        (specs.deepseek_v41, {"record": 288}, {}, "cannot pair .*: expected 528 .*, got 288"),
        (specs.deepseek_v41, {"drafts": 7}, {}, "axis 'position' of tensor .*ring': expected 8 .*, got 16"),
        (specs.qwen4, {}, {"drafts": 3}, "axis 'position' of tensor .*ring': expected 32 .*, got 16"),
        (specs.step5, {}, {"block": 128}, "axis 'position' of tensor .*ring': expected 128 .*, got 64"),
    ],
)
def test_other_rows_are_refused(make: Any, source: Any, destination: Any, text: str) -> None:
    """Records of another size, and rings of another length: the field and both values are named."""
    prefill = Engine("prefill", partial(make, **source), 2)
    decode = Engine("decode", partial(make, **destination), 2)
    with pytest.raises(KVPlanError, match=text):
        moved(prefill, decode, 700)


@pytest.mark.parametrize("num_tokens", [5, 13, 16, 700])
@pytest.mark.parametrize("drafts", [(0, 7), (7, 0)])
def test_rings_of_unequal_length_as_windows(drafts: tuple[int, int], num_tokens: int) -> None:
    """Rings of 8 and 16 rows both have the last 8 positions: position ``p`` is in slot ``p % rows`` of one block.

    Described as a window, a ring's table lists its block for each lap. A destination may list a block once, so a lap
    that ends is bound apart from the next one.
    """
    engines = [
        Engine(name, partial(specs.deepseek_v41, drafts=number))
        for name, number in zip(("prefill", "decode"), drafts, strict=True)
    ]
    memories, workers, blocks, ids = [], [], [], []
    for rank, (engine, make) in enumerate(zip(engines, (computed, loaded), strict=True)):
        memory, views = allocated(engine.cache, engine.layout, rank)
        memories.append(memory)
        ids.append(make(engine.cache, num_tokens))
        worker, group = ring_as_window(described(engine, engine.cache, views, 0))
        workers.append(worker)
        blocks.append(ids[-1][int(group.removeprefix("group"))][0])
    (source, destination), (remote, local) = engines, workers
    fill(memories[0], rows_of(source, source.cache, ids[0], 0, num_tokens, {}))
    plan = plan_reads(local, [remote])
    sizes = [int(worker.groups[0].tokens_per_block or 0) for worker in (local, remote)]
    start, begins_anew = max(0, num_tokens - min(sizes)), (num_tokens - 1) // sizes[0] * sizes[0]
    for low, high in ((start, begins_anew), (max(start, begins_anew), num_tokens)):
        if low < high:
            laps = [range(low // size, (high - 1) // size + 1) for size in sizes]
            tables_of = [
                {worker.groups[0].name: Blocks([block] * len(own), first=own.start)}
                for worker, block, own in zip((local, remote), blocks[::-1], laps, strict=True)
            ]
            for spec in plan.bind(local=tables_of[0], remote=tables_of[1], tokens=(low, high)):
                copy(spec)
    num_compared = 0
    for name, row, _, ranges in rows_of(destination, destination.cache, ids[1], 0, num_tokens, {}):
        if destination.caches[name].ring and start <= row < num_tokens:
            found = np.concatenate([memories[1][offset : offset + length] for offset, length in ranges])
            assert (found == label(name, row, 0, found.size)).all()
            num_compared += 1
    assert num_compared == 2 * (num_tokens - start)


def ring_as_window(worker: Worker) -> tuple[Worker, str]:
    """A worker's rings alone, as a group of positions, and the group's name."""
    rings = [view for view in worker.views if view.name.endswith(".ring")]
    (name,) = {view.group for view in rings}
    views = []
    for view in rings:
        axes = [attrs.evolve(axis, name="token") if axis.name == "position" else axis for axis in view.axes]
        views.append(attrs.evolve(view, axes=axes))
    (rows,) = {axis.extent for view in views for axis in view.axes if axis.name == "token"}
    return attrs.evolve(worker, groups=[Group(name, rows)], views=views), name


def invented(tp: int, block: int = 64, record: int = 600) -> Caches:
    """A model that nobody has heard of: records of an unknown format for eight tokens, and windows of latents."""
    caches: Caches = {}
    for layer in range(3):
        name = f"trunk.{layer}.mixer"
        fields = {"block_size": block, "num_kv_heads": 1, "max_tp_shards": 1, "dtype": specs.torch.uint8}
        rows = specs.interface.MLAAttentionSpec(
            **fields, head_size=448, tokens_per_state=8, state_content_bytes=record, cache_dtype_str="packed"
        )
        caches[f"{name}.memory"] = Cached(rows, record, backend="INVENTED")
        notes = specs.interface.FullAttentionSpec(
            block_size=block, num_kv_heads=4 // tp, head_size=32, dtype=specs.torch.float32, tokens_per_state=2
        )
        caches[f"{name}.notes"] = Cached(notes, 256, heads=4, backend="FLASH_ATTN")
        window = specs.interface.SlidingWindowMLASpec(
            **{**fields, "dtype": specs.torch.float32}, head_size=24, sliding_window=100
        )
        caches[f"{name}.recent"] = Cached(window, 96, backend="INVENTED")
    return caches


@pytest.mark.parametrize("num_tokens", [64, 700])
@pytest.mark.parametrize("ranks", [(1, 2), (4, 2)])
def test_a_model_of_an_invented_type(ranks: tuple[int, int], num_tokens: int) -> None:
    """It needs no line of code: what its specs declare is enough, with whole blocks where an order is not stated."""
    assert moved(Engine("prefill", invented, ranks[0]), Engine("decode", invented, ranks[1]), num_tokens)


def test_whole_blocks_of_unequal_size_are_refused() -> None:
    """Where the order of a record's bytes is not known, a block cannot be divided."""
    larger = Engine("decode", partial(invented, block=128))
    with pytest.raises(KVPlanError, match=r"^GROUP: .*one value for 128 tokens.*one value for 64 tokens"):
        moved(Engine("prefill", invented), larger, 700)


@pytest.mark.skipif("KVPLAN_VLLM_FILES" not in os.environ, reason="needs KVPLAN_VLLM_FILES, Python files of a release")
def test_of_another_release() -> None:
    """This file with the classes of another release of vLLM, whose Python files need no GPU to be imported."""
    files = os.environ["KVPLAN_VLLM_FILES"]
    environment = {key: value for key, value in os.environ.items() if key != "KVPLAN_VLLM_FILES"}
    paths = [files, *filter(None, [environment.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *TESTS]
    subprocess.run(command, env=environment | {"PYTHONPATH": os.pathsep.join(paths)}, check=True)
