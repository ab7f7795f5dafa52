"""Blocks are freed once: when their reader is done, or when their time is over."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvplan.connector import Leases

STEPS = st.one_of(
    st.tuples(st.just("grant"), st.integers(0, 5), st.integers(0, 30)),
    st.tuples(st.just("end"), st.integers(0, 7), st.just(0)),
    st.tuples(st.just("pass"), st.just(0), st.integers(0, 10)),
)


@given(st.lists(STEPS, max_size=40))
def test_each_lease_ends_once(steps: list[tuple[str, int, int]]) -> None:
    """Whatever readers say and whenever, each lease ends once, not before its reader is done or its time is over."""
    leases, now, granted, freed = Leases(), 0.0, 0, Counter[str]()
    until: dict[str, float] = {}
    told: set[str] = set()
    for i, (action, number, seconds) in enumerate(steps):
        if action == "grant":
            name, granted = f"{number} {i}", granted + 1
            leases.grant(name, now + seconds)
            until[name] = now + seconds
        elif action == "end":
            names = [name for name in until if name.startswith(f"{number} ")]
            leases.end([*names, *names, "a stranger's"])
            told.update(names)
        else:
            now += seconds
            done, late = leases.ended(now)
            assert {*done} <= told
            assert all(until[name] <= now for name in late)
            freed.update([*done, *late])
            assert len(leases) == granted - len(freed)
    done, late = leases.ended(1e9)
    freed.update([*done, *late])
    assert freed == Counter(until.keys())
