"""The harness of staged requests: plans carried out in fake memory at once or step by step.

A source's memory is filled with numbers without a pattern. What a staged plan leaves in every worker's memory, but for
the staging region, is compared with what direct plans leave there. A :class:`Rig` runs a pipeline whose transfers and
copies end when a test says so, and leave garbage until then: bytes that are taken from staging blocks too early, or put
into them too early, differ in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvplan import Axis, Blocks, KVPlanError, ReadSpec, Region, TransferPlan, View, Worker
from kvplan.describe.worker import Key
from kvplan.executor import Status, Transfer, still_running
from kvplan.staging import Copy, Pipeline, StagedPlan, StagedTransfer, stage
from kvplan.testing import FakeExecutor, FakeNetwork
from kvplan.verification import FakeMemory
from tests.small import engine

NAME, ADDRESS = "staging", 1 << 50
GARBAGE = 0xEE

Request = dict[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]


def with_staging(worker: Worker, size: int = 1 << 20, device_id: int = 0) -> Worker:
    """A worker with a staging region."""
    return attrs.evolve(worker, regions=(*worker.regions, Region(NAME, ADDRESS, size, device_id=device_id)))


def in_least_memory(worker: Worker, device_id: int, more: int, plan: Callable[[Worker], StagedPlan]) -> StagedPlan:
    """The plan of a worker with a staging region of ``more`` bytes more than it must have."""
    least = 1
    try:
        plan(with_staging(worker, 1, device_id))
    except KVPlanError as error:
        assert error.code == "MEMORY", error
        least = int(error.details["needed_bytes"])
    return plan(with_staging(worker, least + more, device_id))


def plans_of(
    sources: Sequence[Worker], destinations: Sequence[Worker], size: int = 0, **options: Any
) -> list[StagedPlan]:
    """The plans of all readers, in regions of ``size`` bytes; of 0 bytes: in regions that they have."""
    local = [with_staging(each, size) if size else each for each in destinations]
    return [stage(worker, sources, staging=NAME, **options) for worker in local]


def staged(worker: Worker, sources: Sequence[Worker], size: int = 1 << 20, **options: Any) -> StagedPlan:
    """The plan of one destination."""
    (plan,) = plans_of(sources, [worker], size, **options)
    return plan


def request_of(destination: Any, source: Any, tokens: Any = None) -> Request:
    """A request by the block tables of both sides, or those of their group ``attn``."""
    local, remote = (side if isinstance(side, dict) else {"attn": side} for side in (destination, source))
    return {"local": local, "remote": remote, "tokens": tokens}


def cells(memory: FakeMemory, worker: Worker) -> dict[str, npt.NDArray[Any]]:
    """The memory of a worker's regions, not copied."""
    found = {}
    for region in worker.regions:
        every = View("all", "none", region, "uint8", [Axis("byte", 0, region.size_bytes, region.size_bytes, 1)], 1, 0)
        found[region.name] = memory.array(worker, every).reshape(-1)
    return found


def fill(memory: FakeMemory, workers: Iterable[Worker]) -> None:
    """Fill the memory of workers with numbers without a pattern."""
    for worker in workers:
        for number, array in enumerate(cells(memory, worker).values()):
            at = np.arange(array.size, dtype=np.uint64)
            array[:] = (
                at * np.uint64(2654435761) + np.uint64(worker.rank * 97 + number * 31 + 1) >> np.uint64(7)
            ) % 255 + 1


def run(copies: Iterable[Copy], arrays: Arrays) -> None:
    """Carry out copies between arrays with an element for each byte, by region name."""
    for copy in copies:
        # where every byte of every box is, behind an origin of the destination and of the source
        written, read = copy.destination.offsets, copy.source.offsets
        for n, extent in enumerate((*copy.extents, copy.length_bytes)):
            ours, theirs = ((*side.strides_bytes, 1)[n] for side in (copy.destination, copy.source))
            written = np.add.outer(written, np.arange(extent) * ours)
            read = np.add.outer(read, np.arange(extent) * theirs)
        for (into, here), (out_of, there) in zip(copy.destination.origins, copy.source.origins, strict=True):
            arrays[into.name][here + written] = arrays[out_of.name][there + read]


