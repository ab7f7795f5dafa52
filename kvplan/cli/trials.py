"""Trials: a request is placed in the pools of two engines, planned, moved in fake memory, and verified.

The request's blocks are scattered over each pool, in a different order on each engine. So a plan that pairs blocks by
anything but position moves wrong bytes. Groups that share one pool get different blocks of it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._checks import integer
from kvplan._text import sizes
from kvplan.cli.options import EngineOptions, EngineViews
from kvplan.describe import Blocks, Worker
from kvplan.describe.worker import label_of
from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.plan import MeshPlan, PairCost, plan_mesh
from kvplan.plan.align import before
from kvplan.verification import Report, verify

SOURCE_SPREAD: Final = (math.sqrt(5) - 1) / 2
DESTINATION_SPREAD: Final = math.sqrt(2) - 1


@attrs.frozen
class PlacedRequest:
    """Positions of a request in the blocks of two engines, as arguments of ``plan_mesh``, ``bind`` and ``verify``.

    ``local`` has the block table of each group of the destination, ``remote`` those of the source. ``blocks`` of
    ``src`` and ``dst`` is the size of their pools.
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
        cls,
        model: Model | EngineViews,
        src: EngineOptions,
        dst: EngineOptions,
        tokens: tuple[int, int],
    ) -> PlacedRequest:
        """Positions ``[start, stop)`` on both engines. Raises ``BLOCKS`` if a pool has too few blocks for them."""
        src, sources, remote = _place(model, src, "src", tokens[1], SOURCE_SPREAD)
        dst, destinations, local = _place(model, dst, "dst", tokens[1], DESTINATION_SPREAD)
        paged = [
            group.name for group in destinations[0].groups if group.tokens_per_block is not None
        ]
        return cls(src, dst, sources, destinations, local, remote, dict.fromkeys(paged, tokens))

    @property
    def not_transferred(self) -> tuple[str, ...]:
        """The tensors of :func:`destination_drafts`."""
        return destination_drafts(self.destinations, self.sources)


