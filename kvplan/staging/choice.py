"""Strategies: the ways to move what a worker needs, directly or staged, and which of them takes the least time.

What each strategy takes is counted from its plan's tables, for requests whose blocks are scattered. How long that takes
is computed from :class:`Rates`: a time for each transfer, descriptor and byte between workers, and for each local copy,
once for each of its origins, and byte of it. Steps are taken to follow each other; where they overlap, as on a GPU,
staging takes less time than computed, never more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import attrs

from kvplan._checks import instance, integer, is_one_of, members, name, seconds, settle
from kvplan._text import count, shown, size
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.cost import Cost
from kvplan.plan.transfer import TransferPlan
from kvplan.staging.buffers import checked_staging
from kvplan.staging.cost import staged_cost
from kvplan.staging.plan import Shares, StagedPlan

AUTO: Final = "auto"
STRATEGIES: Final = MappingProxyType(
    {"READ": ("direct", "receive-staged", "receive-staged-whole"), "WRITE": ("direct", "send-staged")}
)


@attrs.frozen
class Rates:
    """Seconds for each transfer, descriptor and byte between workers, and for each local copy and byte of it.

    ``measured`` says where and how; ``python -m kvplan_nixl calibrate`` measures all five, for reads or for writes.
    Raises ``TYPE``, ``RANGE`` or ``NAME``.

    >>> rates = Rates("nowhere", transfer_s=1e-4, descriptor_s=4e-6, byte_s=2.5e-10, copy_s=1e-5, copied_byte_s=1e-10)
    >>> round(rates.seconds(transfers=1, descriptors=1000, num_bytes=4_000_000), 6)
    0.0051
    """

    measured: str
    transfer_s: float
    descriptor_s: float
    byte_s: float
    copy_s: float
    copied_byte_s: float

    def __attrs_post_init__(self) -> None:
        settle(self, "rates", name, "measured")
        settle(self, "rates", seconds, "transfer_s", "descriptor_s", "byte_s", "copy_s", "copied_byte_s")

    def seconds(
        self, *, transfers: int, descriptors: int, num_bytes: int, copies: int = 0, copied_bytes: int = 0
    ) -> float:
        """How long these take, one after the other. Raises ``TYPE`` or ``RANGE``."""
        for number in (transfers, descriptors, num_bytes, copies, copied_bytes):
            integer(number, "what takes time")
        moved = transfers * self.transfer_s + descriptors * self.descriptor_s + num_bytes * self.byte_s
        return moved + copies * self.copy_s + copied_bytes * self.copied_byte_s

    def save(self, path: Path | str) -> None:
        """Write the rates to a JSON file."""
        Path(path).write_text(json.dumps(attrs.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Rates:
        """Read what :meth:`save` wrote. Raises ``MESSAGE`` for a file that is not JSON, ``KEY`` for another object."""
        try:
            found = json.loads(Path(path).read_text())
        except ValueError as error:
            raise KVPlanError("MESSAGE", f"read rates from {path}", expected="JSON", got=str(error)) from None
        names = [field.name for field in attrs.fields(cls)]
        if not isinstance(found, dict) or sorted(found) != sorted(names):
            raise KVPlanError(
                "KEY", f"read rates from {path}", expected=f"the keys {', '.join(names)}", got=shown(found)
            )
        return cls(**found)


SHARED_MEMORY: Final = Rates(
    "UCX of NIXL 1.5.1 between two processes, main memory, two cores of a Xeon at 2.5 GHz, 2026-11-22",
    transfer_s=3.1e-3,
    descriptor_s=4.6e-6,
    byte_s=5.7e-10,
    copy_s=2.6e-5,
    copied_byte_s=8.2e-10,
)
"""The rates that :func:`kvplan.staging.choose` uses by default: medians of nine calibrations, torch with one thread.

