"""Faults are found: both oracles agree on any change of a plan's descriptors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import assume, event, given
from hypothesis import strategies as st

from kvplan.testing.strategies import Case, cases
from kvplan.verification.verifier import verify
from property_tests.oracle import by_byte, contents, problems
from tests.edits import Edit, Ranges

Fault = Callable[[int, int], Edit]
"""An edit of descriptor ``i`` by some bytes or places."""


def _drop(i: int, by: int) -> Edit:
    return lambda local, remote: (np.delete(local, i, 0), np.delete(remote, i, 0))


def _repeat(i: int, by: int) -> Edit:
    return lambda local, remote: (np.insert(local, i, local[i], 0), np.insert(remote, i, remote[i], 0))


def _shorten(i: int, by: int) -> Edit:
    def shorten(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        for ranges in (local, remote):
            ranges[i, 1] = max(1, int(ranges[i, 1]) - abs(by))
        return local, remote

    return shorten


def _swap(i: int, by: int) -> Edit:
    def swap(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        j = (i + by) % len(remote)
        if remote[i, 1] == remote[j, 1]:
            remote[[i, j]] = remote[[j, i]]
        return local, remote

    return swap


def _shift_local(i: int, by: int) -> Edit:
    def shift(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        local[i, 0] = (int(local[i, 0]) + by) % (1 << 64)
        return local, remote

    return shift


def _shift_remote(i: int, by: int) -> Edit:
    def shift(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        remote[i, 0] = (int(remote[i, 0]) + by) % (1 << 64)
        return local, remote

    return shift


FAULTS = (_drop, _repeat, _shift_local, _shift_remote, _shorten, _swap)


@given(cases(), st.sampled_from(FAULTS), st.integers(0, 99), st.integers(-20, 20))
def test_both_oracles_agree_on_faulty_copies(case: Case, fault: Fault, at: int, by: int) -> None:
    """Verify reports a failure exactly if the oracle in plain Python does."""
    worker = case.destinations[at % len(case.destinations)]
    plan = case.reads(worker)
    request = case.request(plan)
    specs = plan.bind(**request)
    spec = max(specs, key=lambda spec: spec.num_descriptors)
    assume(spec.num_descriptors)
    copies = {(spec.local, spec.remote): spec.descriptors() for spec in specs}
    edit = fault(at % spec.num_descriptors, by)
    copies[spec.local, spec.remote] = edit(*(side.copy() for side in spec.descriptors()))
    held = {source.key: contents(source, case.tables[1], dict.fromkeys(case.spans[0])) for source in case.sources}
    every = [copy for (_, source), (writes, reads) in copies.items() for copy in by_byte(source, reads, writes)]
    wrong = problems(contents(worker, case.tables[0], case.spans[0]), held, every)
    event(f"{fault.__name__} {'does harm' if wrong else 'does none'}")
    report = verify(plan, **request, copies=copies)
    assert report.ok == (not wrong), f"{report}; {wrong}"
