"""The siege: a listener and a proxy are attacked while honest clients use them.

    python -m benchmarks.siege --seconds 3600

- *Listener*: honest readers fetch offers, claim leases, ask and end them. Attackers without the key hold idle and slow
  connections and send malformed, unsigned and forged requests; one with the key claims a lease under new names each
  time and replays each request.
- *Proxy*: honest clients send prompts, and lists of them. Attackers hold idle connections and unfinished bodies, and
  send malformed requests and large ones. Engines are stand-ins that answer with the prompt and handoff they were given.

Honest clients check each answer: the answer to another prompt, or a lease that is valid after its end, is *wrong*.
Refusals are counted, and the longest time without an answer is printed. Memory of the listener and of the proxy is
measured throughout, and how many blocks of it they have from Python. The exit status is 1 if something is wrong, if no
honest client of a kind was served, or if memory grows in a run of 25 minutes or more. ``--plant`` plants a fault, which
has to be found.

The listener and the proxy are processes of their own; clients, attackers and stand-ins are threads of this one. All run
on one host, so this does not show what a network lets through.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import attrs
from yarl import URL

from benchmarks.held import Growth, Held, growth, tell_blocks
from kvplan import KVPlanError
from kvplan.protocol import Leases, Listener, Source
from kvplan.protocol.claims import ClaimMessage, send_claims
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.listener import fetch
from kvplan_nixl.proxy import USAGE
from kvplan_nixl.serving import Access, Driver, access
from kvplan_nixl.serving.access import Asked, Proof
from kvplan_nixl.vllm import proxy

PROXY: Final = "proxy"
KEY: Final = b"a key that attackers lack"
OFFER: Final = bytes(range(256)) * 400
COMPLETIONS: Final = "/v1/completions"
MEASURE_S: Final = 2.0
TIMEOUT_S: Final = 30.0
LEASE_S: Final = 10.0
WRONG: Final = re.compile(r"prompt \d*[01]-")
"""The prompts that a planted fault answers wrongly: one of five of each client, from the first one on."""

MAX_GROWTH_MIB: Final = 4.0
"""An hour, beyond three standard errors. Heaps go on growing a little for hours."""


@attrs.define
class Tally:
    """What happened to the clients of a kind."""

    counts: Counter[str] = attrs.field(factory=Counter)
    wrong: list[str] = attrs.field(factory=list)
    longest_s: float = 0.0
    _served_at: float = attrs.field(factory=time.monotonic)

    def serve(self) -> None:
        """Count a right answer."""
        self.counts["served"] += 1
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._served_at)
        self._served_at = now

    def check(self, is_right: bool, what: str) -> None:
        """Note a wrong answer."""
        if not is_right:
            self.wrong.append(what)


@attrs.frozen
class Targets:
    """The servers under attack, a lease that attackers may claim, and the event that ends the run."""

    source: Source
    proxy_port: int
    lease: str
    over: threading.Event = attrs.field(factory=threading.Event)

    def repeat(self, action: Callable[[], object], pause_s: float) -> None:
        """Repeat an action until the run ends; its errors do not count."""
        while not self.over.is_set():
            with suppress(OSError, HTTPException, KVPlanError, ValueError):
                action()
            time.sleep(pause_s)


# What is under attack


def serve_listener(pipe: Connection, blocks: Path) -> None:
    """An engine's listener: grant a lease for each name that comes through the pipe."""
    tell_blocks(blocks)
    # so that a challenge has all its questions in minutes, and memory reaches what it may hold
    access.MAX_NONCES = 1 << 12  # type: ignore[misc]
    driver = Driver(Access(key=KEY))
    leases = Leases(driver, lease_s=LEASE_S)
    with closing(Listener("prefill", "127.0.0.1", [OFFER] * 4, leases, system=driver)) as listener:
        pipe.send(listener.source)
        with suppress(EOFError):
            while True:
                if pipe.poll(0.1):
                    pipe.send(leases.grant(pipe.recv()))
                leases.take_ended()


