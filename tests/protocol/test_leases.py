"""Leases stand while a claim or the first lease does, end once, and never come back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.protocol import Leases
from kvplan.protocol.leases import MAX_READERS, EndedLeases
from tests.blocking import Clock

LEASE_S = 10.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_claim_outlives_the_first_lease(clock: Clock) -> None:
    """As long as a reader renews its claim, blocks stay; when it stops, they stay for one lease more."""
    leases = Leases(clock, lease_s=LEASE_S)
    lease = leases.grant("r")
    for clock.now in range(0, 100, 5):
        assert leases.claim(lease, "reader")
        assert leases.take_ended().late == ()
    clock.now = 95 + LEASE_S
    assert leases.take_ended().late == ("r",)
    assert not leases.claim(lease, "reader")


def test_nobody_claims(clock: Clock) -> None:
    """A request that nobody claims is freed when the first lease is over."""
    leases = Leases(clock, lease_s=LEASE_S)
    lease = leases.grant("r")
    clock.now = LEASE_S - 0.1
    assert leases.take_ended().late == ()
    clock.now = LEASE_S
    assert (leases.take_ended().late, leases.is_valid(lease)) == (("r",), False)


def test_a_first_lease_may_be_longer(clock: Clock) -> None:
    """A reader that comes late has claims as short as all others', and so has one that claims meanwhile."""
    leases = Leases(clock, lease_s=LEASE_S)
    unclaimed, claimed = (leases.grant(request, 5 * LEASE_S) for request in ("r", "s"))
    clock.now = 5 * LEASE_S - 1
    assert leases.take_ended().late == ()
    assert leases.claim(claimed, "reader")
    clock.now += LEASE_S - 0.1
    assert leases.take_ended().late == ("r",)
    clock.now += 0.1
    assert (leases.take_ended().late, leases.is_valid(unclaimed)) == (("s",), False)


def test_all_leases_may_be_ended(clock: Clock) -> None:
    """Readers are told that the lease has ended; what is granted afterwards is valid."""
    leases = Leases(clock, lease_s=LEASE_S)
    claimed, unclaimed = leases.grant("r"), leases.grant("s")
    assert leases.claim(claimed, "reader")
    leases.end_all()
    assert (leases.is_valid(claimed), leases.claim(unclaimed, "reader")) == (False, False)
    assert leases.take_ended() == EndedLeases(("r", "s"), ())
    assert leases.is_valid(leases.grant("r"))


def test_blocks_stay_until_the_last_reader_is_done(clock: Clock) -> None:
    """Of three readers of one request, two are done: the blocks stay for the third."""
    leases = Leases(clock, lease_s=LEASE_S)
    lease = leases.grant("r")
    readers = ["a", "b", "c"]
    assert all(leases.claim(lease, reader) for reader in readers)
    for reader in readers:
        assert leases.take_ended().done == ()
        assert leases.release(lease, reader)
    assert leases.take_ended().done == ("r",)


def test_a_reader_that_dies_holds_up_nobody_for_long(clock: Clock) -> None:
    """A claim that is not renewed ends by itself, when all others are done."""
    leases = Leases(clock, lease_s=LEASE_S)
    lease = leases.grant("r")
    assert leases.claim(lease, "dies")
    assert leases.claim(lease, "reads")
    assert leases.release(lease, "reads")
    assert leases.take_ended() == EndedLeases((), ())
    clock.now = LEASE_S
    assert leases.take_ended().late == ("r",)


def test_a_lease_that_is_over_does_not_come_back(clock: Clock) -> None:
    """A second reader of a handoff that was read, or of a request of the same name, is refused and counted."""
    leases = Leases(clock, lease_s=LEASE_S)
    lease = leases.grant("r")
    assert leases.release(lease, "first")
    assert not leases.claim(lease, "second")
    again = leases.grant("r")
    assert again != lease
    assert not leases.claim(lease, "second")
    assert not leases.is_valid(lease)
    assert not leases.release(lease, "second")
    assert leases.num_refused == 4
    assert leases.is_valid(again)


