"""Hosts, each a :class:`~kvplan.protocol.System` of one start of an engine, and their network."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, TypeVar

import attrs

from kvplan.errors import KVPlanError
from kvplan.protocol.system import Route, Signal, System
from kvplan.testing.simulation.features import NO_FEATURES, Feature
from kvplan.testing.simulation.malformed import breach_of
from kvplan.testing.simulation.tasks import FOREVER, BlockedError, BrokenRuleError, Task, TaskLoop

T = TypeVar("T")

BLOCKED_S: Final = 0.005
"""Seconds after which a worker thread looks again for what it waits for."""

MALFORMED: Final = (
    *("null", "true", "-1", str(1 << 70), "0.5", '""', json.dumps("x" * 300), json.dumps("\ud800")),
    *("[]", "{}", "[[]]", "[[1, 2]]", '[["x"]]', '{"x": 1}'),
)
"""Values in JSON that take the place of others in a malformed message."""


def garbled(message: bytes, draw: random.Random) -> bytes:
    """Return a malformed copy of a message in JSON: cut, of other bytes, or with another value."""
    kind = draw.randrange(4)
    if kind == 0:
        return message[: draw.randrange(len(message))]
    if kind == 1:
        return draw.choice((b"", b"null", b"[" * 5000, b"{}", b"[]", b"\xff" + message))
    value = json.loads(message)
    if not isinstance(value, dict) or not value:
        return b"{}"
    # down to some part of it
    place, key = value, draw.choice(sorted(value))
    while isinstance(place[key], dict) and place[key] and draw.random() < 0.7:
        place = place[key]
        key = draw.choice(sorted(place))
    item = place[key]
    if isinstance(item, list) and item and draw.random() < 0.7:
        # one too few, or another value in place of one
        others = draw.choice(([], [json.loads(draw.choice(MALFORMED))]))
        place[key] = [*item[:-1], *others]
    else:
        place[key] = json.loads(draw.choice(MALFORMED))
    return json.dumps(value).encode()


@attrs.frozen
class Disturbance:
    """What the links from one host to another suffer between two times.

    A message is lost with the probability ``loss``, comes twice with ``duplication``, is answered
    by a reset with ``reset``, and is late by up to ``delay_s``. An answer in JSON is malformed with
    ``garbling``. Names of hosts may be ``*``.
    """

    begins_at: float
    ends_at: float
    source: str
    target: str
    loss: float = 0.0
    duplication: float = 0.0
    reset: float = 0.0
    delay_s: float = 0.0
    garbling: float = 0.0

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the names of the engines, or ``*``."""
        return (self.source, self.target)

    def concerns(self, source: str, target: str, now: float) -> bool:
        """Return whether a message that is sent now suffers from this."""
        return (
            self.begins_at <= now < self.ends_at
            and self.source in ("*", source)
            and self.target in ("*", target)
        )


