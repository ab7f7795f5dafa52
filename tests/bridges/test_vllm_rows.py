"""Rows that vLLM's kernels pack, at the kernels' addresses; rings; and blocks whose order is not known."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kvplan import Blocks, KVPlanError, Worker, plan_reads
from kvplan.bridges import RankInfo, from_vllm, vllm_model
from kvplan.bridges.vllm_model import units_of
from kvplan.bridges.vllm_rows import KEYS, PackedRow, packed_row
from tests.bridges.vllm_objects import (
    Attention,
    AttentionSpec,
    CircularBufferSpec,
    Indexer,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    config_of,
)

NAME = "model.layers.0.attn"
BLOCKS = 12


def rows_spec(size: int, **fields: Any) -> MLAAttentionSpec:
    """A spec of rows of bytes that every rank has."""
    return MLAAttentionSpec(**{"block_size": 16, "head_size": size, "dtype": "torch.uint8", **fields})


def worker_of(engine: str, specs: dict[str, Any], caches: dict[str, Any], tp: int = 1, **options: Any) -> Worker:
    """The worker of a rank whose layers have a group each."""
    config = config_of(specs, caches)
    modules = options.pop("layers", {})
    info = RankInfo(engine, 0, 0, tp)
    return from_vllm(vllm_model("a model", info, config, modules, **options), info, config, caches, modules)


def cache_of(seed: int, spec: Any, kernel_blocks: int = 1, padding: int = 0) -> tuple[Any, Any]:
    """A cache with something in each byte: its memory by blocks, and the view that a connector gets."""
    num_rows, size = spec.num_states // kernel_blocks, spec.state_content_size_bytes
    stride = num_rows * size + padding
    memory = np.random.default_rng(seed).integers(0, 256, (BLOCKS * kernel_blocks, stride), np.uint8)
    shape = (BLOCKS * kernel_blocks, 1, num_rows, size)
    view = np.lib.stride_tricks.as_strided(memory, shape, (stride, stride - padding, size, 1))
    return memory, view


def address(row: PackedRow, num_rows: int, slot: int) -> tuple[slice, slice]:
    """The bytes of a row in a block of a kernel: its values and its scales."""
    values = slot * row.values
    scales = num_rows * row.values + slot * row.scales
    return slice(values, values + row.values), slice(scales, scales + row.scales)


def move(destination: Worker, source: Worker, tokens: tuple[int, int] | None, **blocks: list[int]) -> None:
    """Move what a request has, of blocks by side."""
    local = {group.name: Blocks(blocks["local"]) for group in destination.groups}
    remote = {group.name: Blocks(blocks["remote"]) for group in source.groups}
    for read in plan_reads(destination, [source]).bind(local=local, remote=remote, tokens=tokens):
        copy(read)


def copy(read: Any) -> None:
    """Move the bytes of a read from one part of this process's memory to another."""
    for (local, length, _), (remote, *_) in zip(*(rows.tolist() for rows in read.descriptors()), strict=True):
        ctypes.memmove(local, remote, length)


V4 = {"state_content_bytes": 584, "model_version": "deepseek_v4", "cache_dtype_str": "fp8_ds_mla"}
V41 = {**V4, "state_content_bytes": 528}


