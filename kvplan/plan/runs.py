"""Runs (R): the longest byte ranges of a cell that are contiguous on both sides.

A run becomes one descriptor in each block, so its length decides what a transfer costs. Qwen3-0.6B
has 8 KV heads, and 512 bytes of K and V for a token of a head. In blocks of 16 tokens:

>>> from kvplan import Model, plan_mesh
>>> model = Model.shipped("qwen3-0.6b")
>>> def run_bytes(decode, prefill):
...     engines = model.engine("decode", **decode), model.engine("prefill", **prefill)
...     return [*plan_mesh(*engines).cost().lengths]
>>> hnd, nhd = {"layout": "LBHNC"}, {"layout": "LBNHC"}  # heads outside tokens, or inside
>>> run_bytes(hnd, hnd)  # equal engines: all of a block
[65536]
>>> run_bytes({**hnd, "tokens_per_block": 64}, hnd)  # larger blocks: one head of the smaller block
[8192]
>>> run_bytes(hnd, {**hnd, "tp": 2})  # D TP < P TP: all heads of a prefill rank
[32768]
>>> run_bytes(nhd, {**nhd, "tp": 2})  # the same with tokens outside heads: in one token
[2048]
>>> run_bytes(hnd, nhd)  # other layout: one head of one token
[512]

- plan.R1: Within one token, an axis whose stride equals the run's length on both sides makes the
  run longer. Every other axis is listed.
- plan.R2: The runs of one token are sorted and joined wherever one ends and another begins on both
  sides: across axes, views and tensors. The result is the *runs of one token*, the same in every
  slot.
- plan.R3: A run of one token continues into the next token where both sides step by its length
  inside one block. All runs of a block pair are then sorted and joined once more.
- plan.R4: Runs that do not continue move token by token. So do the tokens of a longer run that a
  request's range cuts: ``spans`` are the positions that the longer runs cover.

Runs never join across regions, because a descriptor lies in one region, nor across blocks, because
any two blocks may be anywhere in the pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

from kvplan._arrays import Arrays, Ints, distinct, heads, integers_in
from kvplan.describe.axes import Segments
from kvplan.describe.views import TOKEN, Group
from kvplan.plan.align import period
from kvplan.plan.block_pairs import (
    MAX_JOINED,
    TokenChains,
    block_pairs,
    can_continue,
    chain_tokens,
    cut_at_segments,
)
from kvplan.plan.cells import Cell


@attrs.frozen(eq=False)
class Runs(Arrays):
    """Runs in block 0 of their pools.

    Each array but ``length`` (n,) is (2, n) int64, the destination's row first. ``region`` is an
    index, ``offset`` in bytes within it. ``block_stride`` and ``num_blocks`` are those of the pool.
    """

    region: Ints
    offset: Ints
    block_stride: Ints
    num_blocks: Ints
    length: Ints


@attrs.frozen(eq=False)
class TokenRuns:
    """Runs of one token that share a token axis on each side, and the positions at which they move.

    ``intervals`` (n, 2) are these positions in ``[0, cycle)``. ``only_at_cuts`` says that longer
    runs cover them, so that they move token by token only where a range cuts such a run.
    """

    token_axes: tuple[Segments, Segments]
    intervals: Ints
    cycle: int
    runs: Runs
    only_at_cuts: bool


@attrs.frozen(eq=False)
class GroupRuns:
    """Everything that moves between one group of the destination and one group of a source.

    ``runs`` are the joined runs of one period, (n,); ``position`` (n,) has the first position of
    each. ``spans`` (m, 2) are the positions that they cover, ascending.
    """

    groups: tuple[Group, Group]
    period: int
    tokens: tuple[TokenRuns, ...]
    runs: Runs
    position: Ints
    spans: Ints


@attrs.frozen(eq=False)
class LongRuns(Runs):
    """Runs of several tokens: ``block`` (2, n), ``start`` and ``stop`` as in TokenChains."""

    block: Ints
    start: Ints
    stop: Ints

    @classmethod
    def over(cls, runs: Runs, chains: TokenChains) -> LongRuns:
        """Return every run of one token over every chain of tokens, run by run."""
        num_runs = runs.length.size
        repeated = np.repeat(np.arange(num_runs), chains.num_tokens.size)
        return cls(
            region=runs.region[:, repeated],
            offset=(runs.offset[:, :, None] + chains.offset[:, None]).reshape(2, -1),
            block_stride=runs.block_stride[:, repeated],
            num_blocks=runs.num_blocks[:, repeated],
            length=np.multiply.outer(runs.length, chains.num_tokens).reshape(-1),
            block=np.tile(chains.block, num_runs),
            start=np.tile(chains.start, num_runs),
            stop=np.tile(chains.stop, num_runs),
        )


def group_runs(cells: Iterable[Cell]) -> tuple[GroupRuns, ...]:
    """Return the runs of all cells that one source serves, by pair of groups."""
    # The runs of cells with equal strides are joined to each other.
    by_groups: dict[tuple[Group, Group], dict[Any, list[tuple[Cell, Runs]]]] = {}
    for cell in cells:
        runs = _cell_runs(cell)
        destination, source = cell.sides
        by_strides = by_groups.setdefault((destination.group, source.group), {})
        by_strides.setdefault(token_strides(cell), []).append((cell, runs))
    token_runs_by_groups: dict[tuple[Group, Group], list[TokenRuns]] = {}
    num_lengths = 0
    for groups, by_strides in by_groups.items():
        token_runs = [_token_runs(cells_with_runs) for cells_with_runs in by_strides.values()]
        token_runs_by_groups[groups] = token_runs
        num_lengths += sum(distinct(tokens.runs.length).size for tokens in token_runs)
    # Runs of one token and of one length are joined together; all of them share the limit evenly.
    limit = MAX_JOINED // max(num_lengths, 1)
    return tuple(
        _group_runs(groups, tokens, limit) for groups, tokens in token_runs_by_groups.items()
    )


class CellGeometry(NamedTuple):
    """What the rows and ids of cells depend on.

    Cells with equal keys have the same runs and rows, shifted by the difference of their base
    offsets, (2,) int64: ranks that hold other heads in the same layout, or other heads of one
    rank.
    """

    key: tuple[Any, ...]
    base_offset: Ints


def cell_geometry(cells: Iterable[Cell]) -> CellGeometry:
    """Return the geometry of the cells that one source serves."""
    key: list[tuple[Any, ...]] = []
    base_offset = np.zeros(2, np.int64)
    for cell in cells:
        # (2, tensors, 2): region and offset of every tensor, on each side.
        region_offsets = cell.match.region_offsets(cell.destination, cell.source)
        # Where the cell begins in the view of a tensor, on each side, and its layout from there.
        box_offset = [0, 0]
        layout: list[Any] = []
        for axis, axis_slice in cell.slices.items():
            if axis == TOKEN:
                continue
            layout.append(axis_slice.shape)
            for side, geometry in enumerate(cell.sides):
                offset, axis_layout = geometry.segments[axis].seen(*axis_slice.span)
                box_offset[side] += offset
                layout.append(axis_layout)
        # The first tensor of the first cell is the origin from which all others are measured.
        if not key:
            base_offset = region_offsets[:, 0, 1] + box_offset
        region_offsets[:, :, 1] += (box_offset - base_offset)[:, None]
        destination, source = cell.sides
        groups = destination.group, source.group
        itemsize = destination.itemsize
        key.append((*groups, itemsize, *token_strides(cell), *layout, region_offsets.tobytes()))
    return CellGeometry(tuple(key), base_offset)


def token_strides(cell: Cell) -> tuple[Any, ...]:
    """Return a key, equal for cells with equal strides from token to token and block to block."""
    key: list[Any] = [cell.cycle, cell.slices[TOKEN].intervals.tobytes()]
    for geometry in cell.sides:
        key.append(geometry.segments[TOKEN].seen(0, geometry.group.num_slots))
        key += geometry.block_stride_bytes, geometry.num_blocks
    return tuple(key)


def _listed_axes(cell: Cell) -> tuple[list[str], int]:
    """Return the axes along which the runs of one token are listed, and their common length.

    By rule plan.R1: all axes but tokens, without those that make the runs longer. An axis can only
    continue finer ones, so they are looked at from the finest of the destination on.
    """
    destination, source = cell.sides
    length = destination.itemsize
    listed = []
    axes = [axis for axis in cell.slices if axis != TOKEN]
    for axis in sorted(axes, key=lambda axis: int(destination.segments[axis].stride[0])):
        axis_slice = cell.slices[axis]
        sides = destination.segments[axis], source.segments[axis]
        is_interval = len(axis_slice.intervals) == 1
        if is_interval and all(side.steps(*axis_slice.span, length) for side in sides):
            length *= axis_slice.size
        else:
            listed.append(axis)
    return listed, length


def count_runs(cell: Cell) -> int:
    """Return the number of runs of one token of a cell, before any of them are joined."""
    listed, _ = _listed_axes(cell)
    return len(cell.match.names) * math.prod(cell.slices[axis].size for axis in listed)


def _cell_runs(cell: Cell) -> Runs:
    """Return the runs of one token of every tensor of a cell, each at the tensor's own offset."""
    listed, length = _listed_axes(cell)
    # where the cell begins in the view of a tensor, then every run so far at every coordinate
    offsets = np.zeros((2, 1), np.int64)
    for axis in [*(axis for axis in cell.slices if axis not in (*listed, TOKEN)), *listed]:
        intervals = cell.slices[axis].intervals
        coordinates = integers_in(intervals) if axis in listed else intervals[0, :1]
        axis_offsets = np.stack([side.segments[axis].at(coordinates) for side in cell.sides])
        offsets = (offsets[:, :, None] + axis_offsets[:, None, :]).reshape(2, -1)
    region_offsets = cell.match.region_offsets(cell.destination, cell.source)
    num_runs = offsets.shape[1]
    # (2, tensors * runs): the runs of one tensor follow each other.
    region, tensor_offset = np.repeat(np.moveaxis(region_offsets, 2, 0), num_runs, axis=2)
    ones = np.ones_like(region)
    return Runs(
        region=region,
        offset=tensor_offset + np.tile(offsets, region_offsets.shape[1]),
        block_stride=ones * [[side.block_stride_bytes] for side in cell.sides],
        num_blocks=ones * [[side.num_blocks] for side in cell.sides],
        length=ones[0] * length,
    )