class Network:
    """The links between all hosts, and the servers that listen."""

    def __init__(
        self,
        loop: TaskLoop,
        seed: int,
        disturbances: tuple[Disturbance, ...],
        features: Feature = NO_FEATURES,
    ) -> None:
        self.loop = loop
        self._has_strays = Feature.GARBLED_MESSAGES in features
        self._stray_random = random.Random(f"{seed} strays")
        self._has_breaches = Feature.BAD_FIELDS in features
        self._breach_random = random.Random(f"{seed} breaches")
        self.disturbances = disturbances
        self._random = random.Random(f"{seed} network")
        self.servers: dict[str, VirtualServer] = {}

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Deliver a message, or not, once or twice."""
        now = self.loop.now
        present = [item for item in self.disturbances if item.concerns(source, target, now)]
        # the second time is that of a message that comes twice
        for _ in range(2):
            delay_s = 0.0002 + 0.002 * self._random.random()
            # most delays are short: the square of a random number is small
            for item in present:
                delay_s += item.delay_s * self._random.random() ** 2
            if not any(self._random.random() < item.loss for item in present):
                self.loop.at(now + delay_s, deliver)
            if not any(self._random.random() < item.duplication for item in present):
                break

    def is_reset(self, source: str, target: str) -> bool:
        """Return whether a connection that is made now breaks."""
        now = self.loop.now
        present = [item for item in self.disturbances if item.concerns(source, target, now)]
        return any(self._random.random() < item.reset for item in present)

    def send_stray(self, address: str, path: str, sent: bytes) -> None:
        """Send a malformed copy of a message, sometimes, whose answer nobody takes."""
        draw = self._stray_random
        if not self._has_strays or draw.random() > 0.3:
            return
        # what changes something belongs to who has signed it: a reader that is done, an entry
        if not path.startswith(("/claims", "/ask", "/digests")) or b'"done": [[' in sent:
            return
        message = garbled(sent, draw)

        def deliver() -> None:
            server = self.servers.get(address)
            if server is not None:
                server.answer(path, message, lambda _: None)

        # before the message itself: a claim that has ended is not brought back
        self.loop.at(self.loop.now + 0.0002 * draw.random(), deliver)

    def send_breach(self, address: str, path: str, sent: bytes) -> None:
        """Send a message with a field that breaks its format, sometimes, which must be refused."""
        draw = self._breach_random
        if not self._has_breaches or draw.random() > 0.3:
            return
        breach = breach_of(path, sent, draw)
        if breach is None:
            return
        path, message, is_right = breach

        def check(answer: tuple[int, bytes]) -> None:
            if (answer[0] == 200) != is_right:
                text = f"{address} answers {answer[0]} at {path} to {message[:200]!r}"
                raise BrokenRuleError("REFUSE", text)

        def deliver() -> None:
            server = self.servers.get(address)
            # only some servers have each page
            if server is not None and server.has_page(path):
                server.answer(path, message, check)

        self.loop.at(self.loop.now + 0.01 * draw.random(), deliver)

    def garble(self, source: str, target: str, answer: bytes) -> bytes:
        """Return an answer as it comes to the host that has asked."""
        now = self.loop.now
        draw = self._stray_random
        for item in self.disturbances:
            is_garbling = item.garbling and item.concerns(source, target, now)
            if is_garbling and answer[:1] == b"{" and draw.random() < item.garbling:
                return garbled(answer, draw)
        return answer

    def is_cut(self, source: str, target: str) -> bool:
        """Return whether nothing comes from one host to another now."""
        now = self.loop.now
        return any(
            item.loss >= 1 and item.concerns(source, target, now) for item in self.disturbances
        )


@attrs.define(eq=False)
class VirtualServer:
    """The server of a host: it answers at an address while the host lives."""

    host: Host
    address: str
    port: int
    routes: Mapping[str, Route]

    def close(self) -> None:
        """Stop listening."""
        # another start may listen at the address
        if self.host.network.servers.get(self.address) is self:
            del self.host.network.servers[self.address]

    def has_page(self, path: str) -> bool:
        """Return whether there is an answer to what is sent to a path."""
        return f"POST /{path.split('/')[1]}" in self.routes

    def answer(
        self, path: str, sent: bytes | None, reply: Callable[[tuple[int, bytes]], None]
    ) -> None:
        """Reply with the status and the body of the answer to a question, now or later."""
        _, label, *segments = path.split("/")
        route = self.routes.get(f"{'GET' if sent is None else 'POST'} /{label}")
        # as the real server, which has no such page
        if route is None or len(segments) != route.num_segments:
            reply((404, b""))
            return

        def finish(answer: bytes) -> None:
            # what was answered is a promise, also if the answer is lost
            for witness in self.host.witnesses:
                witness(path, sent or b"", answer)
            reply((200, answer))

        async def wait(answer: Coroutine[Any, Any, bytes]) -> None:
            try:
                finish(await answer)
            except (ValueError, TypeError, RecursionError) as error:
                reply((400, str(error).encode()))

        try:
            answer = route.answer(sent or b"", *segments)
        except (ValueError, TypeError, RecursionError) as error:
            reply((400, str(error).encode()))
            return
        if isinstance(answer, bytes):
            finish(answer)
        else:
            self.host.loop.start(self.host, f"answer {path}", partial(wait, answer), 0.0)


@attrs.define(eq=False)
class _Exchange:
    """A question under way: the task that waits, and the answer that has come."""

    task: Task
    answer: tuple[int, bytes] | None = None
    reason: str = ""


class VirtualSignal:
    """A signal of a virtual host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._is_set = False
        self._task: Task | None = None

    def set(self) -> None:
        self._is_set = True
        if self._task is not None:
            self._host.loop.wake(self._task)

    async def wait(self, timeout_s: float | None = None) -> None:
        if not self._is_set:
            self._task = self._host.loop.running()
            await self._host.wait(FOREVER if timeout_s is None else timeout_s)
            self._task = None
        self._is_set = False