class StandIn(BaseHTTPRequestHandler):
    """A request to a stand-in for an engine."""

    is_wrong = False

    def do_POST(self) -> None:
        """Hand out the prompt itself as its handoff, or answer with prompt and handoff."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, handoff = body.get("prompt"), body.get("kv_transfer_params") or {}
        if handoff.get("do_remote_decode"):
            answer: dict[str, Any] = {"kv_transfer_params": {"of": prompt}}
        else:
            text = f"{prompt} by {handoff.get('of')}"
            if self.is_wrong and WRONG.match(f"{prompt}"):
                text = "another answer"
            answer = {"choices": [{"index": 0, "text": text}], "usage": dict.fromkeys(USAGE, 1)}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", f"{len(data)}")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        return


class WrongStandIn(StandIn):
    """One that answers some prompts with the answer to another one, among them the first of each client."""

    is_wrong = True


class StandInServer(ThreadingHTTPServer):
    """A stand-in for an engine."""

    request_queue_size = 1024
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        return  # the proxy has hung up, since its client has


# Honest clients


def use_listener(targets: Targets, tally: Tally, granting: Callable[[str], str]) -> None:
    """Fetch offers, and claim, ask for and end leases."""
    driver = Driver(Access(key=KEY))
    start = targets.source.start

    def tell(**claims: Any) -> Any:
        return driver.run(send_claims(targets.source, ClaimMessage(start, **claims), system=driver))

    for number in range(1 << 60):
        if targets.over.is_set():
            return
        try:
            if number % 10 == 0:
                offers = driver.run(fetch(targets.source, TIMEOUT_S, system=driver))
                tally.check(offers.workers == (OFFER,) * 4, "offers")
            granted_at = time.monotonic()
            lease = granting(f"request {number}")
            answers = [
                tell(claims=((lease, "d"),)).claims,
                tell(asks=(lease,)).asks,
                tell(done=((lease, "d"),)).done,
            ]
            # on a busy machine a lease may end meanwhile
            is_late = time.monotonic() - granted_at > LEASE_S
            tally.counts["late"] += is_late
            tally.check(is_late or answers == [(True,)] * 3, f"a claim, a question and an end: {answers}")
            tally.check(tell(asks=(lease,)).asks == (False,), "a lease that has ended")
            tally.serve()
        except KVPlanError as error:
            tally.counts[f"refused: {error.code}"] += 1
        time.sleep(0.05)


def use_proxy(targets: Targets, tally: Tally, first: int) -> None:
    """Ask for the answers to one prompt, or to three."""
    for number in range(first, 1 << 60, 2):
        if targets.over.is_set():
            return
        prompts = [f"prompt {number}-{part}" for part in range(3 if number % 5 == 0 else 1)]
        try:
            with closing(HTTPConnection("127.0.0.1", targets.proxy_port, timeout=TIMEOUT_S)) as connection:
                body = {"prompt": prompts if len(prompts) > 1 else prompts[0], "max_tokens": 5}
                connection.request("POST", COMPLETIONS, json.dumps(body))
                response = connection.getresponse()
                answer = json.loads(response.read())
        except (OSError, HTTPException, ValueError) as error:
            tally.counts[f"refused: {type(error).__name__}"] += 1
        else:
            if response.status == 200:
                texts = [choice["text"] for choice in answer["choices"]]
                tally.check(texts == [f"{prompt} by {prompt}" for prompt in prompts], f"{prompts}: {texts}")
                tally.serve()
            else:
                tally.counts[f"refused: {response.status}"] += 1
        time.sleep(0.05)


# Attackers


def connect(port: int) -> socket.socket:
    """A connection to a server on loopback."""
    return socket.create_connection(("127.0.0.1", port), TIMEOUT_S)


def answered(port: int, sent: bytes) -> bytes:
    """All that a server answers to some bytes."""
    parts = []
    with connect(port) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


class OpenConnections:
    """Connections that stay open without a whole request; beyond ``size`` the oldest are closed."""

    def __init__(self, port: int, size: int, sent: bytes) -> None:
        self.port = port
        self.size = size
        self.sent = sent
        self.connections: list[socket.socket] = []

    def act(self) -> None:
        """Open one more; now and then send a byte on all of them."""
        connection = connect(self.port)
        connection.sendall(self.sent)
        self.connections.append(connection)
        if len(self.connections) > self.size:
            self.connections.pop(0).close()
        if random.random() < 0.02:
            for each in self.connections:
                with suppress(OSError):
                    each.send(b"x")


def signed(source: Source, challenge: str, body: bytes) -> bytes:
    """A question about claims, signed with the key."""
    address = f"127.0.0.1:{source.port}"
    proof = Proof.of(SharedKey.of(KEY), challenge, Asked("POST", "/claims", address, address), body)
    lines = f"Host: {address}\r\nContent-Length: {len(body)}\r\nAuthorization: Kvplan {proof}"
    return f"POST /claims HTTP/1.1\r\n{lines}\r\n\r\n".encode() + body


def attack_listener(targets: Targets, tally: Tally, rng: random.Random) -> None:
    """A request without the key: no answer has an offer."""
    claim = json.dumps(ClaimMessage(targets.source.start, done=((targets.lease, "d"),)).fields()).encode()
    forged = signed(targets.source, "0" * 32, claim).replace(b"Kvplan ", b"Kvplan x", 1)
    question = rng.choice(
        [
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nOrigin: http://page.example\r\n\r\n",
            b"POST /claims HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(claim) + claim,
            b"POST /claims HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
            b"POST /claims HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            b"POST /claims HTTP/1.1\r\nContent-Length: 16777216\r\n\r\n" + b"[]" * 20_000,
            forged,
            rng.randbytes(rng.randrange(5000)),
            b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n",
        ]
    )
    answer = answered(targets.source.port, question)
    tally.counts["questions without the key"] += 1
    tally.check(answer.partition(b" ")[2][:3] in (b"400", b"401", b"403", b""), f"{question[:99]!r}: {answer[:99]!r}")


def abuse_key(targets: Targets, tally: Tally) -> None:
    """An engine with the key: new readers of one lease, each request replayed."""
    refused = answered(targets.source.port, b"GET / HTTP/1.1\r\n\r\n")
    challenge = refused.partition(b"Kvplan ")[2].partition(b" ")[0].decode()
    for _ in range(20):
        claims = tuple((targets.lease, f"reader {random.random()}") for _ in range(50))
        question = signed(
            targets.source, challenge, json.dumps(ClaimMessage(targets.source.start, claims).fields()).encode()
        )
        answered(targets.source.port, question)
        again = answered(targets.source.port, question)
        tally.check(b" 401 " in again.partition(b"\r\n")[0], f"a question that was sent twice: {again[:99]!r}")
        tally.counts["questions with the key, each twice"] += 1


def attack_proxy(targets: Targets, tally: Tally, rng: random.Random) -> None:
    """Malformed requests, and ones that would grow."""
    body, expected = rng.choice(
        [
            (b"[" * 100_000, 400),
            (b"[]", 400),
            (rng.randbytes(5000), 400),
            (json.dumps({"prompt": ["w"] * 1500}).encode(), 400),
            (json.dumps({"prompt": ["w"] * 256, "user": "x" * 200_000}).encode(), 400),
            (b'{"prompt": "w", "stop": [' + b"[]," * (1 << 20) + b"[]]}", 400),
        ]
    )
    with closing(HTTPConnection("127.0.0.1", targets.proxy_port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", COMPLETIONS, body)
        status = connection.getresponse().status
    tally.counts["requests that are none"] += 1
    tally.check(status in (expected, 503), f"{body[:99]!r}: {status}")
    with closing(HTTPConnection("127.0.0.1", targets.proxy_port, timeout=TIMEOUT_S)) as connection:
        connection.request("GET", rng.choice(["/metrics", "/v1/../metrics", "/admin", "/tokenize", "//"]))
        tally.check(connection.getresponse().status == 404, "a path")


def attacks(targets: Targets, tally: Tally) -> list[Callable[[], None]]:
    """The loop of each attacker."""
    rng = random.Random(2)
    body = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 33554432\r\n\r\nx"
    by_pause: list[tuple[Callable[[], object], float]] = [
        (OpenConnections(targets.source.port, 600, b"").act, 0.02),
        (OpenConnections(targets.source.port, 500, b"POST /claims HTTP/1.1\r\nContent-Length: 5000\r\n").act, 0.02),
        (OpenConnections(targets.proxy_port, 1100, b"").act, 0.01),
        (OpenConnections(targets.proxy_port, 100, body).act, 0.1),
        (OpenConnections(targets.proxy_port, 200, b"GET /v1/models HTTP/1.1\r\nX: ").act, 0.05),
        (partial(attack_listener, targets, tally, rng), 0.02),
        (partial(abuse_key, targets, tally), 0.05),
        (partial(attack_proxy, targets, tally, rng), 0.2),
    ]
    return [partial(targets.repeat, action, pause_s) for action, pause_s in by_pause]


# The course of it


@attrs.define
class Measured:
    """What a process held, and when; it tells its blocks by :func:`tell_blocks`."""

    pid: int
    told: Path
    seconds: list[float] = attrs.field(factory=list)
    held: list[Held] = attrs.field(factory=list)
    blocks: list[int] = attrs.field(factory=list)

    def measure(self, now: float) -> None:
        """Measure it once more."""
        self.held.append(Held.of(self.pid))
        self.seconds.append(now)
        self.blocks.append(int(self.told.read_text()))

    @property
    def growth(self) -> Growth:
        return growth(self.seconds, [held.mib for held in self.held])

    def __str__(self) -> str:
        mib, files, threads = zip(*map(attrs.astuple, self.held), strict=True)
        return (
            f"{mib[0]:.1f} MiB at first, {max(mib):.1f} at most, {self.growth} of {len(mib)} points; "
            f"{self.blocks[-1]} blocks at last, {max(self.blocks)} at most, {growth(self.seconds, self.blocks)}; "
            f"files {min(files)} to {max(files)}, threads {min(threads)} to {max(threads)}"
        )


def besiege(seconds: float, plant: bool, folder: Path) -> tuple[dict[str, Tally], dict[str, Measured]]:
    """Run all of it. Return what happened to clients, and what servers held."""
    told = {name: folder / f"blocks of the {name}" for name in ("listener", "proxy")}
    spawn = multiprocessing.get_context("spawn")
    pipe, listener_pipe = spawn.Pipe()
    listener = spawn.Process(target=serve_listener, args=(listener_pipe, told["listener"]), daemon=True)
    kinds = (StandIn, WrongStandIn if plant else StandIn)
    engines = [StandInServer(("127.0.0.1", 0), kind) for kind in kinds]
    for engine in engines:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
    urls = [f"http://127.0.0.1:{engine.server_port}" for engine in engines]
    command = [sys.executable, "-m", "benchmarks.siege", PROXY, f"{told['proxy']}", "--port", "0"]
    command += ["--prefill", urls[0], "--decode", urls[1]]
    listener.start()
    with (folder / "proxy.log").open("wb") as log:
        proxying = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert proxying.stdout is not None
        port = URL(proxying.stdout.readline().split()[0].decode()).port
        assert port is not None
        source = pipe.recv()

        def granting(name: str) -> str:
            pipe.send(name)
            return str(pipe.recv())

        targets = Targets(source, port, granting("of attackers"))
        tallies = {name: Tally() for name in ("listener", "proxy", "proxy, another", "attackers")}
        work = [
            lambda: use_listener(targets, tallies["listener"], granting),
            lambda: use_proxy(targets, tallies["proxy"], 0),
            lambda: use_proxy(targets, tallies["proxy, another"], 1),
            *attacks(targets, tallies["attackers"]),
        ]
        threads = [threading.Thread(target=each, daemon=True) for each in work]
        for thread in threads:
            thread.start()
        measured = {"listener": Measured(listener.pid or 0, told["listener"])}
        measured["proxy"] = Measured(proxying.pid, told["proxy"])
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            time.sleep(MEASURE_S)
            for each in measured.values():
                each.measure(now)
        targets.over.set()
        for thread in threads:
            thread.join(4 * TIMEOUT_S)
        tallies["attackers"].counts["bytes of the proxy's log"] = (folder / "proxy.log").stat().st_size
        return tallies, measured
    finally:
        listener.kill()
        proxying.kill()
        proxying.wait()


def main(arguments: list[str]) -> int:
    """Run the siege, and print what happened. Begun with :data:`PROXY`, run the proxy that is under attack."""
    if arguments[:1] == [PROXY]:
        tell_blocks(Path(arguments[1]))
        proxy.main(arguments[2:])
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.siege")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--plant", action="store_true", help="decode answers some prompts wrongly")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="siege-"))
    try:
        tallies, measured = besiege(options.seconds, options.plant, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    faults = []
    for name, tally in tallies.items():
        print(f"{name}: {dict(sorted(tally.counts.items()))}, wrong: {len(tally.wrong)}", end="")
        print("" if name == "attackers" else f", longest time without an answer: {tally.longest_s:.1f} s")
        faults += [f"{name}: wrong: {what}" for what in tally.wrong[:5]]
        if name != "attackers" and not tally.counts["served"]:
            faults.append(f"{name}: no client was served")
    for name, each in measured.items():
        print(f"{name}: {each}")
        if each.growth.exceeds(MAX_GROWTH_MIB):
            faults.append(f"{name}: memory grows")
    print("faults:", *faults or ["none"], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
