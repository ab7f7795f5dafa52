"""What tests wait for: answers to the protocol's questions, conditions, ports, and threads that end."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from kvplan import KVPlanError
from kvplan.protocol import SharedKey, Source, claims, digest_requests, listener, room_contents
from kvplan.protocol.claims import ClaimAnswer, ClaimMessage
from kvplan.protocol.digest_requests import DigestRequest
from kvplan.protocol.listener import Offers
from kvplan.protocol.room_contents import RoomContent
from kvplan.protocol.system import Pending
from kvplan_nixl.serving import Access, Driver

T = TypeVar("T")

KEY = SharedKey.of(b"a key that tests share")


def fetch(source: Source, timeout_s: float = 10.0, access: Access | None = None) -> Offers:
    driver = Driver(access)
    return driver.run(listener.fetch(source, timeout_s, system=driver))


def send_claims(source: Source, message: ClaimMessage, access: Access | None = None) -> ClaimAnswer:
    driver = Driver(access)
    return driver.run(claims.send_claims(source, message, system=driver))


def fetch_digests(
    source: Source, request: DigestRequest, timeout_s: float, access: Access | None = None
) -> list[Mapping[str, Any]]:
    driver = Driver(access)
    return driver.run(digest_requests.fetch_digests(source, request, timeout_s, system=driver))


def exchange(
    peer: str, address: str, path: str, timeout_s: float, access: Access | None = None, sent: bytes | None = None
) -> bytes:
    driver = Driver(access)
    return driver.run(driver.exchange(peer, address, path, timeout_s, sent))


def poll_rooms(address: str, versions: Mapping[str, str], access: Access | None = None) -> dict[str, RoomContent]:
    driver = Driver(access)
    answer = driver.run(room_contents.poll_rooms(address, versions, key=driver.access.key, system=driver))
    return {**answer.contents}


def ask(address: str, rooms: Iterable[int], access: Access | None = None) -> dict[int, Mapping[str, Any]]:
    """What :func:`kvplan_nixl.sglang.bootstrap.ask` returns."""
    from kvplan_nixl.sglang import bootstrap

    driver = Driver(access)
    return driver.run(bootstrap.ask(address, rooms, key=driver.access.key, system=driver))


def publish(address: str, room: int, entry: Mapping[str, Any], *stage: int, **options: Any) -> str:
    """What :func:`kvplan_nixl.sglang.bootstrap.publish` does, with an ``access`` among the options."""
    from kvplan_nixl.sglang import bootstrap

    driver = Driver(options.pop("access", None))
    return driver.run(bootstrap.publish(address, room, entry, *stage, **options, system=driver))


def withdraw(address: str, room: int, owner: str, *stage: int, **options: Any) -> None:
    """What :func:`kvplan_nixl.sglang.bootstrap.withdraw` does, with an ``access`` among the options."""
    from kvplan_nixl.sglang import bootstrap

    driver = Driver(options.pop("access", None))
    driver.run(bootstrap.withdraw(address, room, owner, *stage, **options, system=driver))


def wait_until(found: Callable[[], T], timeout_s: float = 30.0) -> T:
    """Call a function until it returns something true, which is returned.

    It sleeps between the calls: a loop that does not holds up the threads that it waits for.
    """
    deadline = time.monotonic() + timeout_s
    while not (answer := found()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.001)
    return answer


def waited(pending: Pending[T], timeout_s: float = 10.0) -> T:
    """The result of something under way."""
    wait_until(lambda: pending.done, timeout_s)
    return pending.result()


def error_of(pending: Pending[Any], timeout_s: float = 10.0) -> KVPlanError | None:
    """The error of something under way, None without one."""
    try:
        waited(pending, timeout_s)
    except KVPlanError as error:
        return error
    return None


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this host at which nothing listens, and which the system gives to no other program meanwhile.

    A server of the test may listen at it, and listen there again, as servers may use an address anew.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def stop_listening(server: socket.socket) -> None:
    """Close a socket, and end the call of another thread that waits for a connection to it."""
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Assert that no thread that was started meanwhile runs on. Threads of earlier tests may end."""
    before = {*threading.enumerate()}
    yield
    assert {*threading.enumerate()} <= before


def unblocked(function: Callable[..., T]) -> Callable[..., Awaitable[T]]:
    """A coroutine function that calls one which may wait, on a thread of its own."""

    async def run(*arguments: Any) -> T:
        return await asyncio.to_thread(function, *arguments)

    return run


class Answered(Driver):
    """This machine, where a function answers what engines are told of claims, by their address. It may wait."""

    def __init__(self, answer: Callable[[str, ClaimMessage], ClaimAnswer]) -> None:
        super().__init__()
        self.answer = answer

    async def exchange(self, peer: str, address: str, path: str, timeout_s: float, sent: bytes | None = None) -> bytes:
        message = ClaimMessage.of_fields(json.loads(sent or b""))
        answer = await asyncio.to_thread(self.answer, address, message)
        return json.dumps(answer.fields()).encode()


class Clock(Driver):
    """This machine with a clock that stands still until it is moved."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now