@attrs.frozen(eq=False)
class Host(System):
    """The machine of one start of an engine, with a clock of its own.

    The clock runs at ``rate`` and began at ``offset_s``. A frozen host does nothing, and hears
    later what was sent to it; a dead one never again. The ``witnesses`` learn of a message and its
    answer when the host gives it, the ``hearers`` when the host gets it. Addresses that a request
    names pass ``check``.
    """

    name: str
    network: Network
    random: random.Random
    rate: float = 1.0
    offset_s: float = 0.0
    witnesses: list[Callable[[str, bytes, bytes], None]] = attrs.field(factory=list)
    hearers: list[Callable[[str, bytes, bytes], None]] = attrs.field(factory=list)
    check: Callable[[str], object] = lambda _: None
    _state: dict[str, float] = attrs.field(
        factory=lambda: {"dead": 0.0, "frozen_until": 0.0, "spent": 0.0}
    )

    @property
    def loop(self) -> TaskLoop:
        """The loop that all hosts share."""
        return self.network.loop

    @property
    def is_dead(self) -> bool:
        """Return whether the host has died."""
        return bool(self._state["dead"])

    @property
    def thaws_at(self) -> float:
        """Return when the host goes on, which has passed for one that is not frozen."""
        return self._state["frozen_until"]

    def freeze(self, until_s: float) -> None:
        """Do nothing until a time."""
        self._state["frozen_until"] = max(until_s, self.thaws_at)

    def die(self) -> None:
        """Do nothing any more."""
        # connections to the host are reset from now on
        self._state["dead"] = 1.0
        for server in [*self.network.servers.values()]:
            if server.host is self:
                server.close()
        self.loop.kill(self)

    def spend(self, duration_s: float) -> None:
        """Let this host's clock go on, as if something had taken so long."""
        self._state["spent"] += duration_s

    def monotonic(self) -> float:
        return self.offset_s + self.rate * self.loop.now + self._state["spent"]

    async def wait(self, duration_s: float) -> bool:
        """Wait in a task, for a time of this host's clock. Return whether the task was woken."""
        is_woken = await self.loop.wait(max(duration_s, 0.0) / self.rate)
        # What happens while the host is frozen is noticed later.
        while self.thaws_at > self.loop.now:
            await self.loop.wait(self.thaws_at - self.loop.now)
        return is_woken

    async def sleep(self, duration_s: float) -> None:
        await self.wait(duration_s)

    async def work(self, function: Callable[[], T]) -> T:
        # the engine goes on meanwhile
        await self.wait(0.001 * self.random.random())
        while True:
            try:
                return function()
            except BlockedError:
                await self.wait(BLOCKED_S)

    def token_hex(self, num_bytes: int) -> str:
        return f"{self.random.getrandbits(8 * num_bytes):0{2 * num_bytes}x}"

    def start(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.loop.start(self, name, run, 0.0005 * self.random.random())

    def lock(self) -> AbstractContextManager[object]:
        return nullcontext()

    def signal(self) -> VirtualSignal:
        return VirtualSignal(self)

    async def unless(self, signal: Signal, coroutine: Coroutine[Any, Any, T]) -> T | None:
        me = self.loop.running()
        ended: list[T | BaseException] = []

        async def run() -> None:
            try:
                ended.append(await coroutine)
            except Exception as error:
                ended.append(error)
            self.loop.wake(me)

        task = self.loop.start(self, f"part of {me.name}", run, 0.0)
        await signal.wait()
        self.loop.end(task)
        coroutine.close()
        for end in ended:
            if isinstance(end, BaseException):
                raise end
            return end
        return None

    def check_server(self, address: str) -> None:
        self.check(address)

    def serve(
        self, host: str, port: int, routes: Mapping[str, Route], announced: str = ""
    ) -> VirtualServer:
        server = VirtualServer(self, f"{host}:{port}", port, routes)
        self.network.servers[server.address] = server
        return server

    async def exchange(
        self, peer: str, address: str, path: str, timeout_s: float, sent: bytes | None = None
    ) -> bytes:
        exchange = _Exchange(self.loop.running())
        target = address.rpartition(":")[0]
        self.network.send(
            self.name, target, partial(self._arrive, exchange, target, address, path, sent)
        )
        if sent is not None:
            self.network.send_stray(address, path, sent)
            self.network.send_breach(address, path, sent)
        # the time of this host's clock
        deadline = self.loop.now + timeout_s / self.rate
        # a task may be woken before its answer has come
        while exchange.answer is None and not exchange.reason:
            left_s = deadline - self.loop.now
            if left_s <= 0:
                exchange.reason = "nothing in time"
                break
            await self.wait(left_s * self.rate)
        if exchange.answer is None or exchange.answer[0] != 200:
            got = exchange.reason or f"status {exchange.answer and exchange.answer[0]}"
            expected = f"an answer within {timeout_s:g} s"
            action = f"reach {peer}"
            raise KVPlanError("PEER", action, expected=expected, got=got, unanswered=path)
        for hearer in self.hearers:
            hearer(path, sent or b"", exchange.answer[1])
        return exchange.answer[1]

    def _arrive(
        self, exchange: _Exchange, target: str, address: str, path: str, sent: bytes | None
    ) -> None:
        """Answer a question that has arrived at its target."""
        server = self.network.servers.get(address)
        # nobody listens, or the connection breaks
        if server is None or self.network.is_reset(self.name, target):
            self.network.send(target, self.name, partial(self._take, exchange, None))
        # the host hears it when it goes on
        elif server.host.thaws_at > self.loop.now:
            again = partial(self._arrive, exchange, target, address, path, sent)
            self.loop.at(server.host.thaws_at, again)
        else:
            server.answer(path, sent, partial(self._reply, exchange, target))

    def _reply(self, exchange: _Exchange, target: str, answer: tuple[int, bytes]) -> None:
        status, content = answer
        answer = status, self.network.garble(target, self.name, content)
        self.network.send(target, self.name, partial(self._take, exchange, answer))

    def _take(self, exchange: _Exchange, answer: tuple[int, bytes] | None) -> None:
        """Take the first answer that comes, or the news that nobody answers."""
        # a second answer, or one that comes too late, changes nothing
        if exchange.answer is None and not exchange.reason:
            exchange.answer = answer
            exchange.reason = "" if answer is not None else "a reset"
            self.loop.wake(exchange.task)
