"""TRUST: offers decode to their workers, everything else is refused, and comparisons agree with planning."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvplan import KVPlanError, PeerError, Worker, compare, decode, encode, plan_reads, problems
from kvplan.handshake import fingerprint
from kvplan.testing.strategies import Case, cases
from property_tests import fuzz_offers

PAIRED = {"TENSOR", "GROUP", "DTYPE", "AXES", "SIZE"}
"""The codes that planning refuses a pair of workers with for what their tensors are."""


def all_of(case: Case) -> tuple[Worker, ...]:
    return (*case.destinations, *case.sources)


@given(cases())
def test_an_offer_is_the_worker(case: Case) -> None:
    """Workers of any layout decode as themselves, and have one message."""
    for worker in all_of(case):
        data = encode(worker)
        assert decode(data) == worker
        assert encode(decode(data)) == data
        assert problems(data) == ()


@given(cases(), st.integers(0, 1 << 40))
def test_a_fingerprint_is_of_geometry(case: Case, distance: int) -> None:
    """It does not change with addresses and names, and workers that differ in these alone have no difference."""
    for worker in all_of(case):
        regions = [attrs.evolve(r, name=f"at.{r.name}", address=r.address // 2, device_id=9) for r in worker.regions]
        apart = [attrs.evolve(region, address=(i + 1 << 50) + distance) for i, region in enumerate(regions)]
        views = [attrs.evolve(view, region=f"at.{view.region}") for view in worker.views]
        other = Worker("elsewhere", 99, apart, worker.groups, views)
        assert fingerprint(other) == fingerprint(worker)
        assert {difference.field for difference in compare(worker, other).differences} <= {"memory"}


@given(cases())
def test_one_fingerprint_is_one_geometry(case: Case) -> None:
    """The offers of two workers with one fingerprint differ only in engine, rank and addresses."""
    known: dict[str, object] = {}
    for worker in all_of(case):
        offer = json.loads(encode(worker))
        rest = [offer[key] for key in ("groups", "layouts")], worker.geometry_of, worker.region_offsets.tolist()
        named = [(region.size_bytes, region.memory) for region in worker.regions], [view.name for view in worker.views]
        assert known.setdefault(fingerprint(worker), (rest, named)) == (rest, named)
    event(f"{len(known)} of {len(all_of(case))} differ")


@given(cases(), cases(), st.booleans())
def test_a_comparison_says_what_planning_does(case: Case, strange: Case, related: bool) -> None:
    """Planning refuses a pair exactly if the comparison does, with one of its codes."""
    sources = case.sources if related else strange.sources
    for destination, source in zip(case.destinations, sources, strict=False):
        known = [name for name in case.not_transferred if name in {**destination.tensors, **source.tensors}]
        comparison = compare(destination, source, known)
        codes = {difference.code for difference in comparison.differences} - {""}
        try:
            skipped = [name for name in case.not_transferred if name in destination.tensors]
            plan_reads(destination, [source], not_transferred=skipped)
            raised = ""
        except KVPlanError as error:
            raised = error.code
        assert comparison.ok == (not codes)
        assert raised in codes if codes else raised not in PAIRED
        event(f"refused: {sorted(codes)}" if codes else "planned")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=20,
)


@given(JSON, st.sampled_from([*json.loads(fuzz_offers.OFFERS[0]), "extensions", "other"]))
def test_any_json_is_read_or_refused(value: object, key: str) -> None:
    """For any JSON in place of a part of an offer, decode raises a PeerError or returns a worker."""
    message = {**json.loads(fuzz_offers.OFFERS[0]), key: value}
    for text in (json.dumps(message), json.dumps(message, ensure_ascii=False)):
        event(fuzz_offers.outcome(text.encode(errors="surrogatepass")))


def test_pieces_of_offers_are_read_or_refused() -> None:
    """A short run of the fuzzer has no other outcome, and many inputs get far."""
    outcomes = fuzz_offers.fuzz(3000, seed=1)
    assert outcomes.total() == 3000
    assert set(outcomes) >= {
        "decoded",
        "MESSAGE",
        "VERSION",
        "KEY",
        "TYPE",
        "RANGE",
        "NAME",
        "SIZE",
        "BOUNDS",
        "STRIDE",
    }


def unguarded(data: bytes) -> Worker:
    """A decode that lets JSON errors escape."""
    json.loads(data)
    return decode(data)


def forgetful(data: bytes) -> Worker:
    """A decode that loses the blocks of large pools."""
    worker = decode(data)
    views = [attrs.evolve(view, num_blocks=min(view.num_blocks, 4)) for view in worker.views]
    return attrs.evolve(worker, views=views[: len(data) % 2 + 1])


@pytest.mark.parametrize("broken, error", [(unguarded, ValueError), (forgetful, AssertionError)])
def test_the_fuzzer_finds_a_broken_decode(monkeypatch: pytest.MonkeyPatch, broken: object, error: type) -> None:
    """An error that is not a PeerError, or a wrong worker, stops the fuzzer and names the input."""
    monkeypatch.setattr(fuzz_offers, "decode", broken)
    with pytest.raises(ExceptionGroup, match=r"^decode\(b") as caught:
        fuzz_offers.fuzz(2000, seed=1)
    assert isinstance(caught.value.exceptions[0], error)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(data: bytes) -> None:
    """Bytes that were not written as an offer are never a worker."""
    with pytest.raises(PeerError):
        decode(data)
