"""Strategies: the ways to move what a worker needs, and which of them takes the least time.

What each strategy takes is counted from its plan's tables, for requests whose blocks are scattered.
How long that takes is computed from :class:`Rates`: a time for each transfer, descriptor and byte
between workers, and for each local copy, once for each of its origins, and byte of it. Steps are
taken to follow each other; where they overlap, as on a GPU, staging takes less time than computed,
never more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs

from kvplan._checks import (
    check_fields,
    instance,
    integer,
    is_one_of,
    name,
    seconds,
)
from kvplan._text import brief_repr, count, shown, size
from kvplan.budget import Budget
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.cost import Cost
from kvplan.plan.transfer import TransferPlan
from kvplan.staging.buffers import checked_staging
from kvplan.staging.cost import StagedCost, staged_cost
from kvplan.staging.plan import DirectReads, StagedPlan

AUTO: Final = "auto"
STRATEGIES: Final = ("direct", "receive-staged", "receive-staged-whole")


@attrs.frozen
class Rates:
    """Seconds for each transfer, descriptor and byte between workers, and each local copy and byte.

    ``measured`` says where and how; ``python -m kvplan_nixl calibrate`` measures all five, for
    reads or for writes. Raises ``TYPE``, ``RANGE`` or ``NAME``.

    >>> rates = Rates("nowhere", transfer_s=1e-4, descriptor_s=4e-6, byte_s=2.5e-10,
    ...               copy_s=1e-5, copied_byte_s=1e-10)
    >>> round(rates.seconds(transfers=1, descriptors=1000, num_bytes=4_000_000), 6)
    0.0051
    """

    measured: str
    transfer_s: float
    descriptor_s: float
    byte_s: float
    copy_s: float
    copied_byte_s: float

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        check_fields(self, "rates", name, "measured")
        check_fields(self, "rates", seconds, "transfer_s", "descriptor_s", "byte_s")
        check_fields(self, "rates", seconds, "copy_s", "copied_byte_s")

    def seconds(
        self,
        *,
        transfers: int,
        descriptors: int,
        num_bytes: int,
        copies: int = 0,
        copied_bytes: int = 0,
    ) -> float:
        """Return how long these take, one after the other. Raises ``TYPE`` or ``RANGE``."""
        for number in (transfers, descriptors, num_bytes, copies, copied_bytes):
            integer(number, "what takes time")
        transfer_s = transfers * self.transfer_s + descriptors * self.descriptor_s
        transfer_s += num_bytes * self.byte_s
        return transfer_s + copies * self.copy_s + copied_bytes * self.copied_byte_s


SHARED_MEMORY: Final = Rates(
    "UCX of NIXL 1.5.1 between two processes, main memory, "
    "two cores of a Xeon at 2.5 GHz, 2026-11-22",
    transfer_s=3.1e-3,
    descriptor_s=4.6e-6,
    byte_s=5.7e-10,
    copy_s=2.6e-5,
    copied_byte_s=8.2e-10,
)
"""The default rates for caches in main memory: medians of nine calibrations, one thread.

They are of reads, with UCX's copies between processes (CMA), which :data:`kvplan_nixl.UCX` does
without. Measure your own: networks differ.
"""

CUDA_IPC: Final = Rates(
    "UCX of NIXL 1.5.1 between two processes by CUDA IPC, one H100, 2026-11-27",
    transfer_s=4.0e-4,
    descriptor_s=7.7e-6,
    byte_s=0.0,
    copy_s=2.7e-5,
    copied_byte_s=0.0,
)
"""The default rates for caches on a GPU, of one calibration.

They are of reads. What a byte takes is less than such a calibration can tell. Measure your own: a
descriptor of RDMA takes much less time than a copy between processes of one host.
"""


@attrs.frozen(eq=False)
class Option:
    """One strategy: what moves between workers, the local copies, and the time that both take.

    ``plan`` is a :class:`~kvplan.TransferPlan` or, where it is staged, a
    :class:`~kvplan.staging.StagedPlan` for a :class:`~kvplan.staging.Pipeline`.
    """

    strategy: str
    plan: TransferPlan | StagedPlan = attrs.field(repr=False)
    num_transfers: int
    num_descriptors: int
    num_bytes: int
    num_copies: int
    seconds: float

    __repr__ = brief_repr

    def __str__(self) -> str:
        moved = f"{count(self.num_descriptors, 'descriptor')}, {size(self.num_bytes)}"
        copies = f", {count(self.num_copies, 'local copy')}" if self.num_copies else ""
        return f"{self.strategy}: {self.seconds * 1e3:.4g} ms for {moved}{copies}"


@attrs.frozen(eq=False, repr=False)
class Choice:
    """The strategies for requests of ``tokens`` positions to one worker, the fastest first.

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
        tokens = count(self.tokens, "token")
        best = f"{self.best.strategy} of {len(self.options)}"
        return f"<Choice for {self.local}, {tokens}: {best}>"


