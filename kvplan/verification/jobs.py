"""Jobs: what several plans, each for a request or a part of one, are to bring to each destination worker.

A destination's block tables and ranges may come in parts: chunk by chunk, or some positions from one engine and the
rest from another. Here they become one table for each group, and one list of copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvplan.describe.blocks import Blocks, Tokens
from kvplan.describe.views import Group, View
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.verification.labels import Ints, needed
from kvplan.verification.moves import NONE, Move, Tables, read_copies

if TYPE_CHECKING:
    from kvplan.plan.mesh import MeshPlan
    from kvplan.plan.transfer import TransferPlan


def span_of(tokens: Tokens, group: Group, name: str) -> tuple[int, int] | None:
    """The range of a group, given under ``name`` or, to token groups alone, to all."""
    if isinstance(tokens, Mapping):
        return tokens.get(name)
    return None if group.tokens_per_block is None else tokens


def plans_of(plan: TransferPlan | MeshPlan | Iterable[TransferPlan]) -> tuple[TransferPlan, ...]:
    """The plans of what verifying and certifying take: a plan, a mesh, or several plans."""
    given: Any = plan
    return tuple(getattr(given, "plans", (given,) if hasattr(given, "bind") else given))


@attrs.frozen(eq=False)
class Part:
    """A destination's side of one request: its block tables, and the ranges that it wants.

    ``offered`` are the tensors that some source has, each with the group by whose name ranges are given, if that is
    not the destination's own.
    """

    blocks: Tables
    tokens: Tokens
    offered: dict[str, str | None] = attrs.field(factory=dict)

    def wants(self, view: View, group: Group) -> Ints:
        """The positions of a view that this part of the request needs."""
        if view.name not in self.offered:
            return np.empty(0, np.int64)
        span = span_of(self.tokens, group, self.offered[view.name] or view.group)
        return needed(group, self.blocks.get(view.group), span)


@attrs.define(eq=False)
class Job:
    """All that is to reach one destination worker: by part of the request what it wants, and what is copied.

    ``has_ids``: whether all copies are by descriptor ids as well.
    """

    worker: Worker
    has_ids: bool = True
    parts: dict[int, Part] = attrs.field(factory=dict)
    moves: list[Move] = attrs.field(factory=list)
    writers: set[Key] = attrs.field(factory=set)
    writers_given: set[Key] = attrs.field(factory=set)

    @property
    def complete(self) -> bool:
        """Whether all that may write to the worker are given."""
        return self.writers <= self.writers_given

    def table(self, group: str) -> Blocks | None:
        """The blocks of all parts as one table. Raises ``BLOCKS`` where they differ."""
        tables = [part.blocks[group] for part in self.parts.values() if group in part.blocks]
        if len(tables) < 2:
            return tables[0] if tables else None
        ordinals, ids = (np.concatenate([getattr(table, name) for table in tables]) for name in ("ordinals", "ids"))
        both = np.unique(np.stack([ordinals, ids], axis=1), axis=0)
        again = np.flatnonzero(both[1:, 0] == both[:-1, 0])
        if again.size:
            ordinal, first = both[again[0]].tolist()
            raise KVPlanError(
                "BLOCKS",
                f"verify requests of {self.worker.label} together",
                expected=f"one block {ordinal} of the request in group {group!r}",
                got=f"{first} and {int(both[again[0] + 1, 1])}",
                group=group,
                ordinal=ordinal,
            )
        return Blocks(both[:, 1], ordinals=both[:, 0])


def jobs(parts: Iterable[tuple[Sequence[TransferPlan], Mapping[str, Any]]]) -> list[Job]:
    """Bind all plans, each part with its own request; gather by destination worker what moves.

    Of a part that has copies, those move, and not what its plans would.
    """
    made: dict[Key, Job] = {}
    for number, (plans, request) in enumerate(parts):
        local, remote, tokens, copies = _arguments(**request)
        pairs = [(plan.local.key, other.key) for plan in plans for other in plan.remotes]
        given = None if copies is None else read_copies(copies, pairs)
        locals_known = _groups(plan.local for plan in plans)
        remotes_known = _groups(worker for plan in plans for worker in plan.remotes)
        for plan in plans:
            own, theirs = _groups([plan.local]), _groups(plan.remotes)
            specs = plan.bind(
                local=_only(local, own, locals_known),
                remote=_only(remote, theirs, remotes_known),
                tokens=_only(tokens, own, locals_known) if isinstance(tokens, Mapping) else tokens,
            )
            for other, spec in zip(plan.remotes, specs, strict=True):
                if plan.operation == "WRITE":
                    job, offering, ours, theirs_blocks = _job(made, other), (plan.local, *plan.siblings), remote, local
                    job.writers.update(worker.key for worker in offering)
                    job.writers_given.add(plan.local.key)
                else:
                    job, offering, ours, theirs_blocks = _job(made, plan.local), (other,), local, remote
                part = job.parts.setdefault(number, Part(ours, tokens))
                for view in (view for worker in offering for view in worker.views):
                    if view.name not in plan.not_transferred:
                        part.offered.setdefault(view.name, view.group if plan.operation == "WRITE" else None)
                if given is None:
                    job.moves.append(Move.of(spec, offering[0], theirs_blocks))
                else:
                    pair, job.has_ids = (plan.local.key, other.key), False
                    ranges = given.pop(pair, NONE)  # once, also where several plans have the pair
                    job.moves.append(Move.between(pair, plan.operation, ranges, offering[0], theirs_blocks))
    return list(made.values())


def _arguments(
    *, local: Tables, remote: Tables, tokens: Tokens = None, copies: Any = None
) -> tuple[Tables, Tables, Tokens, Any]:
    """The arguments of bind, and copies."""
    return local, remote, tokens, copies


def _groups(workers: Iterable[Worker]) -> set[str]:
    return {group.name for worker in workers for group in worker.groups}


def _only(given: Mapping[str, Any], own: set[str], known: set[str]) -> dict[str, Any]:
    """What of a mapping by group concerns one plan; a name that no plan knows stays, for bind to refuse."""
    return {name: value for name, value in given.items() if name in own or name not in known}


def _job(made: dict[Key, Job], worker: Worker) -> Job:
    job = made.setdefault(worker.key, Job(worker))
    if job.worker is not worker and job.worker != worker:
        raise KVPlanError(
            "WORKER",
            "verify plans together",
            expected="one description of each destination worker",
            got=f"two of {worker.label}",
            worker=worker.label,
        )
    return job
