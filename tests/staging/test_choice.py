"""Strategies: every way that there is, what it takes, and the one that takes least."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplan import KVPlanError, TransferPlan
from kvplan.staging import Rates, StagedPlan, choose
from tests.small import engine
from tests.staged import NAME, with_staging

FREE = Rates("nowhere", 0, 0, 0, 0, 0)


def workers(size: int = 1 << 20) -> dict[str, Any]:
    """A head-major worker with memory set aside, and the two token-major ones that it reads from or writes to."""
    (local,) = engine("decode", layers=3)
    return {
        "local": with_staging(local, size),
        "remotes": engine("prefill", tp=2, order="NH", layers=3),
        "staging": NAME,
    }


@pytest.mark.parametrize(
    ("operation", "strategies"),
    [("READ", ["direct", "receive-staged", "receive-staged-whole"]), ("WRITE", ["direct", "send-staged"])],
)
def test_each_operation_has_its_ways(operation: str, strategies: list[str]) -> None:
    """Each is the plan of its name, with what that takes; where all takes no time, the first of them is the best."""
    choice = choose(**workers(), tokens=40, operation=operation, rates=FREE)
    assert [option.strategy for option in choice.options] == strategies
    direct, *staged = choice.options
    assert choice.best is direct
    assert isinstance(direct.plan, TransferPlan)
    cost = direct.plan.cost(40)
    assert (direct.num_descriptors, direct.num_bytes) == (cost.num_descriptors, cost.num_bytes)
    assert (direct.num_transfers, direct.num_copies) == (2, 0)
    for option in staged:
        assert isinstance(option.plan, StagedPlan)
        outlay = option.plan.cost(40)
        assert option.plan.operation == operation
        assert (option.num_descriptors, option.num_bytes) == (
            outlay.transfers.num_descriptors,
            outlay.transfers.num_bytes,
        )
        assert (option.num_transfers, option.num_copies) == (2 * outlay.num_chunks, outlay.num_copies)


def test_whole_blocks_are_read_by_one_of_the_ways() -> None:
    """Where a source has more heads than are needed, whole blocks are fewer descriptors and more bytes."""
    local, remotes = with_staging(engine("decode", tp=2)[0]), engine("prefill", order="NH")
    _, exact, whole = choose(local, remotes, tokens=40, staging=NAME, rates=FREE).options
    assert exact.num_descriptors > whole.num_descriptors
    assert 2 * exact.num_bytes == whole.num_bytes


def test_the_least_time_is_the_best() -> None:
    """Descriptors alone take time: two legs. Copies alone do: one. Options are in order of time."""
    by_descriptors = choose(**workers(), tokens=40, rates=attrs.evolve(FREE, descriptor_s=1))
    by_copies = choose(**workers(), tokens=40, rates=attrs.evolve(FREE, copy_s=1))
    assert by_descriptors.best.strategy == "receive-staged"
    assert by_copies.best.strategy == "direct"
    for choice in (by_descriptors, by_copies):
        seconds = [option.seconds for option in choice.options]
        assert seconds == sorted(seconds)
    assert [option.seconds for option in by_descriptors.options] == [
        option.num_descriptors for option in by_descriptors.options
    ]


@pytest.mark.parametrize("rate", ["transfer_s", "byte_s", "copy_s", "copied_byte_s"])
def test_all_that_a_way_takes_has_its_rate(rate: Any) -> None:
    """One rate at a time: seconds are as many as there are transfers, bytes, copies or bytes put in order."""
    for option in choose(**workers(), tokens=40, rates=Rates(**{**attrs.asdict(FREE), rate: 1})).options:
        needed = 40 * 3 * 4 * 16 if option.num_copies else 0
        number = {
            "transfer_s": option.num_transfers,
            "byte_s": option.num_bytes,
            "copy_s": option.num_copies,
            "copied_byte_s": needed,
        }
        assert option.seconds == number[rate]


def test_a_way_without_memory_is_left_out() -> None:
    """A staging region that is too small refuses two legs, and says why; asked for by name, that is an error."""
    choice = choose(**workers(100), tokens=40)
    assert [option.strategy for option in choice.options] == ["direct"]
    assert {error.code for error in choice.refused.values()} == {"MEMORY"}
    assert "receive-staged: MEMORY: cannot stage a request" in str(choice)
    with pytest.raises(KVPlanError, match="MEMORY"):
        choose(**workers(100), tokens=40, strategy="receive-staged")


def test_without_a_region_there_is_one_leg() -> None:
    """A worker that has set nothing aside gets the direct plan."""
    (local,), remotes = engine("decode"), engine("prefill", order="NH")
    choice = choose(local, remotes, tokens=40)
    assert [option.strategy for option in choice.options] == ["direct"]
    with pytest.raises(KVPlanError, match="NAME"):
        choose(local, remotes, tokens=40, strategy="receive-staged")


def test_a_strategy_may_be_named() -> None:
    """Then it is the only option, whatever it takes."""
    choice = choose(**workers(), tokens=40, strategy="receive-staged-whole")
    assert [option.strategy for option in choice.options] == ["receive-staged-whole"]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"operation": "COPY"}, "NAME: cannot choose a strategy: expected operation READ or WRITE, got 'COPY'"),
        ({"strategy": "send-staged"}, "NAME: cannot choose a strategy: expected one of auto, direct, receive-staged, "),
        ({"tokens": -1}, "RANGE"),
        ({"tokens": "8"}, "TYPE"),
        ({"staging": "other"}, "NAME"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], error: str) -> None:
    """Each with its code."""
    with pytest.raises(KVPlanError, match=f"^{error}"):
        choose(**{**workers(), "tokens": 40, **given})


def test_errors_of_planning_are_raised() -> None:
    """What no source has is an error of all ways."""
    with pytest.raises(KVPlanError, match="TENSOR"):
        choose(**{**workers(), "remotes": engine("prefill", layers=2)}, tokens=40)


def test_arguments_reach_the_plans() -> None:
    """Tensors that are not to be moved are in no way's bytes."""
    every, some = (choose(**workers(), tokens=40, not_transferred=names) for names in ((), ["layers.1"]))
    assert [2 * option.num_bytes // 3 for option in every.options] == [option.num_bytes for option in some.options]


def test_a_choice_tells_all_ways() -> None:
    """The best first, what each takes, and by which rates."""
    choice = choose(**workers(), tokens=40, rates=attrs.evolve(FREE, descriptor_s=1e-3))
    first, *lines, last = str(choice).splitlines()
    assert first == "decode/0, 40 tokens: receive-staged"
    assert lines[0] == "  receive-staged: 60 ms for 60 descriptors, 7680 bytes, 6 copies at home"
    assert lines[-1] == "  direct: 480 ms for 480 descriptors, 7680 bytes"
    assert last == "  by rates of nowhere"
    assert repr(choice) == "<Choice for decode/0, 40 tokens: receive-staged of 3>"
