"""Imported requests: a table of transitions that the object keeps, and what workers are told at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import attrs
import pytest

from kvplan import Blocks, KVPlanError
from kvplan.protocol import Handoff, SharedKey, Source
from kvplan.protocol import importer as module
from kvplan.protocol.groups import CacheGroup
from kvplan.protocol.importer import TRANSITIONS, Importer, ImportEvent, ImportState
from tests.protocol.test_exporter import table_of

SOURCE = Source("prefill", "a1", "10.0.0.1", 5600)
GROUPS = {"attn": CacheGroup(16), "swa": CacheGroup.of_window(16, 40)}
KEY = SharedKey.of(b"a secret of all engines")
LOCAL = {"attn": Blocks(range(1, 8)), "swa": Blocks([0, 0, 0, 3, 4, 5, 6], null=0)}
PART = {"attn": Blocks(range(11, 18)), "swa": Blocks([])}
WHOLE = {"attn": Blocks(range(11, 18)), "swa": Blocks([0, 0, 0, 13, 14, 15, 16], null=0)}


def prompt(num_tokens: int) -> str:
    """The digest of a prompt's first tokens."""
    return f"{num_tokens}"


def handoff_of(num_tokens: int, *, is_whole: bool = False, lease: str = "l", kept: int = 48) -> dict[str, Any]:
    """The parameters of a handoff, whose prompts have the digest of their length."""
    blocks, kept_of = (WHOLE, {"attn": 0, "swa": kept}) if is_whole else (PART, {"attn": 0})
    return Handoff(SOURCE, lease, num_tokens, f"{num_tokens}", blocks, kept_of).params(KEY)


@attrs.define(eq=False)
class World:
    """An importer, and what it asks and claims."""

    overdue: set[str] = attrs.field(factory=set)
    claimed: list[str] = attrs.field(factory=list)
    refused: dict[str, KVPlanError] = attrs.field(factory=dict)
    wanted: set[str] = attrs.field(factory=set)
    takes: dict[str, Callable[[Any], bool]] = attrs.field(factory=dict)
    importer: Importer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.importer = Importer(GROUPS, cast(Any, self), "decode", KEY, rooms=cast(Any, self))

    def claim(self, source: Source, lease: str, reader: str) -> None:
        self.claimed.append(lease)

    def release(self, source: Source, lease: str, reader: str) -> None:
        self.claimed.remove(lease)

    def refusal(self, source: Source, lease: str, reader: str) -> KVPlanError | None:
        return self.refused.get(lease)

    def is_wanted(self, source: Source, lease: str, reader: str) -> bool:
        assert reader == "decode r"
        return lease in self.wanted

    def subscribe(self, reader: str, room: str, address: str, deliver: Callable[[Any], bool]) -> None:
        self.takes[reader] = deliver

    def silence(self, reader: str) -> KVPlanError | None:
        is_late = reader in self.overdue
        return KVPlanError("PEER", "read", expected="an entry", got="nothing") if is_late else None

    def unsubscribe(self, reader: str) -> None:
        self.takes.pop(reader, None)

    def ask(self) -> None:
        self.importer.ask("r", "room", "prefill:5600", prompt, 100, num_left=1)

    def take(self, handoff: dict[str, Any], **entry: Any) -> bool:
        return self.takes["decode r"]({"handoff": handoff, **entry})

    def allocate(self) -> None:
        num_tokens = self.importer.count("r", 0, 99)
        assert num_tokens is not None
        self.importer.read("r", LOCAL, num_tokens)

    def spans(self) -> list[Any]:
        """The positions of each part, or its error's code."""
        return [part.read.tokens if part.read else part.error and part.error.code for part in self.importer.step()]


@pytest.fixture
def world() -> World:
    return World()


def test_the_page_has_the_table() -> None:
    assert table_of(module.__doc__ or "", ImportEvent, ImportState) == TRANSITIONS


def test_a_handoff_is_read_at_once(world: World) -> None:
    """All positions of the whole blocks that a window reaches; the claim ends when workers say so."""
    world.importer.claim("r", handoff_of(100, is_whole=True), prompt)
    assert (world.claimed, world.importer.count("r", 16, 99)) == (["l"], 83)
    world.importer.read("r", LOCAL, 83, {"swa": 0})
    (part,) = world.importer.step()
    assert part.read is not None
    assert (part.read.tokens, part.is_last, part.partial) == ({"attn": (16, 99), "swa": (48, 99)}, True, {})
    assert (world.importer.look("r"), world.spans(), world.claimed) == (ImportState.ENDING, [], ["l"])
    assert world.importer.count("r", 0, 99) == 0
    world.importer.end("r")
    world.importer.end("r")
    assert (world.claimed, len(world.importer)) == ([], 0)


