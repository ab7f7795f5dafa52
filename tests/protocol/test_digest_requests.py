"""Digests are asked for while a lease is valid, computed once, and given to whoever asks again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvplan import KVPlanError
from kvplan.protocol import Leases, Listener, Source, digest_requests
from kvplan.protocol.digest_requests import DigestRequest, DigestRequests
from kvplan_nixl.serving import Driver
from tests.blocking import fetch_digests, wait_until

TOKENS = {"swa": (32, 40), "attn": (0, 40)}


@pytest.fixture
def leases() -> Leases:
    return Leases(Driver())


@pytest.fixture
def listener(leases: Leases) -> Iterator[Listener]:
    made = Listener("prefill", "127.0.0.1", [b"offer"], leases, system=Driver())
    yield made
    made.close()


class Noted(Driver):
    """The machine of one reader, what it asks for and how long it sleeps. The first questions get no answer."""

    def __init__(self, num_silent: int = 0) -> None:
        super().__init__()
        self.num_silent = num_silent
        self.asked: list[str] = []
        self.slept_s: list[float] = []

    async def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        await super().sleep(duration_s)

    async def exchange(self, peer: str, address: str, path: str, timeout_s: float, sent: bytes | None = None) -> bytes:
        self.asked.append(path)
        if len(self.asked) <= self.num_silent:
            raise KVPlanError("PEER", "reach prefill", expected="an answer", got="TimeoutError('timed out')")
        return await super().exchange(peer, address, path, timeout_s, sent)

    def fetch(self, source: Source, request: DigestRequest) -> Any:
        return self.run(digest_requests.fetch_digests(source, request, 30, system=self))


def test_digests_are_fetched_when_they_are_there(listener: Listener, leases: Leases) -> None:
    """A reader waits while the engine's workers compute, and all its ranks get one answer."""
    request = DigestRequest.of(leases.grant("r"), TOKENS)
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(fetch_digests(listener.source, request, 10))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert wait_until(listener.digests.take) == [request]
    time.sleep(0.02)
    assert answers == []
    listener.digests.put(request, [{"of worker": 0}, {"of worker": 1}])
    for thread in threads:
        thread.join(10)
    assert answers == [[{"of worker": 0}, {"of worker": 1}]] * 2
    assert listener.digests.take() == []


