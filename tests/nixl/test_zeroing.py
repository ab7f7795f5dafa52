"""Bytes of tensors are set to zero, and no others."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Blocks, Group, Worker, region_of, tails, view_of
from kvplan_nixl.rearrange import memories_of, set_zero

RANGES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 10)), max_size=8)


@given(RANGES)
def test_exactly_these_bytes(ranges: list[tuple[int, int, int]]) -> None:
    """Ranges in any order, in several tensors, that meet or overlap, are set to zero; the rest stays."""
    tensors = [torch.full((40,), 7, dtype=torch.uint8) for _ in range(2)]
    expected = [[7] * 40, [7] * 40]
    rows = []
    for which, start, length in ranges:
        rows.append((tensors[which].data_ptr() + start, length, 0))
        expected[which][start : start + length] = [0] * length
    set_zero(memories_of([*tensors, tensors[0][3:]]), np.array(rows, np.uint64).reshape(-1, 3))
    assert [tensor.tolist() for tensor in tensors] == expected


def test_the_tails_of_a_request(device: str) -> None:
    """After a request of 6 tokens in blocks 4 and 1 of 4 slots, slots 2 and 3 of block 1 are zero, of every head."""
    cache = torch.ones(6, 2, 4, 8, device=device)
    region = region_of(cache)
    view = view_of(cache, "block head token dim", name="layers.0.attn", group="attn", region=region)
    worker = Worker("decode", 0, [region], [Group("attn", 4)], [view])
    for rows in tails(worker, {"attn": Blocks([4, 1])}, (0, 6)).values():
        set_zero(memories_of([cache]), rows)
    zeros = (cache == 0).all(dim=3)
    assert zeros.nonzero().tolist() == [[1, 0, 2], [1, 0, 3], [1, 1, 2], [1, 1, 3]]
    assert (cache == 1).all(dim=3).sum() == 6 * 2 * 4 - 4
