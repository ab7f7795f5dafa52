"""Questions about rooms: what has been seen is not asked for again."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from kvplan import Blocks, KVPlanError
from kvplan.protocol import Handoff, Leases, Listener, Source, room_contents
from kvplan.protocol import rooms as module
from kvplan.protocol.room_contents import (
    Published,
    RoomContent,
    RoomNews,
    RoomStore,
    _merged,
    is_partial,
    poll_rooms,
)
from kvplan.protocol.rooms import Rooms
from kvplan_nixl.serving import Driver
from tests.blocking import KEY, Clock, wait_until

SERVER = "127.0.0.1:5600"


class Server(Driver):
    """A server of rooms, and the versions that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_versions = 0
        self.store = RoomStore(self)
        self.epoch = "a"
        self.asked: list[Mapping[str, str]] = []
        self.starts: list[str] = []

    def put(self, room: str, entry: Mapping[str, Any]) -> None:
        self.num_versions += 1
        self.store.put(room, entry)

    def token_hex(self, num_bytes: int) -> str:
        return f"version {self.num_versions}"

    async def ask(self, address: str, versions: Mapping[str, str], *, start: str, **_: object) -> RoomNews:
        assert address == SERVER
        self.starts.append(start)
        self.asked.append(dict(versions))
        answer = json.loads(await self.store.polls.answer(json.dumps(versions).encode()))
        contents = {
            room: RoomContent(version, json.loads(texts[0])) for room, (version, texts) in answer["rooms"].items()
        }
        return RoomNews(self.epoch, contents)

    def wait(self, num_questions: int) -> None:
        """Wait until it was asked some times more."""
        enough = len(self.asked) + num_questions
        wait_until(lambda: len(self.asked) >= enough)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(module, "poll_rooms", server.ask)
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
    rooms.subscribe("r", "a", SERVER, into(taken))
    server.wait(5)
    assert taken == [{"part": 1}]
    assert server.asked[0] == {"a": ""}
    assert server.asked[-1] == {"a": "version 1"}
    server.put("a", {"part": 2})
    server.wait(5)
    assert taken == [{"part": 1}, {"part": 2}]
    rooms.unsubscribe("r")


def test_a_reader_that_comes_later_gets_what_others_have_seen(server: Server) -> None:
    """Once, as they did."""
    server.put("a", {"part": 1})
    rooms = Rooms(logging.getLogger("test"), KEY, Driver(), ask_s=0.001)
    taken: dict[str, list[Any]] = {"first": [], "second": []}
    rooms.subscribe("first", "a", SERVER, into(taken["first"]))
    server.wait(5)
    rooms.subscribe("second", "a", SERVER, into(taken["second"]))
    server.wait(5)
    assert taken == {"first": [{"part": 1}], "second": [{"part": 1}]}
    assert server.asked[-1] == {"a": "version 1"}
    rooms.unsubscribe("first")
    rooms.unsubscribe("second")


def test_prefill_has_time_for_each_entry(server: Server) -> None:
    """Each new entry gives it as much time again; of a reader that is forgotten nothing is expected."""
    clock, taken = Clock(), list[Any]()
    rooms = Rooms(logging.getLogger("test"), KEY, clock, timeout_s=60.0, ask_s=0.001)
    rooms.subscribe("r", "a", SERVER, into(taken))
    server.wait(3)
    clock.now = 50.0
    server.put("a", {"part": 1})
    server.wait(3)
    assert taken == [{"part": 1}]
    found = []
    for clock.now in (110.0, 110.5):
        error = rooms.silence("r")
        found.append(error and str(error))
    assert found == [None, "PEER: cannot read request a: expected prefill to compute it within 60 s, got nothing"]
    rooms.unsubscribe("r")
    assert rooms.silence("r") is None


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
    assert is_partial(merged)
    assert {*Handoff.of_params(merged["handoff"], KEY).blocks} == {"group0", "group1"}


def test_what_is_no_entry_is_an_error() -> None:
    """Of a server that has something else: the request fails and says why."""
    assert "an entry that is no object" in _merged("a", ["7"], KEY)["error"]
    with pytest.raises(KVPlanError, match=r"^MESSAGE: .* prefill has failed"):
        Published.of_entry("a", {"error": "prefill has failed"}, KEY)


def test_a_server_that_has_restarted_has_lost_the_room(server: Server) -> None:
    """Its prefill has restarted too: the request fails at once, and one that comes later asks the new start."""
    rooms, before, after = Rooms(logging.getLogger("test"), KEY, Driver(), ask_s=0.001), list[Any](), list[Any]()
    rooms.subscribe("r", "a", SERVER, into(before))
    server.wait(3)
    server.epoch = "b"
    wait_until(lambda: before)
    assert [entry.keys() for entry in before] == [{"error"}]
    rooms.subscribe("s", "a", SERVER, into(after))
    server.put("a", {"part": 1})
    server.wait(3)
    assert after == [{"part": 1}]
    assert len(before) == 1
    rooms.unsubscribe("s")


def test_a_server_that_has_restarted_answers_at_once(listener: Listener) -> None:
    """A reader hears of the restart with its next question, though its room has nothing new."""
    driver, address = Driver(), listener.source.address
    asking = partial(poll_rooms, address, {"a": ""}, wait_s=10.0, key=driver.access.key, system=driver)
    began_at = time.monotonic()
    answer = driver.run(asking(start="b1"))
    assert answer.contents == {}
    assert answer.start not in ("", "b1")
    assert time.monotonic() - began_at < 5


