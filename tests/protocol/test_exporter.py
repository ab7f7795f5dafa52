"""Exported requests: a table of transitions that the object keeps, and what readers find at each step."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Blocks, KVPlanError
from kvplan.protocol import Leases, Source
from kvplan.protocol import exporter as module
from kvplan.protocol.exporter import TRANSITIONS, Exporter, ExportEvent, ExportState
from kvplan.protocol.groups import CacheGroup
from tests.blocking import Clock

SOURCE = Source("prefill", "a1", "10.0.0.1", 5600)
GROUPS = {"attn": CacheGroup(16), "swa": CacheGroup.of_window(16, 40), "ssm": CacheGroup(None)}
BLOCKS = {"attn": Blocks(range(1, 8)), "swa": Blocks([0, 0, 0, 3, 4, 5, 6], null=0), "ssm": Blocks([9])}


class World:
    """An exporter, its clock, and a reader."""

    def __init__(self, early_tokens: int = 16) -> None:
        self.clock = Clock()
        self.leases = Leases(self.clock)
        self.withdrawn: list[tuple[str, str]] = []
        self.exporter = Exporter(
            SOURCE, self.leases, GROUPS, early_tokens=early_tokens, withdraw=lambda *what: self.withdrawn.append(what)
        )

    def publish(self, num_tokens: int, request: str = "r") -> Any:
        return self.exporter.publish(request, num_tokens, lambda: BLOCKS, str)

    def finish(self, num_tokens: int = 100, request: str = "r") -> Any:
        return self.exporter.finish(request, num_tokens, BLOCKS, str)


@pytest.fixture
def world() -> World:
    return World()


def table_of(doc: str, events: Any, states: Any) -> dict[tuple[Any, Any], Any]:
    """The table in a module's docstring."""
    header, *rows = [line[4:] for line in doc.splitlines() if line.startswith("    ")]
    columns = {state: header.index(f" {state.value}") + 1 for state in states if f" {state.value}" in header}
    table: dict[tuple[Any, Any], Any] = {}
    for row in rows:
        event = events[row.split()[0]]
        for state, column in columns.items():
            word = re.match(r"\w*", row[column:])
            assert word is not None
            if word[0]:
                table[state, event] = states(word[0])
    return table


def test_the_page_has_the_table() -> None:
    assert table_of(module.__doc__ or "", ExportEvent, ExportState) == TRANSITIONS


def test_windows_and_states_come_with_the_whole(world: World) -> None:
    """Under the lease of the parts; before, readers get the groups that keep all positions."""
    world.exporter.open("r", "room")
    part = world.publish(40)
    assert (part.num_tokens, part.blocks["attn"].ids.tolist()) == (40, [*range(1, 8)])
    assert [part.blocks[group].ids.size for group in ("swa", "ssm")] == [0, 0]
    assert world.exporter.num_blocks == 7
    whole = world.finish()
    assert (whole.lease, whole.kept) == (part.lease, {"attn": 0, "swa": 48})
    assert world.exporter.num_blocks == 12
    assert world.exporter.blocks_of(whole.lease) == BLOCKS
    assert world.leases.claim(whole.lease, "decode")
    assert world.leases.release(whole.lease, "decode")
    ended = world.exporter.step()
    assert (ended.released, world.withdrawn, ended.late) == (("r",), [("room", whole.lease)], {})
    assert (len(world.exporter), world.exporter.num_blocks, world.exporter.blocks_of(whole.lease)) == (0, 0, None)


def test_little_more_is_not_published(world: World) -> None:
    """Nor what a prefix cache had, which another request may still compute."""
    world.exporter.open("r")
    world.exporter.note_found("r", 32)
    assert [world.publish(number) for number in (16, 32)] == [None, None]
    assert world.publish(33).num_tokens == 33
    assert [world.publish(number) for number in (33, 48)] == [None, None]
    assert world.publish(49).num_tokens == 49


def test_a_preempted_request_that_nobody_claimed_is_published_again(world: World) -> None:
    """Under another lease."""
    world.exporter.open("r", "room")
    first = world.publish(40)
    world.exporter.revoke("r")
    world.exporter.revoke("r")
    assert (world.withdrawn, world.leases.is_valid(first.lease)) == ([("room", first.lease)], False)
    assert world.publish(16).lease != first.lease


def test_a_preempted_request_that_was_claimed_is_lost(world: World) -> None:
    """Its reader was told so: nothing more is published or handed over."""
    world.exporter.open("r")
    lease = world.publish(40).lease
    assert world.leases.claim(lease, "decode")
    world.exporter.revoke("r")
    assert (world.publish(80), world.finish()) == (None, None)
    world.exporter.abort("r")
    assert (world.withdrawn, len(world.exporter)) == ([("", lease)], 0)


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_request_whose_readers_are_done_early_is_computed_for_nobody(world: World, *, is_seen: bool) -> None:
    """Whether a step has seen it or not; blocks are never reported free while they are computed into."""
    world.exporter.open("r", "room")
    lease = world.publish(40).lease
    assert world.leases.claim(lease, "decode")
    assert world.leases.release(lease, "decode")
    if is_seen:
        world.exporter.step()
        assert world.exporter.num_blocks == 0
    assert world.finish() is None
    world.exporter.abort("r")
    assert world.withdrawn == [("room", lease)]
    assert world.exporter.step().released == ()