@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize(
    ("fields", "size", "row", "backend"),
    [
        (V4, 512, PackedRow(576, 8), "FLASHMLA_SPARSE_DSV4"),
        (V41, 512, PackedRow(528), "FLASHMLA_SPARSE_DSV41"),
        ({}, 132, PackedRow(128, 4), "DEEPSEEK_V4_INDEXER"),
        ({}, 68, PackedRow(64, 4), "DEEPSEEK_V41_INDEXER"),
        ({"cache_role": SparseCacheRole.INDEXER}, 132, PackedRow(128, 4), "OTHER"),
        ({}, 256, PackedRow(256), "STEP5_CSA_SUMMARY"),
    ],
)
def test_a_row_arrives_with_its_scales(
    fields: dict[str, Any], size: int, row: PackedRow, backend: str, kernel_blocks: int
) -> None:
    """11 rows of 4 tokens, from blocks of 8 rows into blocks of 4: no byte changes but theirs."""
    ends = []
    for engine, block, parts in (("prefill", 32, kernel_blocks), ("decode", 16, 1)):
        spec = rows_spec(size, tokens_per_state=4, block_size=block, **fields)
        memory, view = cache_of(block, spec, parts, padding=0 if parts > 1 else 64)
        worker = worker_of(engine, {NAME: spec}, {NAME: view}, layers={NAME: Attention(backend)})
        ends.append((worker, memory))
    (source, sent), (destination, received) = ends
    expected = received.copy()
    sources, blocks = [3, 7], [5, 2, 9]
    num_rows = 8 // kernel_blocks
    for number in range(11):
        place = sources[number // 8] * kernel_blocks + number % 8 // num_rows
        for into, out_of in zip(address(row, 4, number % 4), address(row, num_rows, number % num_rows), strict=True):
            expected[blocks[number // 4], into] = sent[place, out_of]
    move(destination, source, (0, 44), local=blocks, remote=sources)
    np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize(
    ("fields", "module", "options"),
    [
        ({"state_content_bytes": 600, "model_version": "deepseek_v4"}, None, {}),
        ({"state_content_bytes": 584}, None, {}),
        ({}, Attention("SOMETHING_NEW"), {}),
        ({}, None, {}),
        ({}, Attention("DEEPSEEK_V4_INDEXER"), {"tiled_keys": True}),
        ({}, Indexer("DEEPSEEK_V32_INDEXER", uses_shuffled_layout=True), {}),
    ],
)
def test_blocks_of_an_unknown_order_move_whole(fields: dict[str, Any], module: Any, options: dict[str, Any]) -> None:
    """A record or a backend that is not known, or tiles: a block is one value, also the last one of a request."""
    spec = rows_spec(132, tokens_per_state=4, **fields)
    layers = {} if module is None else {NAME: module}
    ends = []
    for engine, seed, parts in (("prefill", 1, 2), ("decode", 2, 1)):
        memory, view = cache_of(seed, spec, parts)
        ends.append((worker_of(engine, {NAME: spec}, {NAME: view}, layers=layers, **options), memory))
    (source, sent), (destination, received) = ends
    assert [group.name for group in source.groups] == ["group0.block"]
    expected = received.copy()
    for into, out_of in ((5, 3), (2, 7)):
        expected[into] = sent.reshape(BLOCKS, -1)[out_of]
    move(destination, source, (0, 20), local=[5, 2], remote=[3, 7])
    np.testing.assert_array_equal(received, expected)
    larger = rows_spec(132, tokens_per_state=4, block_size=32, **fields)
    other = worker_of("decode", {NAME: larger}, {NAME: cache_of(3, larger)[1]}, layers=layers, **options)
    with pytest.raises(KVPlanError, match=r"^GROUP: .* for 32 tokens .* for 16 tokens"):
        plan_reads(other, [source])


def test_kernel_blocks_that_are_not_side_by_side() -> None:
    """They cannot be joined to a block whose order is not known."""
    spec = rows_spec(132)
    _, view = cache_of(1, spec, 2, padding=64)
    with pytest.raises(KVPlanError, match=r"^STRIDE: cannot join 2 kernel blocks: expected blocks 1056 bytes apart"):
        worker_of("prefill", {NAME: spec}, {NAME: view})


@pytest.mark.parametrize(
    ("spec", "units"),
    [
        (rows_spec(512, tokens_per_state=4, **V4), [4]),
        (rows_spec(512, tokens_per_state=4, state_content_bytes=600), [0]),
        (rows_spec(132, tokens_per_state=4), [4, 0]),
        (rows_spec(132, tokens_per_state=4, dtype="torch.bfloat16"), [4]),
        (rows_spec(576, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), [1]),
        (MambaSpec(shapes=((4,),), dtypes=("torch.float32",)), [1]),
        (CircularBufferSpec(), [1]),
    ],
)
def test_what_a_scheduler_knows_of_a_spec(spec: Any, units: list[int]) -> None:
    """It has no layers, so a row without a record may be a whole block, which is 0 here."""
    assert units_of(spec) == units


@pytest.mark.parametrize(("size", "row"), KEYS.items())
def test_keys(size: int, row: PackedRow) -> None:
    """A key has 32, 64 or 128 values, of one byte each with 4 bytes of scale, or of half one with a byte for 32."""
    assert row.values + row.scales == size
    assert row.scales == (4 if row.values in (128, 64) or size == 36 else row.values // 16)
    assert packed_row(rows_spec(size), Attention("DEEPSEEK_V32_INDEXER")) == row


def ring_spec(slots: int = 1) -> CircularBufferSpec:
    """A spec of rings of 4 rows of 12 bytes."""
    return CircularBufferSpec(4, num_kv_heads=slots, head_size=3, head_size_v=0, dtype="torch.float32")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_a_ring_moves_whole(order: tuple[int, ...]) -> None:
    """A slot keeps its place, whichever of slots and positions is the outer dimension."""
    spec, rows = ring_spec(2), rows_spec(8, tokens_per_state=4, dtype="torch.float32")
    names = {NAME: rows, f"{NAME}.tail": spec}
    ends = []
    for engine, axes in (("prefill", order), ("decode", (0, 1, 2, 3))):
        shape = [(BLOCKS, 2, 4, 3)[axis] for axis in axes]
        memory = np.random.default_rng(len(engine)).random(shape).astype(np.float32)
        ring = memory.transpose(np.argsort(axes))
        caches = {NAME: np.zeros((BLOCKS, 1, 4, 8), np.float32), f"{NAME}.tail": ring}
        ends.append((worker_of(engine, names, caches, tp=2), ring))
    (source, sent), (destination, received) = ends
    assert [group.tokens_per_block for group in source.groups] == [16, None]
    expected = received.copy()
    expected[5] = sent[3]
    none = {"group0.4": Blocks([])}
    local, remote = {**none, "group1": Blocks([5])}, {**none, "group1": Blocks([3])}
    for read in plan_reads(destination, [source]).bind(local=local, remote=remote):
        copy(read)
    np.testing.assert_array_equal(received, expected)


ROWS: dict[str, Any] = {"num_kv_heads": 1, "head_size_v": 0, "tokens_per_state": 4, "dtype": "torch.float32"}


@pytest.mark.parametrize(
    ("rows", "heads", "tensor"),
    [
        (AttentionSpec(16, **ROWS, max_tp_shards=1), None, "layers.0.ring slot"),
        (MLAAttentionSpec(16, **ROWS), None, "layers.0.ring slot"),
        (AttentionSpec(16, **ROWS), 2, "layers.0.ring head"),
        (None, None, "layers.0.tp4.0.ring slot"),
    ],
)
def test_ranks_divide_a_ring_as_its_rows(rows: AttentionSpec | None, heads: int | None, tensor: str) -> None:
    """All have it where they have all rows, or the part of a head; without rows, equal ranks have equal parts."""
    specs: dict[str, Any] = {f"{NAME}.tail": ring_spec()}
    caches = {f"{NAME}.tail": np.zeros((BLOCKS, 1, 4, 3), np.float32)}
    if rows is not None:
        specs[NAME] = rows
        caches[NAME] = np.zeros((BLOCKS, 1, 4, 8), np.float32)
    worker = worker_of("prefill", specs, caches, tp=4, kv_heads=lambda *_: heads)
    (view,) = [view for view in worker.views if view.name.endswith("ring")]
    assert f"{view.name} {view.axes[0].name}" == tensor


def test_rows_of_heads_are_divided(zeros: Any) -> None:
    """Without V, and not of MLA: each rank has the rows of its heads, as Inkling's convolutions do."""
    spec = AttentionSpec(16, head_size_v=0, dtype="torch.float32")
    worker = worker_of("prefill", {NAME: spec}, {NAME: zeros(BLOCKS, 2, 16, 8, dtype=np.float32)}, tp=2)
    assert str(worker.views[0].axes[0]).startswith("head [0, 2) of 4")