@pytest.mark.parametrize("start", ["a1/../7", "a1\r\nHost: b", "", "\u00e9", 7, None])
def test_a_start_that_no_path_can_have_is_malformed(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    """The next question names it."""

    async def exchange(*_: object) -> bytes:
        return json.dumps({"start": start, "rooms": {}}).encode()

    driver = Driver()
    monkeypatch.setattr(driver, "exchange", exchange)
    with pytest.raises(KVPlanError, match=r"^MESSAGE: .* start"):
        driver.run(poll_rooms(SERVER, {"a": ""}, key=driver.access.key, system=driver))


def test_a_reader_names_the_start_that_has_answered(server: Server) -> None:
    """Also where others that have come since have had no answer."""
    rooms, taken = Rooms(logging.getLogger("test"), KEY, Driver(), ask_s=0.001), list[Any]()
    rooms.subscribe("r", "a", SERVER, into(taken))
    server.wait(3)
    assert server.starts[0] == ""
    assert {*server.starts[1:]} == {"a"}
    rooms.subscribe("s", "b", SERVER, into(taken))
    server.wait(3)
    assert {*server.starts[1:]} == {"a"}
    rooms.unsubscribe("r")
    rooms.unsubscribe("s")


@pytest.fixture
def listener() -> Iterator[Listener]:
    driver = Driver()
    with closing(Listener("prefill", "127.0.0.1", [], Leases(driver), system=driver)) as listener:
        yield listener


def test_a_question_waits_for_news(listener: Listener) -> None:
    """It was asked every 10 ms, by each of hundreds of ranks; now an answer comes when there is one, or in the end."""
    driver, address = Driver(), listener.source.address
    asking = partial(poll_rooms, address, {"a": ""}, key=driver.access.key, system=driver)
    assert driver.run(asking(wait_s=0.05)).contents == {}
    answers: list[RoomNews] = []
    thread = threading.Thread(target=lambda: answers.append(driver.run(asking(wait_s=10.0))))
    thread.start()
    wait_until(lambda: listener.rooms.polls._polls._waiting)
    listener.rooms.put("b", {})
    time.sleep(0.05)
    assert answers == []
    listener.rooms.put("a", {"handoff": {}, "is_whole": True})
    thread.join(30)
    assert [answer.contents["a"].entry for answer in answers] == [{"handoff": {}, "is_whole": True}]
    assert not listener.rooms.polls._polls._waiting


def test_a_reader_asks_once_until_there_is_news(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again, for all rooms together, as soon as another one is wanted."""
    asked: list[Mapping[str, str]] = []

    async def ask(address: str, versions: Mapping[str, str], **options: Any) -> RoomNews:
        asked.append(dict(versions))
        return await poll_rooms(address, versions, **options)

    monkeypatch.setattr(module, "poll_rooms", ask)
    rooms, taken = Rooms(logging.getLogger("test"), KEY, Driver()), list[Any]()
    rooms.subscribe("r", "a", listener.source.address, into(taken))
    wait_until(lambda: listener.rooms.polls._polls._waiting)
    rooms.subscribe("s", "b", listener.source.address, into(taken))
    wait_until(lambda: {*listener.rooms.polls._polls._waiting} == {"a", "b"})
    # what was asked first goes, since its connection has ended
    wait_until(lambda: {len(signals) for signals in listener.rooms.polls._polls._waiting.values()} == {1})
    time.sleep(0.1)
    # the first one may not have been sent before the second room was wanted
    assert [{*versions} for versions in asked][-1] == {"a", "b"}
    assert len(asked) <= 2
    rooms.unsubscribe("r")
    rooms.unsubscribe("s")
    wait_until(lambda: not listener.rooms.polls._polls._waiting)


def test_few_questions_are_held(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is answered at once."""
    monkeypatch.setattr(room_contents, "MAX_WAITING", 1)
    driver, address = Driver(), listener.source.address
    asking = partial(poll_rooms, address, {"a": ""}, key=driver.access.key, system=driver)
    thread = threading.Thread(target=lambda: driver.run(asking(wait_s=10.0)))
    thread.start()
    wait_until(lambda: listener.rooms.polls._polls._waiting)
    assert driver.run(asking(wait_s=10.0)).contents == {}
    assert thread.is_alive()
    listener.rooms.put("a", {"handoff": {}})
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("question", "code"),
    [
        ({f"{number}": "" for number in range(1025)}, "RANGE"),
        ({"r" * 129: ""}, "RANGE"),
        ({"r": "v" * 33}, "RANGE"),
        ({"r": [[]]}, "TYPE"),
        (["r"], "TYPE"),
    ],
)
def test_a_question_has_few_rooms_and_short_names(question: Any, code: str) -> None:
    """A server keeps them while it waits: 1 MiB of versions that were lists took 22 MB, in each of 512 questions."""
    driver = Driver()
    answers = RoomStore(driver).polls
    with pytest.raises(KVPlanError) as refused:
        driver.run(answers.answer(json.dumps(question).encode()))
    assert refused.value.code == code
    full = {f"{number:0128}": "v" * 32 for number in range(1024)}
    assert driver.run(answers.answer(json.dumps(full).encode())).endswith(b'"rooms": {}}')