They are of reads, with UCX's copies between processes (CMA), which :data:`kvplan_nixl.UCX` does without. Measure your
own: networks and GPUs differ.
"""


@attrs.frozen(eq=False)
class Option:
    """One strategy: what moves between workers, the local copies, and the time that all of it takes, in seconds.

    ``plan`` is a :class:`~kvplan.TransferPlan` or, where it is staged, a :class:`~kvplan.staging.StagedPlan` for a
    :class:`~kvplan.staging.Pipeline`.
    """

    strategy: str
    plan: TransferPlan | StagedPlan = attrs.field(repr=False)
    num_transfers: int
    num_descriptors: int
    num_bytes: int
    num_copies: int
    seconds: float

    @classmethod
    def of(cls, strategy: str, plan: TransferPlan | StagedPlan, direct: Cost, rates: Rates) -> Option:
        """The option of a plan, for the requests that cost ``direct`` in one step."""
        if isinstance(plan, StagedPlan):
            found = staged_cost(direct, plan.peers, plan.num_positions)
            moved, chunks, copies, copied = found.transfers, found.num_chunks, found.num_copies, found.direct.num_bytes
        else:
            moved, chunks, copies, copied = direct, 1, 0, 0
        transfers = chunks * sum(1 for pair in moved.pairs if pair.lengths)
        seconds = rates.seconds(
            transfers=transfers,
            descriptors=moved.num_descriptors,
            num_bytes=moved.num_bytes,
            copies=copies,
            copied_bytes=copied,
        )
        return cls(strategy, plan, transfers, moved.num_descriptors, moved.num_bytes, copies, seconds)

    def __str__(self) -> str:
        moved = f"{count(self.num_descriptors, 'descriptor')}, {size(self.num_bytes)}"
        copies = f", {count(self.num_copies, 'local copy')}" if self.num_copies else ""
        return f"{self.strategy}: {self.seconds * 1e3:.4g} ms for {moved}{copies}"


@attrs.frozen(eq=False, repr=False)
class Choice:
    """The strategies for requests of ``tokens`` positions to or from one worker, the fastest first.

    ``refused`` has the errors of those that are not possible, by strategy.
    """

    local: str
    tokens: int
    rates: Rates
    options: tuple[Option, ...]
    refused: Mapping[str, KVPlanError]

    @property
    def best(self) -> Option:
        """The strategy that takes the least time."""
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
    """The strategies by which ``local`` reads from ``remotes``, or with ``operation="WRITE"`` writes to them.

    ``tokens`` is the number of positions of a usual request. ``staging`` names the region of ``local`` that staging may
    use; without one there is only the direct plan. ``strategy`` is ``"auto"``, or the one strategy to plan: of reads
    ``"direct"``, ``"receive-staged"`` or ``"receive-staged-whole"``, of writes ``"direct"`` or ``"send-staged"``.
    Other arguments are those of :func:`plan_reads`, :func:`plan_writes` and :func:`stage`.

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

    Raises what planning does. ``"auto"`` leaves out strategies that have too little memory. Raises ``NAME`` for an
    unknown operation or strategy, and for staging without a region.
    """
    tokens, rates = integer(tokens, "tokens of a request"), instance(Rates, rates, "rates")
    if not is_one_of(operation, STRATEGIES):
        raise KVPlanError("NAME", "choose a strategy", expected="operation READ or WRITE", got=shown(operation))
    strategies, siblings = STRATEGIES[operation], members(Worker, siblings, "siblings")
    if not is_one_of(strategy, (AUTO, *strategies)):
        expected = f"one of {', '.join((AUTO, *strategies))}"
        raise KVPlanError("NAME", "choose a strategy", expected=expected, got=shown(strategy))
    if strategy != AUTO:
        strategies = (strategy,)
    elif staging is None:
        strategies = ("direct",)
    shared = Shares.of(operation, local, remotes, siblings if operation == "WRITE" else (), not_transferred, replicas)
    direct, options, refused = shared.direct.cost(tokens), list[Option](), dict[str, KVPlanError]()
    for each in strategies:
        try:
            plan: TransferPlan | StagedPlan = shared.direct
            if each != "direct":
                region = checked_staging(local, "" if staging is None else staging)
                plan = shared.staged(region, whole=each == "receive-staged-whole")
            options.append(Option.of(each, plan, direct, rates))
        except KVPlanError as error:
            if error.code != "MEMORY" or len(strategies) == 1:
                raise
            refused[each] = error
    options.sort(key=lambda option: option.seconds)
    return Choice(local.label, tokens, rates, tuple(options), refused)
