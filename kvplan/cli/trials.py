"""Trials: a request placed on two engines, planned, moved in fake memory and verified.

Each engine gets blocks that hold the request scattered over its pool, never in order, and in another order on the
other side, so that blocks paired by anything but position show as wrong bytes. Groups that share their memory get
different blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._text import sizes
from kvplan.cli.bars import Progress, untold
from kvplan.cli.sides import Side
from kvplan.describe.blocks import Blocks
from kvplan.describe.views import Group, View
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.models.model import Model
from kvplan.plan.cost import PairCost
from kvplan.plan.mesh import MeshPlan, plan_mesh
from kvplan.verification.report import Report
from kvplan.verification.verifier import verify

SOURCE_SPREAD: Final = (math.sqrt(5) - 1) / 2
DESTINATION_SPREAD: Final = math.sqrt(2) - 1


@attrs.frozen
class Request:
    """Positions ``[start, stop)`` of a request that both engines hold, ready for ``plan_mesh`` and ``verify``.

    ``local`` and ``remote`` are the destination's and the source's block tables by group. The sides have the number
    of blocks that their pools have.
    """

    src: Side
    dst: Side
    sources: tuple[Worker, ...]
    destinations: tuple[Worker, ...]
    local: Mapping[str, Blocks]
    remote: Mapping[str, Blocks]
    tokens: Mapping[str, tuple[int, int]]

    @property
    def not_transferred(self) -> tuple[str, ...]:
        """The tensors of draft layers that only the destination has."""
        return undrafted(self.destinations, self.sources)

    @classmethod
    def of(cls, model: Model, src: Side, dst: Side, tokens: tuple[int, int]) -> Request:
        """The request on both engines. Raises ``BLOCKS`` where a side's ``blocks`` are too few for it."""
        src, sources, remote = _place(model, src, "src", tokens[1], SOURCE_SPREAD)
        dst, destinations, local = _place(model, dst, "dst", tokens[1], DESTINATION_SPREAD)
        paged = [group.name for group in destinations[0].groups if group.tokens_per_block is not None]
        return cls(src, dst, sources, destinations, local, remote, dict.fromkeys(paged, tokens))


