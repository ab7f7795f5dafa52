"""Strategies: what each takes, which takes the least time, and the rates that say so."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from kvplan import KVPlanError, Model, Region, TransferPlan
from kvplan.staging import CUDA_IPC, SHARED_MEMORY, Rates, StagedPlan, choose
from tests.small import engine
from tests.staged import NAME, with_staging

FREE = Rates("nowhere", 0, 0, 0, 0, 0)


def workers(size: int = 1 << 20) -> dict[str, Any]:
    """A head-major worker with a staging region, and two token-major ones that it reads from."""
    (local,) = engine("decode", layers=3)
    return {
        "local": with_staging(local, size),
        "remotes": engine("prefill", tp=2, order="NH", layers=3),
        "staging": NAME,
    }


def test_all_strategies_are_planned() -> None:
    """Each with its plan and what that takes; where nothing takes time, the first one is the best."""
    choice = choose(**workers(1 << 12), tokens=40, rates=FREE)
    assert [option.strategy for option in choice.options] == ["direct", "receive-staged", "receive-staged-whole"]
    direct, *staged = choice.options
    assert choice.best is direct
    assert isinstance(direct.plan, TransferPlan)
    cost = direct.plan.cost(40)
    assert (direct.num_descriptors, direct.num_bytes) == (cost.num_descriptors, cost.num_bytes)
    assert (direct.num_transfers, direct.num_copies) == (2, 0)
    for option in staged:
        assert isinstance(option.plan, StagedPlan)
        found = option.plan.cost(40)
        moved = found.transfers
        assert found.num_chunks > 1
        assert (option.num_descriptors, option.num_bytes) == (moved.num_descriptors, moved.num_bytes)
        assert (option.num_transfers, option.num_copies) == (2 * found.num_chunks, found.num_copies)


def test_one_strategy_reads_whole_blocks() -> None:
    """Where a source has more heads than are needed, whole blocks are fewer descriptors and more bytes."""
    local, remotes = with_staging(engine("decode", tp=2)[0]), engine("prefill", order="NH")
    _, exact, whole = choose(local, remotes, tokens=40, staging=NAME, rates=FREE).options
    assert exact.num_descriptors > whole.num_descriptors
    assert 2 * exact.num_bytes == whole.num_bytes


def test_the_least_time_is_the_best() -> None:
    """Staging where descriptors take time, the direct plan where copies do. Options are in order of time."""
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
def test_all_that_a_strategy_takes_has_its_rate(rate: Any) -> None:
    """With one rate of 1, seconds are the number of transfers, bytes, copies or copied bytes."""
    for option in choose(**workers(), tokens=40, rates=Rates(**{**attrs.asdict(FREE), rate: 1})).options:
        needed = 40 * 3 * 4 * 16 if option.num_copies else 0
        number = {
            "transfer_s": option.num_transfers,
            "byte_s": option.num_bytes,
            "copy_s": option.num_copies,
            "copied_byte_s": needed,
        }
        assert option.seconds == number[rate]


def test_a_strategy_without_memory_is_left_out() -> None:
    """A staging region that is too small refuses staging with its error, which is raised for a named strategy."""
    choice = choose(**workers(100), tokens=40)
    assert [option.strategy for option in choice.options] == ["direct"]
    assert {error.code for error in choice.refused.values()} == {"MEMORY"}
    assert "receive-staged: MEMORY: cannot stage a request" in str(choice)
    with pytest.raises(KVPlanError, match="MEMORY"):
        choose(**workers(100), tokens=40, strategy="receive-staged")


def test_without_a_region_there_is_no_staging() -> None:
    """A worker without a staging region gets the direct plan."""
    (local,), remotes = engine("decode"), engine("prefill", order="NH")
    choice = choose(local, remotes, tokens=40)
    assert [option.strategy for option in choice.options] == ["direct"]
    with pytest.raises(KVPlanError, match="NAME"):
        choose(local, remotes, tokens=40, strategy="receive-staged")


def test_a_named_strategy_is_the_only_option() -> None:
    """Whatever it takes."""
    choice = choose(**workers(), tokens=40, strategy="receive-staged-whole")
    assert [option.strategy for option in choice.options] == ["receive-staged-whole"]


def test_errors_of_planning_are_raised() -> None:
    """What no source has is an error of all strategies."""
    with pytest.raises(KVPlanError, match="TENSOR"):
        choose(**{**workers(), "remotes": engine("prefill", layers=2)}, tokens=40)


def test_arguments_reach_the_plans() -> None:
    """Tensors that are not transferred are in no strategy's bytes."""
    every, some = (choose(**workers(), tokens=40, not_transferred=names) for names in ((), ["layers.1"]))
    assert [2 * option.num_bytes // 3 for option in every.options] == [option.num_bytes for option in some.options]


def test_a_choice_prints_all_strategies() -> None:
    """The best first, what each takes, and the rates."""
    choice = choose(**workers(), tokens=40, rates=attrs.evolve(FREE, descriptor_s=1e-3))
    first, *lines, last = str(choice).splitlines()
    assert first == "decode/0, 40 tokens: receive-staged"
    assert lines[0] == "  receive-staged: 60 ms for 60 descriptors, 7680 bytes, 6 local copies"
    assert lines[-1] == "  direct: 480 ms for 480 descriptors, 7680 bytes"
    assert last == "  by rates of nowhere"
    assert repr(choice) == "<Choice for decode/0, 40 tokens: receive-staged of 3>"


@pytest.mark.parametrize(("memory", "rates"), [("DRAM", SHARED_MEMORY), ("VRAM", CUDA_IPC)])
def test_rates_are_those_of_the_memory(memory: str, rates: Rates) -> None:
    """On a GPU, where copies take next to nothing and descriptors much, more pairs are staged."""
    model = Model.shipped("llama-3.1-8b")
    (remote,) = model.engine("prefill", layout="BLHNC", tokens_per_block=64, num_blocks=20, memory=memory)
    (local,) = model.engine("decode", layout="BLHNC", tokens_per_block=16, num_blocks=80, memory=memory)
    staging = Region(NAME, 1 << 50, 128 << 20, memory)
    local = attrs.evolve(local, regions=(*local.regions, staging))
    choice = choose(local, [remote], tokens=1024, staging=NAME)
    assert choice.rates == rates
    assert choice.best.strategy == ("direct" if memory == "DRAM" else "receive-staged")


RATES = Rates("here", 1e-4, 2e-6, 3e-10, 4e-5, 5e-10)


@pytest.mark.parametrize(
    ("value", "code"), [(-1e-9, "RANGE"), (math.inf, "RANGE"), (math.nan, "RANGE"), ("1", "TYPE"), (True, "TYPE")]
)
@pytest.mark.parametrize("name", ["transfer_s", "descriptor_s", "byte_s", "copy_s", "copied_byte_s"])
def test_each_rate_is_a_number_of_seconds(name: str, value: Any, code: str) -> None:
    """Finite and not negative, integers too."""
    with pytest.raises(KVPlanError, match=f"^{code}: .*{name}"):
        Rates(**{**attrs.asdict(RATES), name: value})
    assert getattr(Rates(**{**attrs.asdict(RATES), name: 1}), name) == 1.0
