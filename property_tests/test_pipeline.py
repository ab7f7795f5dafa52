"""PIPELINE: whatever ends in whatever order, and whatever fails, requests that are DONE have their bytes.

Requests are of one plan or, in turn, of two that stage in one region.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvplan.executor import Status
from kvplan.staging import StagedTransfer
from property_tests import fewer
from tests.staged import Rig, broken, network_of, own_blocks, rig_plans

REQUESTS = 6
TOKENS = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda ends: (min(ends), max(ends)))
STEPS = st.lists(st.tuples(st.sampled_from("pppttttttccccsssxfFRC"), st.integers(0, 99)), min_size=10, max_size=80)
"""What happens next: the pipeline is polled, a transfer ends, copies end, a request is submitted or cancelled, a
transfer or copies fail, an executor or a copier refuses for a while."""


class Schedule:
    """Requests of a rig, and those that are settled."""

    def __init__(self, rig: Rig, tokens: list[tuple[int, int]]) -> None:
        self.rig = rig
        self.tokens = tokens
        self.submitted: list[StagedTransfer] = []
        self.settled: list[StagedTransfer] = []

    def step(self, what: str, which: int) -> None:
        """One event."""
        rig, error = self.rig, broken(what)
        transfers, copies = rig.executor.running, rig.copier.running
        if what == "s" and len(self.submitted) < REQUESTS:
            number = len(self.submitted)
            self.submitted.append(rig.submit(number, self.tokens[number]))
        elif what == "x" and self.submitted:
            rig.pipeline.cancel(self.submitted[which % len(self.submitted)])
        elif what in "tf" and transfers:
            rig.executor.end(transfers[which % len(transfers)], error if what == "f" else None)
        elif what in "cF" and copies:
            rig.copier.end(copies[which % len(copies)], error if what == "F" else None)
        elif what == "R":
            rig.executor.refuses = None if rig.executor.refuses else error
        elif what == "C":
            rig.copier.refuses = None if rig.copier.refuses else error
        elif what == "p":
            self.settled += rig.pipeline.poll()
            self.check()

    def check(self) -> None:
        """No settled request has anything under way."""
        names = {transfer.request for transfer in self.settled}
        assert names.isdisjoint(transfer.request for transfer in self.rig.executor.running)
        blocks = [(n, *block) for work in self.rig.pipeline._under_way for n, block in enumerate(work.chunk.blocks)]
        held = [(n, block) for n, *ids in blocks for block in ids]
        assert len(held) == len({*held})

    def drain(self) -> None:
        """Let everything under way end, in some order."""
        self.rig.executor.refuses = self.rig.copier.refuses = None
        for which in range(200):
            self.step("t", which)
            self.step("c", which)
            self.step("p", which)


@fewer(2)
@given(st.integers(1, 2), st.lists(TOKENS, min_size=REQUESTS, max_size=REQUESTS), STEPS)
def test_any_order_of_events(num_plans: int, tokens: list[tuple[int, int]], steps: list[tuple[str, int]]) -> None:
    """Every request is settled once; those that are DONE have all bytes; others spoil only their blocks."""
    plans = rig_plans(5 * REQUESTS)[:num_plans]
    network = network_of(*plans)
    with network.memory:
        rig = Rig.of(network, *plans)
        schedule = Schedule(rig, tokens)
        for step in steps:
            schedule.step(*step)
        schedule.drain()
        assert Counter(schedule.settled) == Counter(schedule.submitted)
        assert {*rig.executor.released} == {*rig.executor.ended}
        done = {at: tokens[at] for at, one in enumerate(schedule.submitted) if one.status is Status.DONE}
        assert all((one.error is not None) == (one.status is Status.FAILED) for one in schedule.settled)
        spoilt = [at for at in range(len(schedule.submitted)) if at not in done]
        assert rig.wrong(done) <= {place for at in spoilt for place in own_blocks(rig.plan_of(at), [at])}