def carry_out(plan: StagedPlan, memory: FakeMemory, request: Request) -> None:
    """Carry out a request in fake memory, chunk by chunk."""
    arrays = cells(memory, plan.direct.local)
    for chunk in plan.bind(**request):
        for spec in chunk.specs:
            memory.execute(spec)
        run(chunk.copies, arrays)


def same_as_direct(plans: Sequence[StagedPlan], request: Request, *, moves: bool = True) -> None:
    """Make sure that all plans together leave every worker's memory as direct plans do; and whether bytes move."""
    every = tuple(
        {worker.key: worker for plan in plans for worker in (*plan.direct.remotes, plan.direct.local)}.values()
    )
    with FakeMemory(every) as one, FakeMemory(every) as other:
        for memory in (one, other):
            fill(memory, {worker.key: worker for plan in plans for worker in plan.direct.remotes}.values())
        for plan in plans:
            for spec in plan.direct.bind(**request):
                one.execute(spec)
            carry_out(plan, other, request)
        for worker in every:
            wanted, found = cells(one, worker), cells(other, worker)
            assert all(np.array_equal(wanted[name], found[name]) for name in wanted if name != NAME)
        written = [cells(other, plan.direct.local) for plan in plans]
        assert any(array.any() for found in written for name, array in found.items() if name != NAME) == moves


def descriptors(plan: StagedPlan, request: Request) -> list[int]:
    """The length of each descriptor between workers for a request."""
    specs = [spec for chunk in plan.bind(**request) for spec in chunk.specs]
    return [length for spec in specs for length in spec.descriptors()[1][:, 1].tolist()]


def bytes_of(*rows: Any) -> set[tuple[int, int]]:
    """Every byte of descriptors: its device and address."""
    every = [row for each in rows for row in each.tolist()]
    return {(device, at) for start, length, device in every for at in range(start, start + length)}


def broken(what: str) -> KVPlanError:
    """An error that a test provokes."""
    return KVPlanError("TRANSFER", what, expected="success", got="a fault")


def spoil(memory: FakeMemory, key: Key, ranges: np.ndarray) -> None:
    """Put garbage into ranges of a worker's memory."""
    for address, length, device in ranges.tolist():
        memory.write(key, address, np.full(length, GARBAGE, np.uint8), device)


class ManualExecutor:
    """An executor of fake memory, whose transfers :meth:`end` ends. A cancelled one moves its bytes all the same."""

    def __init__(self, inner: FakeExecutor) -> None:
        self.inner = inner
        self.running: list[Transfer] = []
        self.ended: list[Transfer] = []
        self.cancelled: list[Transfer] = []
        self.released: list[Transfer] = []
        self.refuses: KVPlanError | None = None
        """Raised by every start, or by those with the worker ``gone``."""
        self.gone: Key | None = None
        self.not_released: KVPlanError | None = None
        """Raised by every release."""

    def prepare(self, plan: TransferPlan) -> None:
        """As in fake memory."""
        self.inner.prepare(plan)

    def start(self, spec: ReadSpec, request: str) -> Transfer:
        """Start a transfer that runs until it is ended."""
        if self.refuses is not None and self.gone in (None, spec.remote):
            raise self.refuses
        transfer = self.inner.start(spec, request)
        spoil(self.inner.network.memory, spec.local, spec.descriptors()[0])
        self.running.append(transfer)
        return transfer

    def end(self, transfer: Transfer, error: KVPlanError | None = None) -> None:
        """Settle a transfer: all its bytes move, or with an error none."""
        self.running.remove(transfer)
        self.ended.append(transfer)
        if error is not None:
            transfer.status, transfer.error = Status.FAILED, error
        elif transfer in self.cancelled:
            self.inner.network.memory.execute(transfer.spec)
            transfer.status = Status.CANCELLED
        else:
            self.inner.poll(transfer)

    def poll(self, transfer: Transfer) -> Status:
        """The status of a transfer."""
        return transfer.status

    def cancel(self, transfer: Transfer) -> None:
        """Record it."""
        self.cancelled.append(transfer)

    def release(self, transfer: Transfer) -> None:
        """Record it, once, of a transfer that is settled."""
        if not transfer.status.is_settled:
            raise still_running(transfer.request, "release a transfer")
        assert transfer not in self.released
        self.released.append(transfer)
        if self.not_released is not None:
            raise self.not_released


