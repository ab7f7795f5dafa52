"""Trials: a request is placed in the pools of two engines, planned, moved in memory, and verified.

The request's blocks are scattered over each pool, in a different order on each engine. So a plan
that pairs blocks by anything but position moves wrong bytes. Groups that share one pool get
different blocks of it. The memory is fake.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._checks import integer
from kvplan._text import sizes
from kvplan.describe import Blocks, Worker
from kvplan.describe.worker import label_of
from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.models.options import EngineOptions
from kvplan.plan import MeshPlan, PairCost, plan_mesh
from kvplan.plan.align import before
from kvplan.verification import Report, verify

SOURCE_SPREAD: Final = (math.sqrt(5) - 1) / 2
DESTINATION_SPREAD: Final = math.sqrt(2) - 1


@attrs.frozen
class PlacedRequest:
    """Positions of a request in the blocks of two engines: arguments of ``bind`` and ``verify``.

    ``local`` has the block table of each group of the destination, ``remote`` those of the source.
    ``blocks`` of ``src`` and ``dst`` is the size of their pools.
    """

    src: EngineOptions
    dst: EngineOptions
    sources: tuple[Worker, ...]
    destinations: tuple[Worker, ...]
    local: Mapping[str, Blocks]
    remote: Mapping[str, Blocks]
    tokens: Mapping[str, tuple[int, int]]

    @classmethod
    def of(
        cls, model: Model, src: EngineOptions, dst: EngineOptions, tokens: tuple[int, int]
    ) -> PlacedRequest:
        """Return the request of positions ``[start, stop)`` on both engines.

        Raises ``BLOCKS`` if a pool has too few blocks for them.
        """
        _, stop = tokens
        source = _PlacedEngine.of(model, src, "src", stop, SOURCE_SPREAD)
        destination = _PlacedEngine.of(model, dst, "dst", stop, DESTINATION_SPREAD)
        moved = moved_tokens(model, destination.options, destination.workers[0], tokens)
        return cls(
            src=source.options,
            dst=destination.options,
            sources=source.workers,
            destinations=destination.workers,
            local=_allocated(destination, moved, tokens[0]),
            remote=source.tables,
            tokens=moved,
        )

    @property
    def windows(self) -> dict[str, tuple[int, int]]:
        """The positions of groups that move fewer than the others, since their layers slide."""
        start = min((start for start, _ in self.tokens.values()), default=0)
        return {name: moved for name, moved in self.tokens.items() if moved[0] > start}

    @property
    def not_transferred(self) -> tuple[str, ...]:
        """The tensors of :func:`destination_drafts`."""
        return destination_drafts(self.destinations, self.sources)


def moved_tokens(
    model: Model, dst: EngineOptions, worker: Worker, tokens: tuple[int, int]
) -> dict[str, tuple[int, int]]:
    """Return the positions that a connector moves for each token group of a destination's worker.

    Layers with a window need the positions that later tokens attend to. A connector reads from the
    start of the block that has the first of them.
    """
    start, stop = tokens
    groups = [group for group in worker.groups if not group.is_state]
    needed = dst.served(model).tokens(start, stop, worker)
    moved = {}
    for group in groups:
        # a pipeline stage has all groups, perhaps without a layer
        first, _ = needed.get(group.name, tokens)
        moved[group.name] = max(start, first - first % (group.tokens_per_block or 1)), stop
    return moved


@attrs.frozen
class _PlacedEngine:
    """One engine with a request: options with the size of its pool, workers, and block tables."""

    options: EngineOptions
    workers: tuple[Worker, ...]
    tables: dict[str, Blocks]

    @classmethod
    def of(
        cls, model: Model, options: EngineOptions, engine_id: str, stop: int, spread: float
    ) -> _PlacedEngine:
        """Place positions ``[0, stop)``. Raises ``BLOCKS`` if the pool has too few blocks."""
        # a first guess for one group; a pool that groups share may need a second
        needed = -(-stop // (options.block or 16))
        while True:
            pool = options.blocks or needed + needed // 2 + 7
            workers = options.engine(model, engine_id, pool)
            num_blocks = blocks_needed(workers, stop)
            numbers = num_blocks.values()
            needed = sum(numbers) if options.shared else _largest(numbers)
            if options.blocks is not None or needed <= pool:
                break
        if needed > pool:
            raise KVPlanError(
                "BLOCKS",
                f"place a request of {stop} tokens on --{engine_id}",
                expected=f"at least {needed} blocks",
                got=f"{pool}",
                needed=needed,
                blocks=pool,
            )
        # groups that share a pool follow each other among its scattered ids
        tables = {}
        first = 0
        for group_name, number in num_blocks.items():
            tables[group_name] = Blocks(scattered(first + number, pool, spread)[first:])
            if options.shared:
                first += number
        return cls(attrs.evolve(options, blocks=pool), workers, tables)


def _allocated(
    engine: _PlacedEngine, moved: Mapping[str, tuple[int, int]], start: int
) -> dict[str, Blocks]:
    """Return the block tables of a destination, which has no blocks in front of a window."""
    tables = engine.tables.copy()
    for group in engine.workers[0].groups:
        first, _ = moved.get(group.name, (start, start))
        if first > start and group.tokens_per_block is not None and group.context.size == 1:
            block = first // group.tokens_per_block
            tables[group.name] = Blocks(tables[group.name].ids[block:], first=block)
    return tables


def _largest(numbers: Iterable[int]) -> int:
    return max(numbers, default=0)


def sampled(model: Model, num_layers: int) -> Model:
    """Return the model with some of its layers, in their order.

    They are the first of each kind, then the second of each, and so on.

    >>> print(sampled(Model.shipped("granite-4.0-h-tiny"), 3))
    granite-4.0-h-tiny: 3 layers, bfloat16, groups state, attn

    Raises ``RANGE`` if the model has more kinds, or fewer layers.
    """
    indices_by_kind: dict[Any, list[int]] = {}
    for index, layer in enumerate(model.layers):
        indices_by_kind.setdefault(layer, []).append(index)
    kinds = list(indices_by_kind.values())
    subject = f"layers of {model.name}"
    num_layers = integer(num_layers, subject, low=len(kinds), high=len(model.layers) + 1)
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*kinds))
    indices = [index for index in rounds if index is not None]
    return attrs.evolve(model, layers=tuple(model.layers[i] for i in sorted(indices[:num_layers])))


def destination_drafts(
    destinations: Sequence[Worker],
    sources: Sequence[Worker],
) -> tuple[str, ...]:
    """Return the tensors of draft layers that only the destination has: they do not move."""
    source_names = set[str]().union(*(worker.tensors for worker in sources))
    names = dict.fromkeys(itertools.chain.from_iterable(worker.tensors for worker in destinations))
    # the model names tensors of draft layers so
    drafts = [name for name in names if name.startswith("draft.")]
    return tuple(name for name in drafts if name not in source_names)


def blocks_needed(workers: Sequence[Worker], stop: int) -> dict[str, int]:
    """Return the most blocks that a worker needs for positions ``[0, stop)``, by group.

    A state takes one block.
    """
    needed: dict[str, int] = {}
    for worker in workers:
        for group in worker.groups:
            num_blocks = 1
            # a rank of a context-parallel engine holds some of the positions
            if group.tokens_per_block is not None:
                num_blocks = -(-before(group, stop) // group.tokens_per_block)
            needed[group.name] = max(needed.get(group.name, 0), num_blocks)
    return needed


def scattered(number: int, pool: int, spread: float) -> Ints:
    """Return ``number`` distinct block ids in ``[0, pool)``.

    Consecutive ones are about ``spread * pool`` apart, modulo pool.

    >>> scattered(6, 100, SOURCE_SPREAD).tolist(), scattered(6, 100, DESTINATION_SPREAD).tolist()
    ([61, 22, 83, 44, 5, 66], [41, 82, 23, 64, 5, 46])
    """
    # multiples of a step that is coprime to the pool are distinct modulo the pool
    step = max(int(pool * spread), 1)
    while math.gcd(step, pool) != 1:
        step += 1
    return np.arange(1, number + 1, dtype=np.int64) * step % pool


def memory_needed(request: PlacedRequest, mesh: MeshPlan) -> int:
    """Return how many bytes verification allocates.

    It needs a label for each byte of the largest destination, on both sides.
    """
    tokens = _largest(stop - start for start, stop in request.tokens.values())
    num_bytes = _largest(plan.cost(tokens).num_bytes for plan in mesh.plans)
    # a label numbers the bytes of the request
    label_bytes = 4 if num_bytes < 1 << 32 else 8
    return 2 * num_bytes * label_bytes


def described(pairs: Sequence[PairCost]) -> str:
    """Return how many descriptors some pairs take, and their shortest and longest length."""
    num_descriptors = sum(pair.num_descriptors for pair in pairs)
    text = f"{num_descriptors:,} descriptors"
    lengths = lengths_of(pairs)
    return f"{text} of {sizes(lengths[0], lengths[-1])}" if lengths else text


def lengths_of(pairs: Sequence[PairCost]) -> list[int]:
    """Return the distinct descriptor lengths of some pairs in bytes, ascending."""
    return sorted(set[int]().union(*(pair.lengths for pair in pairs)))


@attrs.frozen(eq=False)
class Trial:
    """A request that was moved: the cost of each pair of workers, and the verification report."""

    request: PlacedRequest
    pairs: tuple[PairCost, ...]
    report: Report

    @classmethod
    def of(cls, request: PlacedRequest) -> Trial:
        """Plan all destination workers, move the request, and verify.

        Raises ``MEMORY`` if the machine's memory cannot suffice.
        """
        # drafts stay where they are
        skipped = request.not_transferred
        mesh = plan_mesh(request.destinations, request.sources, not_transferred=skipped)
        _check_memory(memory_needed(request, mesh))
        arguments: dict[str, Any] = {
            "local": request.local,
            "remote": request.remote,
            "tokens": request.tokens,
        }
        report = verify(mesh, **arguments)
        # the report has the sums; costs are those of each pair
        pairs = list[PairCost]()
        for plan in mesh.plans:
            pairs += map(PairCost.of, plan.bind(**arguments))
        return cls(request, tuple(pairs), report)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the pairs that move nothing."""
        request = self.request
        report = self.report
        return {
            "src": request.src,
            "dst": request.dst,
            "not_transferred": request.not_transferred,
            "moved": request.tokens,
            "workers": {"src": len(request.sources), "dst": len(request.destinations)},
            "verified": report.ok,
            "bytes": report.num_bytes,
            "descriptors": report.num_descriptors,
            "tail_slots": report.num_tail_slots,
            "promises": report.promises,
            "failures": [{"code": code, "text": text} for code, text in report.failures],
            "pairs": list(map(_pair_to_json, self.pairs)),
        }


def _check_memory(needed: int) -> None:
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise KVPlanError(
            "MEMORY",
            "carry out the transfer",
            expected=f"at most {available} bytes of labels, the memory of this machine",
            got=f"{needed}",
            hint="use fewer tokens, or more destination workers",
            needed=needed,
        )


def _pair_to_json(pair: PairCost) -> dict[str, Any]:
    return {
        "dst": label_of(pair.local),
        "src": label_of(pair.remote),
        "rows": {"local": pair.local_rows, "remote": pair.remote_rows},
        "ids": pair.num_ids,
        "descriptors": pair.num_descriptors,
        "bytes": pair.num_bytes,
        "lengths": {str(length): times for length, times in pair.lengths.items()},
    }