def test_a_ring_is_read_as_a_state(world: World) -> None:
    """All of its slots that are in use, after the same tokens as those of prefill, however many of them are cached."""
    groups = {"attn": CacheGroup(16), "ring": CacheGroup(None, ring_slots=56), "state": CacheGroup(None)}
    tables = {"attn": Blocks(range(1, 8)), "ring": Blocks([2, 9, 4, 1]), "state": Blocks([3])}
    found = []
    for num_tokens in (40, 100):
        importer = Importer(groups, cast(Any, world), "decode", KEY)
        handoff = Handoff(SOURCE, "l", num_tokens, f"{num_tokens}", tables, {"attn": 0})
        importer.claim("r", handoff.params(KEY), prompt)
        number = importer.count("r", 16, num_tokens)
        assert number is not None
        importer.read("r", tables, number)
        (part,) = importer.step()
        assert part.read is not None
        found.append(part.read.tokens)
    assert found == [{"attn": (16, 40), "ring": (0, 40)}, {"attn": (16, 100), "ring": (0, 56)}]
    importer.claim("r", handoff.params(KEY), prompt)
    importer.count("r", 16, 99)
    importer.read("r", tables, 83)
    (part,) = importer.step()
    assert part.error is not None
    assert part.error.code == "TOKENS"  # the ring has overwritten the first position


def test_a_room_is_read_part_by_part(world: World) -> None:
    """Full blocks first; the claim is that of the first entry."""
    world.ask()
    assert world.importer.count("r", 0, 99) is None
    assert world.take(handoff_of(40)) is False
    assert (world.claimed, world.importer.count("r", 0, 99)) == (["l"], 99)
    world.allocate()
    assert [world.spans(), world.spans()] == [[{"attn": (0, 32)}], []]
    world.take(handoff_of(47))
    assert world.spans() == []
    world.take(handoff_of(64))
    world.take(handoff_of(90))
    assert world.spans() == [{"attn": (32, 80)}]
    assert world.take(handoff_of(99, is_whole=True), is_whole=True) is True
    assert world.spans() == [{"attn": (80, 99), "swa": (48, 99)}]
    world.importer.end("r")
    assert (world.claimed, world.takes) == ([], {})


@pytest.mark.parametrize(
    "entry, code",
    [
        ({"handoff": handoff_of(40, lease="another")}, "LEASE"),
        ({"handoff": handoff_of(100)}, "TOKENS"),
        ({"handoff": handoff_of(98, is_whole=True), "is_whole": True}, "TOKENS"),
        ({"handoff": {**handoff_of(40), "remote_num_tokens": 41}}, "MESSAGE"),
        ({"error": "prefill has failed"}, "MESSAGE"),
        (7, "TYPE"),
    ],
)
def test_an_entry_that_is_not_of_this_request(world: World, entry: Any, code: str) -> None:
    """Ends it, and nothing more is taken; workers report it when what is under way has ended."""
    world.ask()
    world.take(handoff_of(40))
    world.allocate()
    assert world.spans() == [{"attn": (0, 32)}]
    assert world.takes["decode r"](entry) is True
    assert [world.spans(), world.spans()] == [[code], []]
    assert world.importer.look("r") is ImportState.ENDING


def test_a_refused_request_may_get_blocks_all_the_same(world: World) -> None:
    """An engine that counted on its tokens hears from its workers that they do not come."""
    world.importer.claim("r", {**handoff_of(100), "remote_lease": "forged"}, prompt)
    error = world.importer.error_of("r")
    assert error is not None
    assert (error.code, world.importer.look("r"), world.importer.count("r", 0, 99)) == (
        "MESSAGE",
        ImportState.REFUSED,
        99,
    )
    world.allocate()
    assert world.spans() == ["MESSAGE"]
    world.importer.end("r")
    assert (world.claimed, len(world.importer)) == ([], 0)


def test_a_request_fails_whose_next_part_does_not_come_in_time(world: World) -> None:
    """Not one that is published as a whole."""
    world.ask()
    world.take(handoff_of(40))
    world.allocate()
    assert world.spans() == [{"attn": (0, 32)}]
    world.overdue.add("decode r")
    assert world.spans() == ["PEER"]
    world.importer.end("r")
    world.ask()
    world.take(handoff_of(99, is_whole=True), is_whole=True)
    assert world.importer.look("r") is ImportState.CLAIMED