@attrs.define(eq=False)
class Ticket:
    """Copies that have begun."""

    copies: tuple[Copy, ...]
    is_done: bool = False
    error: KVPlanError | None = None


class ManualCopier:
    """A copier of fake memory, whose copies :meth:`end` ends."""

    def __init__(self, memory: FakeMemory, key: Key) -> None:
        self.memory, self.key = memory, key
        self.running: list[Ticket] = []
        self.ended: list[Ticket] = []
        self.refuses: KVPlanError | None = None

    def begin(self, copies: Sequence[Copy]) -> Ticket:
        """Begin copies that are not done until they are ended."""
        if self.refuses is not None:
            raise self.refuses
        for copy in copies:
            spoil(self.memory, self.key, copy.ranges()[0])
        self.running.append(Ticket(tuple(copies)))
        return self.running[-1]

    def end(self, ticket: Ticket, error: KVPlanError | None = None) -> None:
        """All bytes are copied, or copies have failed."""
        self.running.remove(ticket)
        self.ended.append(ticket)
        ticket.is_done, ticket.error = True, error
        for copy in ticket.copies if error is None else ():
            writes, reads = copy.ranges()
            self.memory.move(self.key, self.key, reads, writes)

    def done(self, ticket: Ticket) -> bool:
        """Whether copies were ended."""
        if ticket.error is not None:
            raise ticket.error
        return ticket.is_done


ONE_BLOCK = 2 * 2 * 256
"""Bytes of two staging blocks of 4 tokens, 4 heads and 2 layers: a staging region of chunks of 4 positions."""

PEERS = 2
"""The peers of a rig, each with half of the heads: each chunk has a transfer with both."""

OTHERS = 4
"""The peers of the rig's second plan, each with one head, so that staging blocks lie elsewhere in the region."""

Places = set[tuple[Key, str, int]]
"""Blocks, by worker and region."""


def rig_plan(blocks: int, peers: int = PEERS, name: str = "peers", staging_bytes: int = ONE_BLOCK) -> StagedPlan:
    """The plan of a worker that reads from others."""
    near, far = engine("local", order="HN", blocks=blocks), engine(name, tp=peers, order="NH", blocks=blocks)
    (plan,) = plans_of(far, near, staging_bytes)
    return plan


def rig_plans(blocks: int) -> tuple[StagedPlan, StagedPlan]:
    """The plan of a rig and one with other peers, in the same staging region."""
    return rig_plan(blocks), rig_plan(blocks, OTHERS, "others")


def rig_request(number: int, tokens: Any) -> Request:
    """A request of 5 blocks on either side, in no order, that no request of another number has."""
    local, remote = ([5 * number + at for at in order] for order in ([3, 0, 4, 1, 2], [2, 4, 0, 1, 3]))
    return {"local": {"attn": Blocks(local)}, "remote": {"attn": Blocks(remote)}, "tokens": tokens}


def network_of(*plans: StagedPlan) -> FakeNetwork:
    """The network of all workers of plans."""
    every = {worker.key: worker for plan in plans for worker in (plan.direct.local, *plan.direct.remotes)}
    return FakeNetwork(every.values())


