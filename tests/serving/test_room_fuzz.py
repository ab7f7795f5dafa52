"""Rooms by Hypothesis: whatever peers with the key publish, an owner's entry stays, and memory is counted.

A server of rooms is asked by several owners in any order, beside a model that keeps the plainest of tables. Entries
that are no JSON, or another one in any part, end in a KVPlanError, which fails the request that reads them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Coroutine, Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Blocks, KVPlanError
from kvplan.protocol import Handoff, Source
from kvplan.protocol.room_contents import ENTRY_BYTES, Published, _merged
from kvplan_nixl.serving import Driver
from kvplan_nixl.sglang import bootstrap
from kvplan_nixl.sglang.bootstrap import BootstrapServer
from tests.blocking import KEY

KEEP_S = 60
OWNERS = ["a" * 32, "b" * 32]
ATTEMPTS = ["1" * 32, "2" * 32]
NAMES = st.sampled_from(["", "x", "d" * 32, "\U0001f600" * 32])
STAGES = [("0", "1"), ("0", "1"), ("0", "2"), ("1", "2")]
PLACES = st.tuples(
    st.sampled_from(["1", "2"]), st.sampled_from(STAGES), st.sampled_from(ATTEMPTS), st.sampled_from(OWNERS)
)
BODIES = st.sampled_from([b"{}", b'{"token": 1}', b"x" * 3000, b"", b"\xff"])
PUBLISH: st.SearchStrategy[Any] = st.tuples(st.just("publish"), PLACES, BODIES)
ACTS = st.one_of(
    PUBLISH,
    PUBLISH.map(tuple),  # as often again
    PUBLISH.map(tuple),
    st.tuples(st.just("withdraw"), PLACES),
    st.tuples(st.just("pass"), st.sampled_from([1.0, 30.0, 59.0])),
    st.tuples(st.just("garbage"), st.lists(NAMES, min_size=5, max_size=5), BODIES),
    st.tuples(
        st.just("ask"),
        st.dictionaries(st.sampled_from(["1", "2", "3", "", "x", "9" * 30]), st.sampled_from(["", "0", None, 7])),
    ),
)


class Clock(Driver):
    """This machine, with a clock that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


Tables = dict[str, dict[str, dict[tuple[str, str], bytes]]]


class Plain:
    """What a server has to have: by room its owner, and by attempt and stage an entry."""

    def __init__(self) -> None:
        self.owners: dict[str, str] = {}
        self.times: dict[str, float] = {}
        self.rooms: Tables = {}

    def expire(self, now: float) -> None:
        for room in [room for room, time in self.times.items() if now >= time + KEEP_S]:
            del self.owners[room], self.times[room], self.rooms[room]

    def publish(self, room: str, stage: tuple[str, str], attempt: str, owner: str, entry: bytes) -> None:
        self.owners[room] = owner
        self.rooms.setdefault(room, {}).setdefault(attempt, {})[stage] = entry

    def withdraw(self, room: str, stage: tuple[str, str], attempt: str) -> None:
        attempts = self.rooms.get(room, {})
        attempts.get(attempt, {}).pop(stage, None)
        if not attempts.get(attempt):
            attempts.pop(attempt, None)
        if room in self.rooms and not attempts:
            del self.owners[room], self.times[room], self.rooms[room]

    def texts(self, room: str) -> list[str]:
        """The entries of the newest attempt of which all stages are there."""
        for entries in reversed(self.rooms.get(room, {}).values()):
            stages = sorted(entries)
            if {number for _, number in stages} == {f"{len(stages)}"}:
                return [entries[stage].decode() for stage in stages]
        return []


def at_once(answer: Coroutine[Any, Any, bytes]) -> bytes:
    """An answer that waits for nothing."""
    with pytest.raises(StopIteration) as end:
        answer.send(None)
    value: bytes = end.value.value
    return value


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def server(clock: Clock) -> Iterator[BootstrapServer]:
    with closing(BootstrapServer("127.0.0.1", 0, system=clock, keep_s=KEEP_S)) as server:
        yield server