STEPS = st.one_of(
    st.tuples(st.just("grant"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("claim"), st.integers(0, 5), st.integers(0, 2)),
    st.tuples(st.just("end"), st.integers(0, 5), st.integers(0, 2)),
    st.tuples(st.just("free"), st.just(0), st.just(0)),
    st.tuples(st.just("pass"), st.integers(1, 12), st.just(0)),
)


@given(st.lists(STEPS, max_size=60))
def test_schedules(steps: list[tuple[str, int, int]]) -> None:
    """Whatever readers do and whenever: what was said to stand was not freed, and each request is freed once."""
    clock = Clock()
    leases = Leases(clock, lease_s=LEASE_S)
    names: list[str] = []
    granted = Counter[str]()
    freed = Counter[str]()
    held_until: dict[str, float] = {}  # by lease, as far as a reader was told

    def told(lease: str, answer: Callable[..., bool], *arguments: str) -> bool:
        stands = answer(lease, *arguments)
        assert stands or held_until[lease] <= clock.now
        return stands

    over: set[str] = set()
    for action, number, reader in steps:
        if action == "grant":
            names.append(leases.grant(f"{number}"))
            granted[f"{number}"] += 1
            held_until[names[-1]] = clock.now + LEASE_S
        elif action == "pass":
            clock.now += number
        elif action == "free":
            ended = leases.take_ended()
            freed.update([*ended.done, *ended.late])
            assert len(leases) == granted.total() - freed.total()
        elif names:
            lease = names[number % len(names)]
            if action == "claim" and told(lease, leases.claim, f"{reader}"):
                assert lease not in over
                held_until[lease] = max(held_until[lease], clock.now + LEASE_S)
            elif action == "end":
                leases.release(lease, f"{reader}")
                held_until[lease] = 0.0  # others may hold it still
        over |= {lease for lease in names if not leases.is_valid(lease)}
    clock.now += 2 * LEASE_S
    ended = leases.take_ended()
    freed.update([*ended.done, *ended.late])
    assert freed == granted
    assert len({*names}) == len(names)


def test_claims_that_have_ended_are_forgotten(clock: Clock) -> None:
    """They stayed as long as the lease did: a million took 27 ms of each step of an engine, and all their memory."""
    leases = Leases(clock, lease_s=LEASE_S)
    lease = leases.grant("r")
    for number in range(20 * MAX_READERS):
        clock.now += 2 * LEASE_S / MAX_READERS
        assert leases.claim(lease, f"reader {number}")
    assert len(leases._leases[lease].claims_end_at) <= MAX_READERS // 2 + 1
    assert leases.take_ended().late == ()
    clock.now += LEASE_S
    assert leases.take_ended().late == ("r",)


def test_a_lease_has_few_readers(clock: Clock) -> None:
    """One that is claimed under ever new names takes bounded memory, and no more time than others."""
    leases = Leases(clock, lease_s=LEASE_S)
    lease = leases.grant("r")
    for number in range(MAX_READERS):
        assert leases.claim(lease, f"reader {number}")
    assert (leases.claim(lease, "one more"), leases.num_refused) == (False, 1)
    assert leases.claim(lease, "reader 0")
    began = time.thread_time()
    for _ in range(1000):
        leases.take_ended()
    assert time.thread_time() - began < 0.5
    clock.now = LEASE_S
    assert not leases.take_ended().done


def test_a_lease_has_an_age(clock: Clock) -> None:
    """A reader that only renews its claim held blocks for ever."""
    leases = Leases(clock, lease_s=LEASE_S, max_lease_s=50.0)
    lease = leases.grant("r")
    assert leases.oldest_s() == 0.0
    for clock.now in range(1, 50):
        assert leases.claim(lease, "reader")
        assert leases.take_ended() == EndedLeases((), ())
    assert leases.oldest_s() == 49.0
    clock.now = 50.0
    assert leases.claim(lease, "reader")
    assert leases.take_ended() == EndedLeases((), ("r",), ("r",))
    assert not leases.claim(lease, "reader")
    assert leases.oldest_s() == 0.0


def test_the_age_of_a_request_begins_when_it_is_computed(clock: Clock) -> None:
    """A long prompt has its whole time, and so has a first lease that is longer."""
    leases = Leases(clock, lease_s=LEASE_S, max_lease_s=50.0)
    early, long = leases.grant_early("s"), leases.grant("r", 70.0)
    clock.now = 40.0
    assert leases.begin_first(early)
    for clock.now in range(41, 70):
        assert leases.claim(early, "reader")
        assert leases.take_ended() == EndedLeases((), ())
    assert leases.is_valid(long)
    clock.now = 90.0
    assert leases.take_ended() == EndedLeases((), ("r", "s"), ("r", "s"))


def test_a_first_lease_that_ends_early_is_looked_at_in_time(clock: Clock) -> None:
    """A kept answer would stay for minutes; when one of its two readers is done, the other one's claim decides."""
    leases = Leases(clock, lease_s=LEASE_S)
    lease = leases.grant("r", 50 * LEASE_S)
    assert leases.claim(lease, "dies")
    assert leases.claim(lease, "reads")
    assert leases.release(lease, "reads")
    clock.now = LEASE_S
    assert leases.take_ended().late == ("r",)


def test_a_lease_that_was_renewed_often_is_found_when_it_ends(clock: Clock) -> None:
    """Each look finds it valid, until nobody renews the claim."""
    leases = Leases(clock, lease_s=LEASE_S)
    lease = leases.grant("r")
    for clock.now in range(0, 1000, 3):
        assert leases.claim(lease, "reader")
        assert leases.take_ended() == EndedLeases((), ())
    clock.now = 999 + LEASE_S - 0.1
    assert leases.take_ended() == EndedLeases((), ())
    clock.now = 999 + LEASE_S
    assert leases.take_ended().late == ("r",)
