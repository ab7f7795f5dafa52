"""BALANCE: replicas share what they all hold, and every worker computes the same shares by itself."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.flow import Holders, lowest, needs
from kvplan import certify, contacts, plan_mesh, plan_writes
from kvplan.testing.strategies import Case, cases
from tests.small import engine

SIZES = st.sampled_from([1, 2, 4, 8, 16])


@given(SIZES, SIZES, SIZES, st.integers(1, 3))
def test_replicas_reach_the_lowest_maximum(src: int, dst: int, heads: int, layers: int) -> None:
    """With as many replicas as sources for each destination, the busiest source serves as little as possible."""
    replicas = max(src // dst, 1)
    sources, destinations = (
        engine(name, tp, heads, layers=layers * replicas) for name, tp in (("prefill", src), ("decode", dst))
    )
    served = Counter[int]()
    needed: dict[Holders, int | Fraction] = defaultdict(Fraction)
    for pair in plan_mesh(destinations, sources, replicas=replicas).cost(8).pairs:
        served[pair.remote[1]] += pair.num_bytes
    for (_, _, holders), number in needs(destinations, sources, 8).items():
        needed[holders] += number
    assert max(served.values()) == lowest(needed)


@given(st.dictionaries(st.frozensets(st.integers(0, 3), min_size=1), st.integers(1, 9)))
def test_no_limit_is_lower_than_what_some_sources_hold_alone(bytes_of: dict[Holders, int | Fraction]) -> None:
    """The lowest maximum is the largest mean, over all sets of sources, of the bytes that only the set holds."""
    means = [
        Fraction(sum(number for holders, number in bytes_of.items() if holders <= set(some)), size)
        for size in (1, 2, 3, 4)
        for some in itertools.combinations(range(4), size)
    ]
    assert lowest(bytes_of) == max(means)


@given(cases(), st.integers(1, 5))
def test_readers_and_writers_agree_on_the_shares(case: Case, replicas: int) -> None:
    """For any number of replicas, plans have certificates, and readers, single writers and contacts agree."""
    names, engines = case.not_transferred, (case.destinations, case.sources)
    meshes = [
        plan_mesh(*engines, operation, not_transferred=names, replicas=replicas) for operation in ("READ", "WRITE")
    ]
    for mesh in meshes:
        certify(mesh)
    reads, writes = (mesh.cost(1) for mesh in meshes)
    read = {(pair.local, pair.remote): pair.lengths for pair in reads.pairs}
    assert read == {(pair.remote, pair.local): pair.lengths for pair in writes.pairs}

    writer, *siblings = case.sources
    alone = plan_writes(writer, case.destinations, siblings, not_transferred=names, replicas=replicas)
    assert {(pair.remote, pair.local): pair.lengths for pair in alone.cost(1).pairs}.items() <= read.items()

    known = contacts(*engines, not_transferred=names, replicas=replicas)
    for worker in case.destinations:
        assert set(known[worker.key]) >= {
            source for (reader, source), moved in read.items() if reader == worker.key and moved
        }