@given(acts=st.lists(ACTS, min_size=8, max_size=30))
def test_any_order_of_questions(acts: list[Any], clock: Clock, server: BootstrapServer) -> None:
    """The server has what the model has, nobody changes another one's room, and bytes are those of its entries."""
    server._rooms.clear()
    server._num_bytes = 0
    plain = Plain()
    for kind, *what in acts:
        if kind == "pass":
            clock.now += what[0]
            plain.expire(clock.now)
        elif kind == "garbage":
            parts, body = what
            for method in (server._publish, server._withdraw):
                with pytest.raises((KVPlanError, ValueError)):
                    method(body, *parts)
        elif kind == "ask":
            (seen,) = what
            question = json.dumps(seen).encode()
            if any(not isinstance(version, str) for version in seen.values()):
                with pytest.raises(KVPlanError, match="TYPE: cannot read version of a room"):
                    server._polls.answer(question).send(None)
                continue
            if any(not room.isdecimal() for room in seen):
                with pytest.raises(ValueError, match="invalid literal"):
                    server._polls.answer(question).send(None)
                continue
            answer = json.loads(at_once(server._polls.answer(question)))["rooms"]
            assert {room: texts for room, (_, texts) in answer.items()} == {
                room: plain.texts(room) for room in seen if plain.texts(room)
            }
        else:
            room, stage, attempt, owner = what[0]
            is_owner = plain.owners.get(room, owner) == owner
            try:
                if kind == "publish":
                    (body,) = what[1:]
                    server._publish(body, room, *stage, attempt, owner)
                    assert is_owner
                    assert body.isascii()
                    plain.publish(room, stage, attempt, owner, body)
                    plain.times[room] = clock.now
                else:
                    server._withdraw(b"", room, *stage, attempt, owner)
                    assert is_owner
                    plain.withdraw(room, stage, attempt)
            except (KVPlanError, UnicodeDecodeError):
                assert not is_owner or (kind == "publish" and not what[1].isascii())
        for room in ("1", "2"):
            content = server._content_of(room)
            assert (content.texts if content else []) == plain.texts(room)
        assert {f"{number}": room.owner for number, room in server._rooms.items()} == plain.owners
        num_texts = sum(
            len(body) for attempts in plain.rooms.values() for entries in attempts.values() for body in entries.values()
        )
        num_entries = sum(len(entries) for attempts in plain.rooms.values() for entries in attempts.values())
        num_attempts = sum(map(len, plain.rooms.values()))
        assert server._num_bytes == (
            num_texts
            + num_entries * ENTRY_BYTES
            + num_attempts * bootstrap.ATTEMPT_BYTES
            + len(plain.rooms) * bootstrap.ROOM_BYTES
        )


HANDOFF = Handoff(Source("p", "a", "127.0.0.1", 1), "lease 1", 7, "a1", {"attn": Blocks([1, 2])}).params(KEY)
ENTRY = {"handoff": HANDOFF, "metadata": {"a": [1]}, "token": 5, "leases": ["lease 1", "lease 2"], "attempt": "x"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.sampled_from([*ENTRY, *HANDOFF]), min_size=1, max_size=3), st.lists(JSON, min_size=3, max_size=3))
def test_any_entry_is_read_or_refused(keys: list[str], values: list[Any]) -> None:
    """With other values in some parts. Leases that are read are names, which can be claimed."""
    entry: dict[str, Any] = copy.deepcopy(ENTRY)
    for key, value in zip(keys, values, strict=False):
        (entry if key in ENTRY else entry["handoff"] if isinstance(entry["handoff"], dict) else {})[key] = value
    for texts in ([json.dumps(entry)], [json.dumps(entry), json.dumps(ENTRY)], [json.dumps(value) for value in values]):
        try:
            published = Published.of_entry("7", _merged("7", texts, KEY), KEY)
        except KVPlanError:
            continue
        assert all(isinstance(lease, str) and lease for lease in published.leases)
        assert len(texts) > 1 or published.handoff.params(KEY) == HANDOFF


@given(st.lists(st.binary(max_size=50) | st.text('[]{}":,0', max_size=50).map(str.encode), min_size=1, max_size=3))
def test_any_text_is_an_entry_or_an_error(texts: list[bytes]) -> None:
    """A room that has anything says that it is none."""
    merged = _merged("7", [text.decode("ascii", "replace") for text in texts], KEY)
    with pytest.raises(KVPlanError):
        Published.of_entry("7", merged, KEY)