def _place(
    model: Model, side: Side, engine_id: str, stop: int, spread: float
) -> tuple[Side, tuple[Worker, ...], dict[str, Blocks]]:
    pool = _ample(-(-stop // (side.block or 16))) if side.blocks is None else side.blocks
    workers = side.engine(model, engine_id, pool)
    needed = blocks_needed(workers, stop)
    most = sum(needed.values()) if side.shared else max(needed.values(), default=0)
    if most > pool and side.blocks is None:
        return _place(model, attrs.evolve(side, blocks=_ample(most)), engine_id, stop, spread)
    if most > pool:
        raise KVPlanError(
            "BLOCKS",
            f"place a request of {stop} tokens on --{engine_id}",
            expected=f"at least {most} blocks",
            got=f"{pool}",
            needed=most,
            blocks=pool,
        )
    taken, tables = 0, {}
    for group, number in needed.items():
        tables[group] = Blocks(scattered(taken + number, pool, spread)[taken:])
        taken += number if side.shared else 0
    return attrs.evolve(side, blocks=pool), workers, tables


def undrafted(destinations: Sequence[Worker], sources: Sequence[Worker]) -> tuple[str, ...]:
    """The tensors of draft layers that destinations have and no source has: they are not transferred."""
    offered = {view.name for worker in sources for view in worker.views}
    wanted = dict.fromkeys(view.name for worker in destinations for view in worker.views)
    return tuple(name for name in wanted if name.startswith("draft.") and name not in offered)


def _ample(number: int) -> int:
    """A pool with room to scatter so many blocks in."""
    return number + number // 2 + 7


def memory_needed(request: Request) -> int:
    """About how many bytes of memory verification takes: a label for each byte, here and there, of one worker."""
    held = [
        sum(view.block_bytes * _blocks_moved(request, worker, view) for view in worker.views)
        for worker in request.destinations
    ]
    most = max(held, default=0)
    return int(2 * most * (4 if most < 1 << 32 else 8))


def _blocks_moved(request: Request, worker: Worker, view: View) -> float:
    """How many blocks' worth of a view a request moves."""
    group = next(group for group in worker.groups if group.name == view.group)
    if group.tokens_per_block is None:
        return 1
    start, stop = request.tokens[group.name]
    return (stop - start) / group.context.size / group.tokens_per_block


def blocks_needed(workers: Sequence[Worker], stop: int) -> dict[str, int]:
    """By group, the most blocks that one worker keeps of positions ``[0, stop)``; one for a state group."""
    needed: dict[str, int] = {}
    for group in (group for worker in workers for group in worker.groups):
        needed[group.name] = max(needed.get(group.name, 0), _blocks_of(group, stop))
    return needed


def _blocks_of(group: Group, stop: int) -> int:
    if group.tokens_per_block is None:
        return 1
    run = group.context.interleave_tokens
    rounds, rest = divmod(stop, group.context.size * run)
    held = rounds * run + min(max(rest - group.context.rank * run, 0), run)
    return -(-held // group.tokens_per_block)


def scattered(number: int, pool: int, spread: float) -> Ints:
    """``number`` different block ids of a pool, far apart: each ``spread`` of the pool, about, after the one before.

    >>> scattered(6, 100, SOURCE_SPREAD).tolist(), scattered(6, 100, DESTINATION_SPREAD).tolist()
    ([61, 22, 83, 44, 5, 66], [41, 82, 23, 64, 5, 46])
    """
    step = max(int(pool * spread), 1)
    while math.gcd(step, pool) != 1:
        step += 1
    return np.arange(1, number + 1, dtype=np.int64) * step % pool


def lengths_of(pairs: Iterable[PairCost]) -> str:
    """The lengths of all descriptors of some pairs, for a person."""
    lengths = [length for pair in pairs for length in pair.lengths]
    return sizes(min(lengths), max(lengths)) if lengths else "no length"


@attrs.frozen(eq=False)
class Trial:
    """A request's transfer and what verification found."""

    request: Request
    pairs: tuple[PairCost, ...]
    report: Report

    @classmethod
    def of(cls, request: Request, progress: Progress = untold) -> Trial:
        """Plan the whole mesh, bind the request, carry it out in fake memory and verify every destination worker."""
        mesh = plan_mesh(request.destinations, request.sources, not_transferred=request.not_transferred)
        report = verify(mesh, local=request.local, remote=request.remote, tokens=request.tokens)
        return cls(request, tuple(_moved(mesh, request)), report)

    def to_json(self) -> dict[str, Any]:
        """As plain data, the pairs that move nothing included."""
        report, request = self.report, self.request
        return {
            "src": attrs.asdict(request.src),
            "dst": attrs.asdict(request.dst),
            "not_transferred": list(request.not_transferred),
            "workers": {"src": len(request.sources), "dst": len(request.destinations)},
            "verified": report.ok,
            "bytes": report.num_bytes,
            "descriptors": report.num_descriptors,
            "tail_slots": report.num_tail_slots,
            "promises": report.promises,
            "failures": [{"code": code, "text": text} for code, text in report.failures],
            "pairs": [_told(pair) for pair in self.pairs],
        }


def _moved(mesh: MeshPlan, request: Request) -> Iterator[PairCost]:
    for plan in mesh.plans:
        specs = plan.bind(local=request.local, remote=request.remote, tokens=request.tokens)
        yield from map(PairCost.of, specs)


def _told(pair: PairCost) -> dict[str, Any]:
    """A pair as plain data."""
    dst, src = (f"{engine_id}/{rank}" for engine_id, rank in (pair.local, pair.remote))
    return {
        "dst": dst,
        "src": src,
        "rows": {"local": pair.local_rows, "remote": pair.remote_rows},
        "ids": pair.num_ids,
        "descriptors": pair.num_descriptors,
        "bytes": pair.num_bytes,
        "lengths": {str(length): times for length, times in pair.lengths.items()},
    }
