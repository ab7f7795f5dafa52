"""Strategies: the ways to move what a worker needs, in one leg or in two, and which of them takes the least time.

What each way takes is counted from its plan's tables, for requests of so many positions in scattered blocks; how long
that takes, by :class:`~kvplan.staging.rates.Rates`. Legs are taken to follow each other. Where they overlap, as on a
GPU, two of them take less time than is said, but no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs

from kvplan._checks import integer
from kvplan._text import count, shown, size
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.transfer import TransferPlan, plan_reads, plan_writes
from kvplan.staging.outlay import Outlay
from kvplan.staging.plan import StagedPlan, stage, stage_writes
from kvplan.staging.rates import SHARED_MEMORY, Rates

AUTO: Final = "auto"

Plan = TransferPlan | StagedPlan
Ways = Mapping[str, Callable[[], Plan]]
"""How to plan each strategy."""


@attrs.frozen(eq=False)
class Option:
    """One way to move a request: what goes between workers, the copies at home, and how long all takes, in seconds.

    ``plan`` is a :class:`~kvplan.TransferPlan` or, in two legs, a :class:`~kvplan.staging.StagedPlan` for a
    :class:`~kvplan.staging.Pipeline`.
    """

    strategy: str
    plan: Plan = attrs.field(repr=False)
    num_transfers: int
    num_descriptors: int
    num_bytes: int
    num_copies: int
    seconds: float

    def __str__(self) -> str:
        moved = f"{count(self.num_descriptors, 'descriptor')}, {size(self.num_bytes)}"
        copies = f", {count(self.num_copies, 'copy')} at home" if self.num_copies else ""
        return f"{self.strategy}: {self.seconds * 1e3:.4g} ms for {moved}{copies}"


@attrs.frozen(eq=False, repr=False)
class Choice:
    """The ways to move requests of ``tokens`` positions to or from one worker, the fastest first.

    ``refused`` has those that cannot be, by strategy, and why.
    """

    local: str
    tokens: int
    rates: Rates
    options: tuple[Option, ...]
    refused: Mapping[str, KVPlanError]

    @property
    def best(self) -> Option:
        """The way that takes the least time."""
        return self.options[0]

    def __str__(self) -> str:
        lines = [f"{self.local}, {count(self.tokens, 'token')}: {self.best.strategy}"]
        lines += [f"  {option}" for option in self.options]
        lines += [f"  {strategy}: {error}" for strategy, error in self.refused.items()]
        return "\n".join([*lines, f"  by rates of {self.rates.measured}"])

    def __repr__(self) -> str:
        return f"<Choice for {self.local}, {count(self.tokens, 'token')}: {self.best.strategy} of {len(self.options)}>"


def choose(
    local: Worker,
    remotes: Iterable[Worker],
    *,
    tokens: int,
    operation: str = "READ",
    strategy: str = AUTO,
    staging: str | None = None,
    siblings: Iterable[Worker] = (),
    rates: Rates = SHARED_MEMORY,
    not_transferred: Iterable[str] = (),
    replicas: int = 1,
) -> Choice:
    """The ways by which ``local`` reads from ``remotes``, or with ``operation="WRITE"`` writes to them.

    ``tokens`` is how many positions a usual request has. ``staging`` names the region of ``local`` that two legs may
    use, no more than it has; without one there is one leg. ``strategy`` is ``"auto"``, or the only one to be had: of
    reads ``"direct"``, ``"receive-staged"`` or ``"receive-staged-whole"``, of writes ``"direct"`` or ``"send-staged"``.
    Arguments besides are those of :func:`plan_reads`, :func:`plan_writes` and :func:`stage`.

    >>> import attrs
    >>> from kvplan import Model, Region
    >>> from kvplan.staging import choose
    >>> model = Model.shipped("qwen3-0.6b")
    >>> (prefill,) = model.engine("prefill", layout="LBNHC", num_blocks=600)
    >>> decode, _ = model.engine("decode", tp=2, layout="LBHNC", num_blocks=600)
    >>> local = attrs.evolve(decode, regions=(*decode.regions, Region("staging", 1 << 50, 64 << 20)))
    >>> choice = choose(local, [prefill], tokens=8192, staging="staging")
    >>> choice
    <Choice for decode/0, 8192 tokens: receive-staged-whole of 3>
    >>> choice.best.plan
    <StagedPlan decode/0: 1 source, 288 positions at a time>

    Raises what planning does. ``"auto"`` leaves out what has too little memory. Raises ``NAME`` for an operation or
    strategy that there is not, and for one of two legs without a region.
    """
    arguments: dict[str, Any] = {"not_transferred": tuple(not_transferred), "replicas": replicas}
    tokens, region = integer(tokens, "tokens of a request"), "" if staging is None else staging
    if operation == "READ":
        ways = _reads(local, tuple(remotes), region, arguments)
    elif operation == "WRITE":
        ways = _writes(local, tuple(remotes), tuple(siblings), region, arguments)
    else:
        raise KVPlanError("NAME", "choose a strategy", expected="operation READ or WRITE", got=shown(operation))
    if strategy != AUTO:
        if strategy not in ways:
            expected = f"one of {', '.join((AUTO, *ways))}"
            raise KVPlanError("NAME", "choose a strategy", expected=expected, got=shown(strategy))
        ways = {strategy: ways[strategy]}
    elif staging is None:
        ways = {"direct": ways["direct"]}
    return _choice(local, tokens, rates, ways)


def _reads(local: Worker, remotes: Sequence[Worker], staging: str, arguments: Mapping[str, Any]) -> Ways:
    staged = partial(stage, local, remotes, staging=staging, **arguments)
    return {
        "direct": partial(plan_reads, local, remotes, **arguments),
        "receive-staged": staged,
        "receive-staged-whole": partial(staged, whole=True),
    }


def _writes(
    local: Worker, remotes: Sequence[Worker], siblings: Sequence[Worker], staging: str, arguments: Mapping[str, Any]
) -> Ways:
    return {
        "direct": partial(plan_writes, local, remotes, siblings, **arguments),
        "send-staged": partial(stage_writes, local, remotes, siblings, staging=staging, **arguments),
    }


def _choice(local: Worker, tokens: int, rates: Rates, ways: Ways) -> Choice:
    options, refused = list[Option](), dict[str, KVPlanError]()
    for strategy, made in ways.items():
        try:
            options.append(_option(strategy, made(), tokens, rates))
        except KVPlanError as error:
            if error.code != "MEMORY" or len(ways) == 1:
                raise
            refused[strategy] = error
    options.sort(key=lambda option: option.seconds)
    return Choice(local.label, tokens, rates, tuple(options), refused)


def _option(strategy: str, plan: Plan, tokens: int, rates: Rates) -> Option:
    found = plan.cost(tokens)
    if isinstance(found, Outlay):
        moved, chunks, copies, copied = found.transfers, found.num_chunks, found.num_copies, found.direct.num_bytes
    else:
        moved, chunks, copies, copied = found, 1, 0, 0
    transfers = chunks * sum(1 for pair in moved.pairs if pair.lengths)
    seconds = rates.seconds(
        transfers=transfers,
        descriptors=moved.num_descriptors,
        num_bytes=moved.num_bytes,
        copies=copies,
        copied_bytes=copied,
    )
    return Option(strategy, plan, transfers, moved.num_descriptors, moved.num_bytes, copies, seconds)