@pytest.mark.parametrize(("num_left", "num_missing", "hint"), [(0, 1, "set whole_prompt"), (0, 2, ""), (1, 1, "")])
def test_a_prompt_without_its_last_token(world: World, num_left: int, num_missing: int, hint: str) -> None:
    """What to do about it is said where the engine does not compute that token itself, and no other is missing."""
    world.importer.ask("r", "room", "prefill:5600", prompt, 100, num_left)
    world.take(handoff_of(100 - num_left - num_missing, is_whole=True), is_whole=True)
    error = world.importer.error_of("r")
    assert error is not None
    assert error.code == "TOKENS"
    assert (hint in error.hint) if hint else not error.hint


def test_a_claim_that_was_refused_ends_a_request(world: World) -> None:
    world.importer.claim("r", handoff_of(100, is_whole=True), prompt)
    world.refused["l"] = KVPlanError("LEASE", "read", expected="a lease", got="none")
    world.allocate()
    assert world.spans() == ["LEASE"]


@pytest.mark.parametrize("is_seen", [False, True])
def test_blocks_that_a_source_needs_are_computed(world: World, *, is_seen: bool) -> None:
    """Where the engine can do that, and has begun to read nothing."""
    for min_tokens, is_reading, expected in ((0, False, 0), (0, True, 99), (None, False, 99)):
        world.importer.claim("r", handoff_of(100, is_whole=True), prompt, min_tokens=min_tokens)
        assert world.spans() == []
        if is_seen or is_reading:
            assert world.importer.count("r", 0, 99) == 99
        if is_reading:
            world.importer.read("r", LOCAL, 99)
        world.wanted = {"l"}
        assert len(world.spans()) == is_reading
        assert world.claimed == ["l"] * (expected > 0)
        if not is_reading:
            assert world.importer.count("r", 0, 99) == expected
        world.importer.end("r")
        world.wanted = set()


def test_a_request_is_given_up_while_parts_are_read(world: World) -> None:
    """Its blocks stay, and its claim with them, until workers say that nothing moves."""
    world.ask()
    world.take(handoff_of(40))
    world.allocate()
    world.spans()
    world.importer.finish("r")
    world.importer.give_up("r")
    assert (world.spans(), world.claimed) == (["TRANSFER"], ["l"])
    world.importer.finish("r")
    assert (world.spans(), world.claimed) == ([], ["l"])
    world.importer.end("r")
    assert world.claimed == []


@pytest.mark.parametrize("is_published", [False, True])
def test_a_request_that_ends_before_it_is_read(world: World, *, is_published: bool) -> None:
    """It claims nothing any more, and takes nothing."""
    world.ask()
    if is_published:
        world.take(handoff_of(40))
    world.importer.finish("r")
    assert (world.claimed, world.takes, len(world.importer)) == ([], {}, 0)


def test_what_is_cheaper_to_compute_is_not_read(world: World) -> None:
    """Only where the engine may compute it."""
    for min_tokens, expected in ((20, 0), (19, 19), (None, 19)):
        world.importer.claim("r", handoff_of(100, is_whole=True), prompt, min_tokens=min_tokens)
        assert world.importer.count("r", 80, 99) == expected
        world.importer.end("r")
    world.importer.claim("r", handoff_of(100, is_whole=True, kept=80), prompt, min_tokens=0)
    assert world.importer.count("r", 0, 99) == 0
    gap = world.importer.skip("r")
    assert gap is not None
    assert (gap.code, world.claimed, world.importer.skip("r")) == ("BLOCKS", [], None)


def test_the_last_positions_may_be_stale(world: World) -> None:
    """A draft has cached something else there."""
    world.importer.claim("r", handoff_of(60, is_whole=True), prompt, num_stale=1)
    assert world.importer.count("r", 0, 99) == 59


def test_a_block_without_its_beginning_is_said(world: World) -> None:
    """And refused where something else stores each block."""
    for siblings in (set[str](), {"OffloadingConnector"}):
        world.importer.siblings = siblings
        world.importer.claim("r", handoff_of(100, is_whole=True, kept=56), prompt)
        world.allocate()
        (part,) = world.importer.step()
        if siblings:
            assert part.error is not None
            assert part.error.code == "BLOCKS"
        else:
            assert part.partial["swa"].first_whole == 64
            assert world.importer.read_from == {"r": {"swa": 56}}
        world.importer.end("r")
        assert world.importer.finish("r") == ({} if siblings else {"swa": 56})


def test_nothing_else_may_happen(world: World) -> None:
    world.importer.claim("r", handoff_of(100, is_whole=True), prompt)
    record = world.importer._requests["r"]
    with pytest.raises(KVPlanError, match=r"TRANSFER: cannot LAST a request: .* got a request that is asking"):
        record.move(ImportEvent.LAST)