def choose(
    local: Worker,
    remotes: Iterable[Worker],
    *,
    tokens: int,
    strategy: str = AUTO,
    staging: str | None = None,
    rates: Rates | None = None,
    not_transferred: Iterable[str] = (),
    budget: Budget | None = None,
) -> Choice:
    """Return the strategies by which ``local`` reads from ``remotes``.

    ``tokens`` is the number of positions of a usual request. ``staging`` names the region of
    ``local`` that staging may use; without one there is only the direct plan. ``strategy`` is
    ``"auto"``, or the one strategy to plan: ``"direct"``, ``"receive-staged"`` or
    ``"receive-staged-whole"``. Other arguments are those of :func:`plan_reads` and :func:`stage`.
    Without ``rates`` they are :data:`SHARED_MEMORY` or, where ``local`` has memory of a GPU,
    :data:`CUDA_IPC`.

    >>> import attrs
    >>> from kvplan import Model, Region
    >>> from kvplan.staging import choose
    >>> model = Model.shipped("qwen3-0.6b")
    >>> (prefill,) = model.engine("prefill", layout="LBNHC", num_blocks=600)
    >>> decode, _ = model.engine("decode", tp=2, layout="LBHNC", num_blocks=600)
    >>> staging = Region("staging", 1 << 50, 64 << 20)
    >>> local = attrs.evolve(decode, regions=(*decode.regions, staging))
    >>> choice = choose(local, [prefill], tokens=8192, staging="staging")
    >>> choice
    <Choice for decode/0, 8192 tokens: receive-staged-whole of 3>
    >>> choice.best.plan
    <StagedPlan decode/0: 1 source, 288 positions at a time>

    Raises what planning does. ``"auto"`` leaves out strategies that have too little memory, or that
    the budget has no room for. Raises ``NAME`` for an unknown strategy, and for staging without a
    region.
    """
    tokens = integer(tokens, "tokens of a request")
    if rates is not None:
        instance(Rates, rates, "rates")
    if not is_one_of(strategy, (AUTO, *STRATEGIES)):
        expected = f"one of {', '.join((AUTO, *STRATEGIES))}"
        got = shown(strategy)
        raise KVPlanError("NAME", "choose a strategy", expected=expected, got=got)
    if strategy != AUTO:
        candidates: Sequence[str] = (strategy,)
    else:
        # without a region nothing can be staged
        candidates = STRATEGIES if staging is not None else ("direct",)
    shared = DirectReads.of(local, remotes, not_transferred, budget)
    return choice_of(shared, candidates, staging, tokens, rates)


def choice_of(
    shared: DirectReads,
    candidates: Sequence[str],
    staging: str | None,
    tokens: int,
    rates: Rates | None = None,
) -> Choice:
    """Return the candidates that are possible, which share the cells and the bytes needed.

    Raises ``RANGE`` where not even those can be counted that a direct plan moves.
    """
    direct_cost = shared.direct.cost(tokens)
    if rates is None:
        # a staging region is in the same memory as the caches
        is_on_gpu = any(region.memory == "VRAM" for region in shared.direct.local.regions)
        rates = CUDA_IPC if is_on_gpu else SHARED_MEMORY
    options = list[Option]()
    refused = dict[str, KVPlanError]()
    for candidate in candidates:
        try:
            plan = _plan(shared, candidate, staging)
            options.append(_option(candidate, plan, direct_cost, rates))
        except KVPlanError as error:
            # other strategies may take less memory, and less of a budget
            if error.code not in ("MEMORY", "RANGE") or len(candidates) == 1:
                raise
            refused[candidate] = error
    options.sort(key=lambda option: option.seconds)
    return Choice(shared.direct.local.label, tokens, rates, tuple(options), refused)


def _option(strategy: str, plan: TransferPlan | StagedPlan, direct: Cost, rates: Rates) -> Option:
    """Return the option of a plan, for the requests that cost ``direct`` in one step."""
    if isinstance(plan, StagedPlan):
        cost = staged_cost(direct, plan.peers, plan.num_positions)
        copied_bytes = direct.num_bytes
    else:
        # one step, as a single chunk without copies
        copied_bytes = 0
        cost = StagedCost(direct, direct, num_copies=0, num_chunks=1, staging_bytes=0)
    moved = cost.transfers
    num_transfers = cost.num_chunks * sum(1 for pair in moved.pairs if pair.lengths)
    return Option(
        strategy=strategy,
        plan=plan,
        num_transfers=num_transfers,
        num_descriptors=moved.num_descriptors,
        num_bytes=moved.num_bytes,
        num_copies=cost.num_copies,
        seconds=rates.seconds(
            transfers=num_transfers,
            descriptors=moved.num_descriptors,
            num_bytes=moved.num_bytes,
            copies=cost.num_copies,
            copied_bytes=copied_bytes,
        ),
    )


def _plan(shared: DirectReads, strategy: str, staging: str | None) -> TransferPlan | StagedPlan:
    """Return the plan of a strategy.

    Raises ``NAME``, ``OVERLAP`` or ``MEMORY`` for a staging region that cannot serve.
    """
    if strategy == "direct":
        return shared.direct
    region = checked_staging(shared.direct.local, "" if staging is None else staging)
    return shared.staged(region, whole=strategy == "receive-staged-whole")