def test_a_reader_asks_once_for_digests_that_take_a_while(
    listener: Listener, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine holds the request: a reader that asked every few milliseconds would load both event loops."""
    # however long a busy machine takes, the reader has no reason to ask again
    monkeypatch.setattr("kvplan.protocol.digest_requests.WAIT_S", 3600.0)
    monkeypatch.setattr("kvplan.protocol.digest_requests.ANSWER_S", 3600.0)
    request = DigestRequest.of(leases.grant("r"), TOKENS)
    reader = Noted()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(reader.fetch(listener.source, request)))
    thread.start()
    wait_until(listener.digests.take)
    time.sleep(0.1)
    listener.digests.put(request, [{"of worker": 0}])
    thread.join(30)
    assert (answers, reader.asked) == ([[{"of worker": 0}]], ["/digests"])


def test_digests_of_no_engine_are_not_asked_for(leases: Leases) -> None:
    wrong: Any = "prefill"
    with pytest.raises(KVPlanError, match=r"^TYPE: cannot read source"):
        fetch_digests(wrong, DigestRequest.of(leases.grant("r"), TOKENS), 1)


def test_a_busy_engine_is_asked_again(listener: Listener, leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that does not come in time is no difference."""
    monkeypatch.setattr("kvplan.protocol.digest_requests.RETRY_S", 0.002)
    request = DigestRequest.of(leases.grant("r"), TOKENS)
    reader = Noted(num_silent=2)
    listener.digests.ask(request)
    listener.digests.put(request, [{"of worker": 0}])
    assert reader.fetch(listener.source, request) == [{"of worker": 0}]
    assert (len(reader.asked), reader.slept_s) == (3, [0.002, 0.002])


def test_nobody_computes_them(listener: Listener, leases: Leases) -> None:
    """A reader does not wait for ever."""
    request = DigestRequest.of(leases.grant("r"), TOKENS)
    with pytest.raises(
        KVPlanError, match=r"PEER: cannot check 'r [0-9a-f]{16}' from prefill at .*: expected digests within 0.05 s"
    ):
        fetch_digests(listener.source, request, 0.05)


def test_a_lease_that_is_over_has_no_digests(listener: Listener, leases: Leases) -> None:
    """What its blocks hold now is no answer, and what was computed before is forgotten."""
    lease = leases.grant("r")
    request = DigestRequest.of(lease, TOKENS)
    assert listener.digests.ask(request) is None
    listener.digests.put(request, [{"of worker": 0}])
    assert leases.release(lease, "reader")
    with pytest.raises(KVPlanError, match="LEASE: cannot digest 'r "):
        listener.digests.ask(request)
    reader = Noted()
    with pytest.raises(KVPlanError, match=r"LEASE: cannot check 'r .* from prefill .* got one that has ended"):
        reader.fetch(listener.source, request)
    assert reader.asked == ["/digests"]
    listener.digests.drop(lease)
    assert listener.digests._answers == {}
    listener.digests.put(request, [{"late": 0}])
    assert listener.digests._answers == {}


def test_a_reader_of_an_earlier_start_is_refused(listener: Listener, leases: Leases) -> None:
    """An engine that has restarted may have another lease of that name."""
    request = DigestRequest.of(leases.grant("r"), TOKENS)
    source = type(listener.source)("prefill", "earlier", "127.0.0.1", listener.source.port)
    with pytest.raises(KVPlanError, match=r"LEASE: .* got one that has ended"):
        fetch_digests(source, request, 30)
    assert listener.digests.take() == []


def test_not_too_many_are_kept(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers can't fill an engine's memory with what they ask for."""
    monkeypatch.setattr("kvplan.protocol.digest_requests.MAX_REQUESTS", 2)
    requests = DigestRequests(leases, Driver())
    lease = leases.grant("r")
    for stop in range(2):
        assert requests.ask(DigestRequest.of(lease, {"attn": (0, stop)})) is None
    with pytest.raises(KVPlanError, match="RANGE: cannot compute digests: expected at most 2 requests"):
        requests.ask(DigestRequest.of(lease, {"attn": (0, 2)}))


@pytest.mark.parametrize(
    ("answer", "code"), [('{"digests": [1]}', "TYPE"), ('{"digests": 1}', "TYPE"), ("{}", "MESSAGE"), ("[", "MESSAGE")]
)
def test_an_answer_without_digests_is_refused(
    listener: Listener, leases: Leases, monkeypatch: pytest.MonkeyPatch, answer: str, code: str
) -> None:
    """The error says what is wrong with it, and the reader does not ask again."""
    asked: list[str] = []

    async def exchange(_: Driver, peer: str, address: str, *rest: Any) -> bytes:
        asked.append(address)
        return answer.encode()

    monkeypatch.setattr(Driver, "exchange", exchange)
    with pytest.raises(KVPlanError) as refused:
        fetch_digests(listener.source, DigestRequest.of(leases.grant("r"), TOKENS), 10)
    # other tests' engines may be asked meanwhile
    assert (refused.value.code, asked.count(listener.source.address)) == (code, 1)


def test_a_held_request_is_looked_at_when_its_digests_come(
    listener: Listener, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many may be held, in the process of an engine's scheduler. The end of a lease ends the wait, too."""
    monkeypatch.setattr("kvplan.protocol.digest_requests.WAIT_S", 3600.0)
    digests, driver, looked = listener.digests, Driver(), list[DigestRequest]()
    ask = digests.ask

    def noted(request: DigestRequest) -> Any:
        looked.append(request)
        return ask(request)

    monkeypatch.setattr(digests, "ask", noted)
    requests = [DigestRequest.of(leases.grant(name), TOKENS) for name in "ab"]
    held = [driver.submit(digests.answer(request)) for request in requests]
    taken = list[DigestRequest]()

    def are_both_taken() -> bool:
        taken.extend(digests.take())
        return len(taken) == 2

    wait_until(are_both_taken)
    time.sleep(0.05)
    digests.put(requests[0], [{"of worker": 0}])
    assert held[0].result(10) == [{"of worker": 0}]
    leases.release(requests[1].lease, "reader")
    digests.drop(requests[1].lease)
    with pytest.raises(KVPlanError, match="LEASE"):
        held[1].result(10)
    assert (len(looked), digests._polls._waiting) == (4, {})


def test_few_requests_are_held(listener: Listener, leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a connection, and those of claims must find one. A reader whose request is not held asks again."""
    monkeypatch.setattr("kvplan.protocol.digest_requests.MAX_WAITING", 1)
    monkeypatch.setattr("kvplan.protocol.digest_requests.WAIT_S", 3600.0)
    requests = [DigestRequest.of(leases.grant(name), TOKENS) for name in "ab"]
    driver = Driver()
    held = driver.submit(listener.digests.answer(requests[0]))
    wait_until(lambda: listener.digests._polls._num_waiting)
    assert driver.submit(listener.digests.answer(requests[1])).result(10) is None
    assert not held.done()
    listener.digests.put(requests[0], [{"of worker": 0}])
    assert held.result(10) == [{"of worker": 0}]
    # one that is refused holds nothing
    with pytest.raises(KVPlanError, match="LEASE"):
        driver.run(listener.digests.answer(DigestRequest.of("another lease", TOKENS)))
    assert listener.digests._polls._num_waiting == 0


@pytest.mark.parametrize("tokens", [None, [1], {"attn": 3}, {"attn": [0]}, {"attn": [0, -1]}, {"": [0, 1]}])
def test_strange_ranges_are_refused(leases: Leases, tokens: Any) -> None:
    """Ranges come from strangers."""
    with pytest.raises(KVPlanError):
        DigestRequest.of(leases.grant("r"), tokens)


def test_a_lease_that_ends_while_it_is_asked_for_leaves_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine drops it from its own thread, and each one that stayed would take the place of another for ever."""
    monkeypatch.setattr("kvplan.protocol.digest_requests.MAX_REQUESTS", 1)
    engine: list[threading.Thread] = []

    class Ending(Leases):
        """Leases that end just after they were valid."""

        def is_valid(self, lease: str) -> bool:
            is_valid = super().is_valid(lease)
            self.revoke(lease)
            engine.append(threading.Thread(target=requests.drop, args=(lease,)))
            engine[-1].start()
            engine[-1].join(0.1)
            return is_valid

    leases = Ending(Driver())
    requests = DigestRequests(leases, Driver())
    for name in ("r", "s"):
        assert requests.ask(DigestRequest.of(leases.grant(name), TOKENS)) is None
        engine[-1].join(10)


def test_a_malformed_request_to_another_start_is_malformed() -> None:
    with pytest.raises(KVPlanError, match="TYPE"):
        DigestRequest.of_fields("this", {"start": "another", "lease": None, "tokens": {}})
