"""What vLLM's scheduler part has workers copy to main memory, without vLLM."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.simulation.test_vllm_scheduler import ASKED, BLOCK, PROMPT, Engines, blocks_of, engines, ids_of, request_of
from tests.simulation.vllm_objects import scheduled

__all__ = ["engines"]

KINDS = ("full", "window", "state")
IDS = [*range(1, -(-PROMPT // BLOCK) + 1)]  # of a prompt


class Step(NamedTuple):
    """What a scheduler has computed of a request, and computes next. The request has ``begun`` in this step."""

    num_computed: int
    num_scheduled: int
    begun: str = ""
    num_in_flight: int = 0


def save(scheduler: Any, managers: list[Any], request: Any, kinds: tuple[str, ...], step: Step) -> dict[str, list[int]]:
    """The blocks of each group that workers save in a step of a request."""
    request.num_computed_tokens, request.num_in_flight_tokens = step.num_computed, step.num_in_flight
    tables = blocks_of(kinds, step.num_computed + step.num_scheduled).blocks
    for manager, table in zip(managers, tables, strict=True):
        manager.req_to_blocks = {"r": table}
    num_scheduled = {"r": step.num_scheduled, "another": 3}
    new, resumed = (["r"] if step.begun == begun else [] for begun in ("new", "resumed"))
    scheduler.save(scheduled(new, resumed, num_scheduled=num_scheduled))
    saves = scheduler.take_step().saves
    # once
    assert scheduler.take_step().saves == {}
    return {group: sorted(ids) for group, ids in saves.items()}


def saved(engines: Engines, kinds: tuple[str, ...], step: Step, params: Any, **settings: Any) -> dict[str, list[int]]:
    """The blocks that are saved in a step of a request that has arrived."""
    scheduler = engines.start(*kinds, **settings)
    request = request_of([*range(PROMPT)], params)
    scheduler.add(request)
    return save(scheduler, engines.managers["prefill"], request, kinds, step)


@pytest.mark.parametrize("begun", ["new", "resumed"])
@pytest.mark.parametrize("num_cached", [0, 3 * BLOCK])
def test_all_blocks_of_a_request_are_saved_when_it_begins(engines: Engines, num_cached: int, begun: str) -> None:
    """Those of the prefix cache too, which another request has computed. Of states there is the last."""
    step = Step(num_cached, PROMPT - num_cached, begun)
    assert saved(engines, KINDS, step, ASKED) == {"group0": IDS, "group1": IDS[3:], "group2": IDS[-1:]}


@pytest.mark.parametrize(("num_in_flight", "first"), [(0, 5), (1, 4), (BLOCK + 1, 3), (6 * BLOCK, 0)])
def test_then_what_each_step_computes_is_saved(engines: Engines, num_in_flight: int, first: int) -> None:
    """Also what steps under way may compute once more: they were for drafts that may be refused."""
    step = Step(5 * BLOCK, PROMPT - 5 * BLOCK, num_in_flight=num_in_flight)
    assert saved(engines, ("full", "state"), step, ASKED) == {"group0": IDS[first:], "group1": IDS[-1:]}


def test_what_drafts_cache_of_the_last_position_is_saved_with_the_next_one(engines: Engines) -> None:
    """It is of the token that comes next."""
    step = Step(5 * BLOCK, PROMPT - 5 * BLOCK)
    assert saved(engines, ("full",), step, ASKED, num_drafts=1) == {"group0": IDS[4:]}


def test_a_block_is_saved_in_the_step_that_writes_into_it(engines: Engines) -> None:
    """And no later one."""
    assert saved(engines, ("full",), Step(BLOCK, BLOCK), ASKED) == {"group0": [2]}


def test_an_answer_is_saved_if_the_next_turn_may_read_it(engines: Engines) -> None:
    params = {"do_remote_prefill": True}
    step = Step(PROMPT, 1)
    assert saved(engines, ("full",), step, params, bidirectional_kv_xfer=True) == {"group0": IDS[-1:]}


def test_an_answer_is_not_saved_if_nobody_keeps_it(engines: Engines) -> None:
    assert saved(engines, ("full",), Step(PROMPT, 1), {"do_remote_prefill": True}) == {}


def test_nothing_is_saved_of_what_nobody_may_read(engines: Engines) -> None:
    assert saved(engines, ("full",), Step(0, PROMPT, "new"), None) == {}


def test_nothing_is_saved_of_a_request_that_has_finished(engines: Engines) -> None:
    scheduler = engines.start("full")
    request = request_of([*range(PROMPT)], ASKED)
    scheduler.add(request)
    scheduler.hand_over(request, ids_of(("full",), PROMPT))
    assert save(scheduler, engines.managers["prefill"], request, ("full",), Step(0, PROMPT, "new")) == {}
