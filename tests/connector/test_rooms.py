"""Questions about rooms: what has been seen is not asked for again."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvplan import Blocks, KVPlanError
from kvplan.protocol import Handoff, Source
from kvplan.protocol import rooms as module
from kvplan.protocol.room_contents import Published, RoomContent, RoomStore, _merged, answer_rooms, is_part
from kvplan.protocol.rooms import Rooms
from kvplan_nixl.serving import Driver
from tests.blocking import KEY

SERVER = "127.0.0.1:5600"


class Server(Driver):
    """A server of rooms, and the versions that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.store = RoomStore(self)
        self.num_versions = 0
        self.asked: list[Mapping[str, str]] = []

    def put(self, room: str, entry: Mapping[str, Any]) -> None:
        self.num_versions += 1
        self.store.put(room, entry)

    def token_hex(self, num_bytes: int) -> str:
        return f"version {self.num_versions}"

    async def ask(self, address: str, versions: Mapping[str, str], **_: object) -> dict[str, RoomContent]:
        assert address == SERVER
        self.asked.append(dict(versions))
        answer = json.loads(self.store.answer(json.dumps(versions).encode()))
        return {room: RoomContent(version, json.loads(texts[0])) for room, (version, texts) in answer.items()}

    def wait(self, num_questions: int) -> None:
        """Wait until it was asked some times more."""
        enough = len(self.asked) + num_questions
        deadline = time.monotonic() + 30
        while len(self.asked) < enough:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(module, "ask_again", server.ask)
    return server


def into(entries: list[Any]) -> Callable[[Any], bool]:
    """What takes entries of a part."""

    def take(entry: Any) -> bool:
        entries.append(entry)
        return False

    return take


def test_an_entry_is_taken_once(server: Server) -> None:
    """Until there is another one. The server is asked for what is newer."""
    server.put("a", {"part": 1})
    rooms, taken = Rooms(logging.getLogger("test"), KEY, Driver(), ask_s=0.001), list[Any]()
    rooms.want("r", "a", SERVER, into(taken))
    server.wait(5)
    assert taken == [{"part": 1}]
    assert server.asked[0] == {"a": ""}
    assert server.asked[-1] == {"a": "version 1"}
    server.put("a", {"part": 2})
    server.wait(5)
    assert taken == [{"part": 1}, {"part": 2}]
    rooms.forget("r")


def test_a_reader_that_comes_later_gets_what_others_have_seen(server: Server) -> None:
    """Once, as they did."""
    server.put("a", {"part": 1})
    rooms = Rooms(logging.getLogger("test"), KEY, Driver(), ask_s=0.001)
    taken: dict[str, list[Any]] = {"first": [], "second": []}
    rooms.want("first", "a", SERVER, into(taken["first"]))
    server.wait(5)
    rooms.want("second", "a", SERVER, into(taken["second"]))
    server.wait(5)
    assert taken == {"first": [{"part": 1}], "second": [{"part": 1}]}
    assert server.asked[-1] == {"a": "version 1"}
    rooms.forget("first")
    rooms.forget("second")


@pytest.mark.parametrize("order", [1, -1])
def test_what_one_stage_has_in_part_is_a_part(order: int) -> None:
    """Though it has computed as many positions as one that publishes the whole: what comes with that is not there."""
    source = Source("prefill", "a1", "10.0.0.1", 5600)
    entries: list[dict[str, Any]] = [
        {"handoff": Handoff(source, f"lease {stage}", 40, "8f2c", {f"group{stage}": Blocks([1])}).params(KEY)}
        for stage in range(2)
    ]
    entries[0]["is_whole"] = True
    merged = _merged("a", [json.dumps(entry) for entry in entries[::order]], KEY)
    assert is_part(merged)
    assert {*Handoff.of_params(merged["handoff"], KEY).blocks} == {"group0", "group1"}


def test_what_is_no_entry_is_an_error() -> None:
    """Of a server that has something else: the request fails and says why."""
    assert "an entry that is no object" in _merged("a", ["7"], KEY)["error"]
    with pytest.raises(KVPlanError, match=r"^MESSAGE: .* prefill has failed"):
        Published.of_entry("a", {"error": "prefill has failed"}, KEY)


def test_what_is_no_function_answers_nothing() -> None:
    """Before the question is read."""
    wrong: Any = {"a": None}
    with pytest.raises(KVPlanError, match=r"^TYPE: .* content_of"):
        answer_rooms(b"{}", wrong)