def find_chains(keys: Sequence[Ints], offset: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Return chains of runs that continue each other on both sides.

    They are an order of the runs, (n,), and where each chain begins in it. ``offset`` is (2, n).
    Runs continue only runs that have equal values in every array of ``keys``.

    >>> find_chains([], np.array([[0, 8, 32], [64, 72, 96]]), np.array([8, 8, 8]))
    (array([0, 1, 2]), array([0, 2]))
    """
    # By the keys, then by local offset: runs that can continue each other are neighbours.
    order = np.lexsort((offset[0], *keys))
    offset = offset[:, order]
    end = offset + length[order]
    goes_on = (end[:, :-1] == offset[:, 1:]).all(0)
    for key in keys:
        ordered = key[order]
        goes_on &= ordered[:-1] == ordered[1:]
    return order, heads(goes_on)


def _token_runs(cells_with_runs: Sequence[tuple[Cell, Runs]]) -> TokenRuns:
    """Return the runs of one token of cells with equal strides, by rule plan.R2."""
    cell, _ = cells_with_runs[0]
    destination, source = cell.sides
    # All of them have the same strides: runs of several tensors may continue each other.
    runs = Runs.concatenate([cell_runs for _, cell_runs in cells_with_runs])
    order, first = find_chains([*runs.region], runs.offset, runs.length)
    return TokenRuns(
        token_axes=(destination.segments[TOKEN], source.segments[TOKEN]),
        intervals=cell.slices[TOKEN].intervals,
        cycle=cell.cycle,
        runs=runs.take(order[first], length=np.add.reduceat(runs.length[order], first)),
        only_at_cuts=False,
    )


def _group_runs(
    groups: tuple[Group, Group], token_runs: Sequence[TokenRuns], limit: int
) -> GroupRuns:
    """Join runs across tokens, by rule plan.R3.

    Runs of one length are joined only if there are at most ``limit`` ranges of tokens to join.
    """
    num_positions = math.lcm(period(*groups), *(tokens.cycle for tokens in token_runs))
    by_token: list[TokenRuns] = []
    long_runs: list[LongRuns] = []
    for tokens in token_runs:
        lengths = tokens.runs.length
        is_joined = np.zeros(lengths.size, bool)
        for length, chains in _chains_by_length(groups, tokens, num_positions, limit):
            runs_of_length = np.flatnonzero(lengths == length)
            is_joined[runs_of_length] = True
            long_runs.append(LongRuns.over(tokens.runs.take(runs_of_length), chains))
        # Runs that are joined still move token by token where a range cuts them.
        for chosen, only_at_cuts in ((is_joined, True), (~is_joined, False)):
            if chosen.any():
                runs = tokens.runs.take(chosen)
                by_token.append(attrs.evolve(tokens, runs=runs, only_at_cuts=only_at_cuts))
    return _join_long_runs(groups, num_positions, tuple(by_token), long_runs)


def _chains_by_length(
    groups: tuple[Group, Group], tokens: TokenRuns, num_positions: int, limit: int
) -> list[tuple[int, TokenChains]]:
    """Return the chains of tokens that runs of each length join to, if they join at all."""
    lengths = distinct(tokens.runs.length).tolist()
    lengths = [n for n in lengths if all(can_continue(axis, n) for axis in tokens.token_axes)]
    if not lengths:
        return []
    pairs = block_pairs(groups, tokens.intervals, tokens.cycle, num_positions, limit)
    if pairs is None:
        return []
    chains_by_length = []
    for length in lengths:
        num_runs = int((tokens.runs.length == length).sum())
        ranges = cut_at_segments(pairs, tokens.token_axes, length, limit // num_runs)
        if ranges is not None:
            chains = chain_tokens(ranges, tokens.token_axes, length)
            if (chains.num_tokens > 1).any():
                chains_by_length.append((length, chains))
    return chains_by_length


def _join_long_runs(
    groups: tuple[Group, Group],
    num_positions: int,
    tokens: tuple[TokenRuns, ...],
    long_runs: Sequence[LongRuns],
) -> GroupRuns:
    """Join longer runs of one block pair, by rule plan.R3."""
    if not long_runs:
        none = np.zeros((2, 0), np.int64)
        no_runs = Runs(none, none, none, none, none[0])
        return GroupRuns(groups, num_positions, tokens, no_runs, none[0], none.T)
    runs = LongRuns.concatenate(long_runs)
    # Runs may only join in the same block pair, regions and pools. A joined run covers the
    # positions of all of them.
    keys = [*runs.num_blocks, *runs.block_stride, *runs.block, *runs.region]
    order, first = find_chains(keys, runs.offset, runs.length)
    start = np.minimum.reduceat(runs.start[order], first)
    stop = np.maximum.reduceat(runs.stop[order], first)
    joined = runs.take(order[first], length=np.add.reduceat(runs.length[order], first))
    return GroupRuns(groups, num_positions, tokens, joined, start, _union(start, stop))


def _union(starts: Ints, stops: Ints) -> Ints:
    """Return the union of intervals, (n, 2), ascending; those that merely touch stay apart."""
    # By ascending start, a new interval begins where the start is not below the highest end so far.
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    reach = np.maximum.accumulate(stops[order])
    first = heads(starts[1:] < reach[:-1])
    last = np.append(first[1:], starts.size) - 1
    return np.stack([starts[first], reach[last]], axis=1)