def test_an_aborted_request_is_forgotten(world: World) -> None:
    """Its readers hear of it by their claims."""
    world.exporter.open("r", "room")
    lease = world.publish(40).lease
    world.exporter.abort("r")
    world.exporter.abort("r")
    assert (world.withdrawn, world.leases.is_valid(lease), len(world.leases)) == ([("room", lease)], False, 0)


def test_kept_requests_give_way(world: World) -> None:
    """The oldest unclaimed ones first; of the others as many readers are asked as there are blocks too few."""
    leases = {}
    for name in "abcde":
        handoff: Any = world.exporter.finish(name, 100, BLOCKS, str, first_s=500.0)
        leases[name] = handoff.lease
        assert name in "bd" or world.leases.claim(leases[name], "reader")
    num_blocks = sum(table.ids.size for table in BLOCKS.values())
    world.finish(request="computed")
    assert (world.exporter.give_way(num_blocks), world.leases.wanted) == (("b",), frozenset())
    assert world.exporter.step().released == ("b",)
    assert world.exporter.give_way(2 * num_blocks + 1) == ("d",)
    assert world.leases.wanted == {leases["a"], leases["c"]}
    assert world.exporter.step().released == ("d",)
    assert world.leases.is_valid(leases["a"])
    assert (world.exporter.give_way(0), world.leases.wanted) == ((), frozenset())


def test_leases_that_end_late_say_why(world: World) -> None:
    """Blocks are free in any case."""
    leases = [world.finish(request=request).lease for request in ("unclaimed", "held")]
    for second in range(20, 3600, 20):
        world.clock.now = float(second)
        assert world.leases.claim(leases[1], "decode")
        if second == 40:
            assert "claims it within 30 s" in str(world.exporter.step().late["unclaimed"])
    world.clock.now = 3600.0
    ended = world.exporter.step()
    assert (ended.released, "which is max_lease_s" in str(ended.late["held"])) == (("held",), True)


def test_a_room_is_of_one_request(world: World) -> None:
    world.exporter.open("r", "room")
    with pytest.raises(
        KVPlanError, match="NAME: cannot open room room: expected a room of its own for each request, got one in use"
    ):
        world.exporter.open("s", "room")
    world.exporter.open("s")
    world.exporter.abort("r")
    world.exporter.open("t", "room")


def test_nothing_else_may_happen(world: World) -> None:
    world.finish()
    with pytest.raises(KVPlanError, match=r"TRANSFER: cannot PUBLISH a request: .* got a request that is pinned"):
        world.publish(120)


def test_a_request_of_a_name_in_use_takes_its_place(world: World) -> None:
    """Readers of the other one are told that its lease has ended."""
    first, second = world.finish(), world.finish()
    assert (world.leases.is_valid(first.lease), world.leases.is_valid(second.lease)) == (False, True)
    world.exporter.open("r")
    assert (len(world.leases), len(world.exporter)) == (0, 1)


CALLS = st.lists(
    st.sampled_from(["open", "publish", "revoke", "finish", "abort", "claim", "done", "step", "wait"]), max_size=40
)


@given(CALLS)
def test_blocks_are_free_once_and_never_under_a_lease(calls: list[str]) -> None:
    """Whatever an engine and a reader do: a lease in force belongs to the blocks that the exporter keeps."""
    world = World()
    num_tokens, lease, released = 0, "", 0
    for call in calls:
        is_open = world.exporter.is_open("r")
        state = world.exporter._requests["r"].state if is_open else None
        if call == "open" and not is_open:
            world.exporter.open("r")
            num_tokens, released = 0, 0
        elif call == "publish" and state in (ExportState.COMPUTING, ExportState.PUBLISHED, ExportState.LOST):
            num_tokens += 20
            handoff = world.publish(num_tokens)
            lease = handoff.lease if handoff else lease
        elif call == "revoke":
            world.exporter.revoke("r")
        elif call == "finish" and is_open and state is not ExportState.PINNED:
            handoff = world.finish(num_tokens + 1)
            lease = handoff.lease if handoff else lease
        elif call == "abort":
            world.exporter.abort("r")
        elif call == "claim" and lease:
            world.leases.claim(lease, "decode")
        elif call == "done" and lease:
            world.leases.release(lease, "decode")
        elif call == "wait":
            world.clock.now += 20.0
        elif call == "step":
            released += len(world.exporter.step().released)
            assert released <= 1
        if lease and world.leases.is_valid(lease):
            assert world.exporter.blocks_of(lease) is not None
        assert len(world.leases) <= len(world.exporter) <= 1
