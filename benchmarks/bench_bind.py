"""Binding: from one request's block tables to the ids of its descriptors.

The model has 80 layers, the request 512 blocks, and both engines the same TP: one run for each block of each layer,
40960 ids on each side. The floor is the least work in numpy for the same ids: one broadcast add on each side of what is
known before the request, once into new arrays, as bind does, and once into reused arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvplan import Blocks, Model, TransferPlan, plan_reads

BLOCKS = 512
LAYERS = 80
ROUNDS = 400
WARMUP = 40
TOKENS = (0, 16 * BLOCKS)
BLOCK_BYTES = 16 * 2 * 128 * 2  # one head of 16 tokens, K and V, bfloat16
MODEL = Model.shipped("llama-3.1-70b")

Record = Callable[[str, Any], None]
Ids = npt.NDArray[np.int32]


@pytest.fixture(scope="module")
def plan() -> TransferPlan:
    """A worker's plan with the worker that has its heads."""
    source = MODEL.engine("prefill", tp=8, num_blocks=4096)[0]
    local = MODEL.engine("decode", tp=8, num_blocks=4096)[0]
    return plan_reads(local, [source])


@pytest.fixture(scope="module")
def tables() -> tuple[Blocks, Blocks]:
    """The request's blocks on both sides, at random places of the pools."""
    rng = np.random.default_rng(1)
    local = Blocks(rng.permutation(4096)[:BLOCKS])
    return local, Blocks(rng.permutation(4096)[:BLOCKS])


def terms(plan: TransferPlan, tables: tuple[Blocks, Blocks]) -> list[tuple[Ids, Ids]]:
    """Return the terms of the floor for each side: the first id of each layer's whole blocks, and the block ids."""
    (pair,) = plan.pairs
    sides = list[tuple[Ids, Ids]]()
    for table, blocks in zip((pair.local_table, pair.remote_table), tables, strict=True):
        # rows of whole blocks, beside those of single tokens
        first_ids = table.first[table.rows[:, 1] == BLOCK_BYTES]
        sides.append((first_ids.astype(np.int32)[:, None], blocks.ids.astype(np.int32)[None, :]))
    return sides


def test_bind(plan: TransferPlan, tables: tuple[Blocks, Blocks], benchmark: Any, record: Record) -> None:
    """``plan.bind`` for the whole request, with its checks."""
    local, remote = tables

    def bind() -> Any:
        return plan.bind(local={"attn": local}, remote={"attn": remote}, tokens=TOKENS)

    (spec,) = benchmark.pedantic(bind, rounds=ROUNDS, warmup_rounds=WARMUP)
    (local_base, local_blocks), (remote_base, remote_blocks) = terms(plan, tables)
    assert np.array_equal(spec.local_ids, (local_base + local_blocks).reshape(-1))
    assert np.array_equal(spec.remote_ids, (remote_base + remote_blocks).reshape(-1))
    assert spec.local_ids.size == BLOCKS * LAYERS
    record("bind", benchmark)


def test_floor(plan: TransferPlan, tables: tuple[Blocks, Blocks], benchmark: Any, record: Record) -> None:
    """One broadcast add on each side, into new arrays."""
    sides = terms(plan, tables)

    def add() -> list[Ids]:
        return [np.add(base, ids) for base, ids in sides]

    sums = benchmark.pedantic(add, rounds=ROUNDS, warmup_rounds=WARMUP)
    assert [(ids.dtype, ids.shape) for ids in sums] == [(np.int32, (LAYERS, BLOCKS))] * 2
    record("floor", benchmark)


def test_floor_into_reused_buffers(
    plan: TransferPlan, tables: tuple[Blocks, Blocks], benchmark: Any, record: Record
) -> None:
    """The same into reused arrays, without allocation."""
    sides = terms(plan, tables)
    buffers = [np.empty((LAYERS, BLOCKS), np.int32) for _ in sides]

    def add() -> None:
        for (base, ids), out in zip(sides, buffers, strict=True):
            np.add(base, ids, out=out)

    benchmark.pedantic(add, rounds=ROUNDS, warmup_rounds=WARMUP)
    assert np.array_equal(buffers[0], sides[0][0] + sides[0][1])
    record("floor into reused buffers", benchmark)