def differing(network: FakeNetwork, moved: Sequence[tuple[StagedPlan, Mapping[int, Any]]]) -> Places:
    """The blocks of destinations that differ from what direct plans write for requests, by number their tokens."""
    with FakeMemory(tuple(network.workers.values())) as memory:
        for plan, requests in moved:
            fill(memory, plan.direct.remotes)
            for number, tokens in requests.items():
                for spec in plan.direct.bind(**rig_request(number, tokens)):
                    memory.execute(spec)
        return {
            (worker.key, name, int(at) // worker.views[0].block_stride_bytes)
            for worker in {plan.direct.local.key: plan.direct.local for plan, _ in moved}.values()
            for name, found in cells(network.memory, worker).items()
            if name != NAME
            for at in np.flatnonzero(cells(memory, worker)[name] != found)
        }


def own_blocks(plan: StagedPlan, numbers: Iterable[int], chunks: int = 5) -> Places:
    """The blocks that destinations have for the first chunks of requests."""
    return {
        (plan.direct.local.key, region.name, int(block))
        for region in plan.direct.local.regions
        for number in numbers
        for block in rig_request(number, None)["local"]["attn"].ids[:chunks]
    }


@attrs.define
class Rig:
    """A pipeline of a worker that reads from its peers. Its plans take requests in turn."""

    plans: tuple[StagedPlan, ...]
    network: FakeNetwork
    executor: ManualExecutor
    copier: ManualCopier
    pipeline: Pipeline

    @classmethod
    def of(cls, network: FakeNetwork, *plans: StagedPlan) -> Rig:
        """A pipeline with nothing in it; memory of sources is filled."""
        local = plans[0].direct.local
        executor, copier = ManualExecutor(network.executor(local)), ManualCopier(network.memory, local.key)
        pipeline = Pipeline(executor, NAME, copier)
        for plan in plans:
            fill(network.memory, plan.direct.remotes)
            pipeline.prepare(plan)
        return cls(plans, network, executor, copier, pipeline)

    def submit(self, number: int, tokens: tuple[int, int] = (0, 4)) -> StagedTransfer:
        """Submit a request, in chunks of 4 positions."""
        return self.pipeline.submit(self.plan_of(number), f"request {number}", **rig_request(number, tokens))

    @property
    def plan(self) -> StagedPlan:
        """The first plan, or the only one."""
        return self.plans[0]

    def plan_of(self, number: int) -> StagedPlan:
        """The plan of a request."""
        return self.plans[number % len(self.plans)]

    @property
    def moving(self) -> list[Transfer]:
        """The transfers that run."""
        return [*self.executor.running]

    @property
    def under_way(self) -> tuple[int, int]:
        """How many chunks are read into staging blocks, and how many are copied out of them."""
        return len(self.moving) // PEERS, len(self.copier.running)

    def fill(self, which: int = 0) -> None:
        """End the transfers of a chunk; ``which`` of those under way, in order."""
        for transfer in self.moving[PEERS * which : PEERS * (which + 1)]:
            self.executor.end(transfer)

    def empty(self, which: int = 0) -> None:
        """End the copies of a chunk."""
        self.copier.end(self.copier.running[which])

    def go(self, steps: str) -> None:
        """End the transfers, f, or the copies, e, of the first chunk under way; then poll. Nothing is settled."""
        for step in steps:
            self.fill() if step == "f" else self.empty()
            assert self.pipeline.poll() == ()

    def finish(self) -> list[StagedTransfer]:
        """Let everything go on to its end; return what is settled."""
        settled: list[StagedTransfer] = []
        while self.executor.running or self.copier.running:
            for transfer in tuple(self.executor.running):
                self.executor.end(transfer)
            for ticket in tuple(self.copier.running):
                self.copier.end(ticket)
            settled += self.pipeline.poll()
        return settled

    def wrong(self, requests: Mapping[int, Any]) -> Places:
        """The blocks of destinations that differ from what direct plans write for requests."""
        by_plan = [
            (plan, {number: tokens for number, tokens in requests.items() if self.plan_of(number) is plan})
            for plan in self.plans
        ]
        return differing(self.network, by_plan)