def _place(
    model: Model | EngineViews, options: EngineOptions, engine_id: str, stop: int, spread: float
) -> tuple[EngineOptions, tuple[Worker, ...], dict[str, Blocks]]:
    """An engine's options with the size of its pool, its workers, and a block table for each group."""
    most, offered = -(-stop // (options.block or 16)), isinstance(model, EngineViews)
    together = options.shared or offered  # offers don't say whether groups share a pool
    while (
        True
    ):  # a shared pool is too small for all groups at first, unless the options say how large it is
        pool = options.blocks or most + most // 2 + 7
        workers = options.engine(model, engine_id, pool)
        needed = blocks_needed(workers, stop)
        most = sum(needed.values()) if together else max(needed.values(), default=0)
        if offered:
            pool = min((view.num_blocks for worker in workers for view in worker.views), default=0)
        if offered or options.blocks is not None or most <= pool:
            break
    if most > pool:
        action, expected = (
            f"place a request of {stop} tokens on --{engine_id}",
            f"at least {most} blocks",
        )
        raise KVPlanError(
            "BLOCKS", action, expected=expected, got=f"{pool}", needed=most, blocks=pool
        )
    first, tables = 0, {}
    for group, number in needed.items():
        tables[group] = Blocks(scattered(first + number, pool, spread)[first:])
        first += number if together else 0
    return attrs.evolve(options, blocks=pool), workers, tables


def sampled(model: Model, layers: int) -> Model:
    """The model with ``layers`` of its layers, in their order: the first of each kind, the second of each, and so on.

    >>> print(sampled(Model.shipped("granite-4.0-h-tiny"), 3))
    granite-4.0-h-tiny: 3 layers, bfloat16, groups state, attn

    Raises ``RANGE`` if the model has more kinds, or fewer layers.
    """
    by_kind: dict[Any, list[int]] = {}
    for i, layer in enumerate(model.layers):
        by_kind.setdefault(layer, []).append(i)
    layers = integer(
        layers, f"layers of {model.name}", low=len(by_kind), high=len(model.layers) + 1
    )
    turns = [
        i for found in itertools.zip_longest(*by_kind.values()) for i in found if i is not None
    ]
    return attrs.evolve(model, layers=tuple(model.layers[i] for i in sorted(turns[:layers])))


def destination_drafts(
    destinations: Sequence[Worker], sources: Sequence[Worker]
) -> tuple[str, ...]:
    """The tensors of draft layers that only the destination has: they are not transferred."""
    offered = {name for worker in sources for name in worker.tensors}
    wanted = dict.fromkeys(name for worker in destinations for name in worker.tensors)
    return tuple(name for name in wanted if name.startswith("draft.") and name not in offered)


def blocks_needed(workers: Sequence[Worker], stop: int) -> dict[str, int]:
    """By group, the most blocks that one worker needs for positions ``[0, stop)``; a state takes one block."""
    needed: dict[str, int] = {}
    for group in (group for worker in workers for group in worker.groups):
        number = (
            1
            if group.tokens_per_block is None
            else -(-before(group, stop) // group.tokens_per_block)
        )
        needed[group.name] = max(needed.get(group.name, 0), number)
    return needed


def scattered(number: int, pool: int, spread: float) -> Ints:
    """``number`` distinct block ids in ``[0, pool)``; consecutive ones are about ``spread * pool`` apart, modulo pool.

    >>> scattered(6, 100, SOURCE_SPREAD).tolist(), scattered(6, 100, DESTINATION_SPREAD).tolist()
    ([61, 22, 83, 44, 5, 66], [41, 82, 23, 64, 5, 46])
    """
    step = max(int(pool * spread), 1)
    while math.gcd(step, pool) != 1:
        step += 1  # multiples of a step that is coprime to the pool are distinct modulo the pool
    return np.arange(1, number + 1, dtype=np.int64) * step % pool


def memory_needed(request: PlacedRequest, mesh: MeshPlan) -> int:
    """How many bytes verification allocates: a label for each byte of the largest destination, on both sides."""
    tokens = max((stop - start for start, stop in request.tokens.values()), default=0)
    most = max((plan.cost(tokens).num_bytes for plan in mesh.plans), default=0)
    return 2 * most * (4 if most < 1 << 32 else 8)


def described(pairs: Sequence[PairCost]) -> str:
    """How many descriptors some pairs take, and their shortest and longest length."""
    number, lengths = (
        f"{sum(pair.num_descriptors for pair in pairs):,} descriptors",
        lengths_of(pairs),
    )
    return f"{number} of {sizes(lengths[0], lengths[-1])}" if lengths else number


def lengths_of(pairs: Sequence[PairCost]) -> list[int]:
    """The distinct descriptor lengths of some pairs in bytes, ascending."""
    return sorted({length for pair in pairs for length in pair.lengths})


@attrs.frozen(eq=False)
class Trial:
    """A request that was moved in fake memory: the cost of each pair of workers, and the verification report."""

    request: PlacedRequest
    pairs: tuple[PairCost, ...]
    report: Report

    @classmethod
    def of(cls, request: PlacedRequest) -> Trial:
        """Plan all destination workers, move the request, and verify. Raises ``MEMORY`` if memory can't suffice."""
        mesh = plan_mesh(
            request.destinations, request.sources, not_transferred=request.not_transferred
        )
        needed, available = (
            memory_needed(request, mesh),
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )
        if needed > available:
            action, hint = "carry out the transfer", "use fewer tokens, or more destination workers"
            expected = f"at most {available} bytes of labels, the memory of this machine"
            raise KVPlanError(
                "MEMORY", action, expected=expected, got=f"{needed}", hint=hint, needed=needed
            )
        arguments: dict[str, Any] = {
            "local": request.local,
            "remote": request.remote,
            "tokens": request.tokens,
        }
        report = verify(mesh, **arguments)
        pairs = tuple(PairCost.of(spec) for plan in mesh.plans for spec in plan.bind(**arguments))
        return cls(request, pairs, report)

    def to_json(self) -> dict[str, Any]:
        """As plain data, with the pairs that move nothing."""
        report, request = self.report, self.request
        return {
            "src": request.src,
            "dst": request.dst,
            "not_transferred": request.not_transferred,
            "workers": {"src": len(request.sources), "dst": len(request.destinations)},
            "verified": report.ok,
            "bytes": report.num_bytes,
            "descriptors": report.num_descriptors,
            "tail_slots": report.num_tail_slots,
            "promises": report.promises,
            "failures": [{"code": code, "text": text} for code, text in report.failures],
            "pairs": [
                {
                    "dst": label_of(pair.local),
                    "src": label_of(pair.remote),
                    "rows": {"local": pair.local_rows, "remote": pair.remote_rows},
                    "ids": pair.num_ids,
                    "descriptors": pair.num_descriptors,
                    "bytes": pair.num_bytes,
                    "lengths": {str(length): times for length, times in pair.lengths.items()},
                }
                for pair in self.pairs
            ],
        }
