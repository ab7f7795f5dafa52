"""The siege: a listener, a store and a proxy under attack, beside honest clients of each.

    python -m benchmarks.siege --seconds 3600

- *Listener*: honest readers fetch offers, claim leases, ask and end them. Attackers without the key hold idle and slow
  connections and send malformed, unsigned and forged questions; one with the key claims a lease under ever new names
  and sends each question twice.
- *Store*: an engine saves and loads prompts in a folder. Other writers and evictors are killed while they work. An
  attacker damages, cuts, swaps, dates and replaces files, and leaves links, pipes and folders at their names.
- *Proxy*: honest clients send prompts, and lists of them. Attackers hold idle connections and unfinished bodies, and
  send what is no request, or would grow. Engines are stand-ins: they say what prompt and handoff they were given.

An honest client compares all that it gets. Another prompt's answer, a byte of another page, or a lease that is valid
after its end is *wrong*. What is refused or missed is counted, with the longest time without an answer. Memory of the
listener, the proxy, the store's engine, an evictor and the honest clients is measured throughout, and how many blocks
of it the listener and the proxy have from Python. The exit status is 1 if something is wrong, if no honest client of a
kind was served, or if memory grows in a run of 25 minutes or more. ``--plant`` plants a fault that has to be found.

All run on one host, so this does not show what a network lets through.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from benchmarks.held import Growth, Held, growth, tell_blocks
from kvplan import Blocks, KVPlanError, Model
from kvplan.protocol import Leases, Listener, Source
from kvplan.protocol.claims import ClaimMessage, send_claims
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.listener import fetch
from kvplan_nixl.proxy import USAGE
from kvplan_nixl.serving import Access, Driver, access
from kvplan_nixl.serving.access import Asked, Proof
from kvplan_nixl.serving.store import FileBackend, Limits, StoreClient, evict
from kvplan_nixl.vllm import proxy

PROXY: Final = "proxy"
KEY: Final = b"a key that attackers lack"
OFFER: Final = bytes(range(256)) * 400
COMPLETIONS: Final = "/v1/completions"
PAGE: Final = 16
PROMPTS: Final = [range(first, first + 100) for first in range(0, 8000, 1000)]
BLOCKS: Final = {"attn": Blocks([3, 9, 5, 1, 7, 30])}
STORE_BYTES: Final = 400_000
MEASURE_S: Final = 2.0
KILL_S: Final = 0.7
TIMEOUT_S: Final = 30.0
LEASE_S: Final = 10.0
MAX_GROWTH_MIB: Final = 4.0
"""An hour, beyond three standard errors. Heaps go on growing a little for hours."""

PLANTS: Final = ("answer", "leak")
"""Faults to plant: answers of a decode engine to another prompt; an evictor that keeps memory."""

SPAWN: Final = multiprocessing.get_context("spawn")


@attrs.define
class Tally:
    """What happened to the honest clients of a kind. The first of them that is served says that they are ``ready``."""

    ready: Any = None
    counts: Counter[str] = attrs.field(factory=Counter)
    wrong: list[str] = attrs.field(factory=list)
    longest_s: float = 0.0
    _served_at: float = attrs.field(factory=time.monotonic)

    def serve(self) -> None:
        """A client has got what it asked for."""
        self.counts["served"] += 1
        if self.ready is not None:
            self.ready.release()
            self.ready = None
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._served_at)
        self._served_at = now

    def check(self, is_right: bool, what: str) -> None:
        """Note an answer that is another one's."""
        if not is_right:
            self.wrong.append(what)


@attrs.frozen
class Town:
    """What is under attack: the addresses and folder, when clients are ``ready``, and when it is over."""

    source: Source
    proxy_port: int
    store: Path
    ready: Any
    over: Any
    lease: str

    @property
    def is_over(self) -> bool:
        return bool(self.over.is_set())

    def repeat(self, action: Callable[[], object], pause_s: float) -> None:
        """Repeat an action, whatever becomes of it, until all is over."""
        while not self.is_over:
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

    def do_POST(self) -> None:
        """Hand out the prompt itself as its handoff, or answer with prompt and handoff."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, handoff = body.get("prompt"), body.get("kv_transfer_params") or {}
        if handoff.get("do_remote_decode"):
            answer: dict[str, Any] = {"kv_transfer_params": {"of": prompt}}
        else:
            text = f"{prompt} by {handoff.get('of')}"
            if isinstance(self.server, StandInServer) and self.server.is_wrong and random.random() < 0.1:
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


class StandInServer(ThreadingHTTPServer):
    """A stand-in for an engine."""

    request_queue_size = 1024
    daemon_threads = True
    is_wrong = False

    def handle_error(self, *_: Any) -> None:
        return  # the proxy has hung up, since its client has


def serve_stand_ins(pipe: Connection, plant: str) -> None:
    """A prefill and a decode engine, as stand-ins."""
    servers = [StandInServer(("127.0.0.1", 0), StandIn) for _ in range(2)]
    servers[1].is_wrong = plant == "answer"
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send([server.server_port for server in servers])
    with suppress(EOFError):
        pipe.recv()


class StoreEngine:
    """An engine with a cache in memory, and a store."""

    def __init__(self, folder: Path) -> None:
        keys = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
        model = Model.from_config({**keys, "num_key_value_heads": 4}, "a small model, weights 1")
        (worker,) = model.engine("e", num_blocks=40)
        self.memory = [np.zeros(region.size_bytes, np.uint8) for region in worker.regions]
        regions = [
            attrs.evolve(region, address=array.ctypes.data)
            for region, array in zip(worker.regions, self.memory, strict=True)
        ]
        worker = attrs.evolve(worker, regions=regions)
        backend = FileBackend(folder, synchronize=False)
        self.client = StoreClient(backend, worker, tokens_per_page=PAGE, buffer_bytes=1 << 22)

    def fill(self, prompt: range) -> None:
        """Fill the cache with bytes of a prompt's own."""
        for number, array in enumerate(self.memory):
            array[:] = np.random.default_rng([prompt.start, number]).integers(1, 256, array.size)

    def save(self, prompt: range) -> None:
        """Save the prompt's cache."""
        self.fill(prompt)
        chain = self.client.chain(prompt)
        self.client.save(chain, BLOCKS, self.client.needs(0, 96))
        self.client.use(chain, 96)

    def load(self, prompt: range, before: int) -> int:
        """Load what is stored of a prompt, into memory that has one value."""
        for array in self.memory:
            array[:] = before
        chain = self.client.chain(prompt)
        stop = self.client.find(chain)
        self.client.load(chain, BLOCKS, self.client.needs(0, stop))
        return stop


def use_store(town: Town, tally: Tally, rng: random.Random) -> None:
    """Save and load prompts, and compare each byte that has changed with what was saved of it.

    A block of the cache is either as it was, or that of the prompt.
    """
    engine = StoreEngine(town.store)
    while not town.is_over:
        prompt = rng.choice(PROMPTS)
        try:
            if rng.random() < 0.4:
                engine.save(prompt)
            stop = engine.load(prompt, 0)
        except KVPlanError as error:
            tally.counts[f"missed: {error.code}"] += 1
            stop = 0
        loaded = [array.copy() for array in engine.memory]
        engine.fill(prompt)
        is_right = all(
            bool(np.all((new == 0) | (new == right))) for new, right in zip(loaded, engine.memory, strict=True)
        )
        num_changed = sum(int(np.count_nonzero(array)) for array in loaded)
        bytes_of_block = sum(array.size for array in loaded) // 40
        tally.check(is_right and num_changed >= stop // PAGE * bytes_of_block, f"bytes of {prompt}")
        if stop:
            tally.serve()
        else:
            tally.counts["missed"] += 1
        time.sleep(0.02)


def work_at_store(folder: Path, kind: str, plant: str) -> None:
    """Write or evict until killed."""
    rng = random.Random()
    engine = StoreEngine(folder)
    backend = FileBackend(folder, synchronize=False)
    kept: list[bytes] = []
    while True:
        with suppress(KVPlanError):
            if kind == "evictor":
                evict(backend, Limits(max_bytes=STORE_BYTES), time.time(), unfinished_s=1.0)
                time.sleep(0.05)
            else:
                engine.save(rng.choice(PROMPTS))
        if plant == "leak":
            kept.append(os.urandom(20_000))
        time.sleep(0.02)


# Honest clients


def use_listener(town: Town, tally: Tally, granting: Callable[[str], str]) -> None:
    """Fetch offers, and claim, ask for and end leases."""
    driver = Driver(Access(key=KEY))
    start = town.source.start

    def tell(**claims: Any) -> Any:
        return driver.run(send_claims(town.source, ClaimMessage(start, **claims), system=driver))

    for number in range(1 << 60):
        if town.is_over:
            return
        try:
            if number % 10 == 0:
                offers = driver.run(fetch(town.source, TIMEOUT_S, system=driver))
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


def use_proxy(town: Town, tally: Tally, first: int) -> None:
    """Ask for the answers to one prompt, or to three."""
    for number in range(first, 1 << 60, 2):
        if town.is_over:
            return
        prompts = [f"prompt {number}-{part}" for part in range(3 if number % 5 == 0 else 1)]
        try:
            with closing(HTTPConnection("127.0.0.1", town.proxy_port, timeout=TIMEOUT_S)) as connection:
                body = {"prompt": prompts if len(prompts) > 1 else prompts[0], "max_tokens": 5}
                connection.request("POST", COMPLETIONS, json.dumps(body))
                response = connection.getresponse()
                answer = json.loads(response.read())
        except (OSError, HTTPException, ValueError) as error:
            tally.counts[f"refused: {type(error).__name__}"] += 1
            continue
        if response.status == 200:
            texts = [choice["text"] for choice in answer["choices"]]
            tally.check(texts == [f"{prompt} by {prompt}" for prompt in prompts], f"{prompts}: {texts}")
            tally.serve()
        else:
            tally.counts[f"refused: {response.status}"] += 1
        time.sleep(0.05)


def be_honest(town: Town, pipe: Connection, results: Any) -> None:
    """All honest clients of the listener and of the proxy."""
    tallies = {name: Tally(town.ready) for name in ("listener", "proxy", "proxy ")}
    lock = threading.Lock()

    def granting(name: str) -> str:
        with lock:
            pipe.send(name)
            return str(pipe.recv())

    work: list[Callable[[], None]] = [
        lambda: use_listener(town, tallies["listener"], granting),
        lambda: use_proxy(town, tallies["proxy"], 0),
        lambda: use_proxy(town, tallies["proxy "], 1),
    ]
    run_threads(work)
    for name, tally in tallies.items():
        results.put((name.strip(), tally))


def be_an_engine(town: Town, results: Any) -> None:
    """The store's honest engine."""
    tally = Tally(town.ready)
    use_store(town, tally, random.Random(1))
    results.put(("store", tally))


def run_threads(work: list[Callable[[], None]]) -> None:
    """Run functions at once, until all have ended."""
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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


class Crowd:
    """Connections that are held, of which the oldest are closed."""

    def __init__(self, port: int, size: int, sent: bytes) -> None:
        self.port = port
        self.size = size
        self.sent = sent
        self.connections: list[socket.socket] = []

    def act(self) -> None:
        """Another connection; now and then a byte on all of them."""
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


def attack_listener(town: Town, tally: Tally, rng: random.Random) -> None:
    """A question of somebody without the key: whatever it is, the answer has no offer."""
    claim = json.dumps(ClaimMessage(town.source.start, done=((town.lease, "d"),)).fields()).encode()
    forged = signed(town.source, "0" * 32, claim).replace(b"Kvplan ", b"Kvplan x", 1)
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
    answer = answered(town.source.port, question)
    tally.counts["questions without the key"] += 1
    tally.check(answer.partition(b" ")[2][:3] in (b"400", b"401", b"403", b""), f"{question[:99]!r}: {answer[:99]!r}")


def abuse_key(town: Town, tally: Tally) -> None:
    """An engine with the key: ever new readers of one lease, each question twice."""
    refused = answered(town.source.port, b"GET / HTTP/1.1\r\n\r\n")
    challenge = refused.partition(b"Kvplan ")[2].partition(b" ")[0].decode()
    for _ in range(20):
        claims = tuple((town.lease, f"reader {random.random()}") for _ in range(50))
        question = signed(town.source, challenge, json.dumps(ClaimMessage(town.source.start, claims).fields()).encode())
        answered(town.source.port, question)
        again = answered(town.source.port, question)
        tally.check(b" 401 " in again.partition(b"\r\n")[0], f"a question that was sent twice: {again[:99]!r}")
        tally.counts["questions with the key, each twice"] += 1


def attack_proxy(town: Town, tally: Tally, rng: random.Random) -> None:
    """What is no request, or would grow."""
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
    with closing(HTTPConnection("127.0.0.1", town.proxy_port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", COMPLETIONS, body)
        status = connection.getresponse().status
    tally.counts["requests that are none"] += 1
    tally.check(status in (expected, 503), f"{body[:99]!r}: {status}")
    with closing(HTTPConnection("127.0.0.1", town.proxy_port, timeout=TIMEOUT_S)) as connection:
        connection.request("GET", rng.choice(["/metrics", "/v1/../metrics", "/admin", "/tokenize", "//"]))
        tally.check(connection.getresponse().status == 404, "a path")


def first_mib(path: Path) -> bytes:
    """The first bytes of a file, which may be sparse."""
    with path.open("rb") as file:
        return file.read(1 << 20)


def damage_store(town: Town, tally: Tally, rng: random.Random) -> None:
    """Do something to a file of the store, or in the place of one, and take away what was left before."""
    for path in town.store.rglob("*"):
        if "left" in path.name:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    files = [path for path in town.store.rglob("*") if path.is_file() and path.parent.name != "tmp"]
    if not files:
        return
    path, other = rng.choice(files), rng.choice(files)
    act = rng.choice(["flip", "cut", "sparse", "swap", "date", "pipe", "link", "folder", "unfinished", "nfs"])
    tally.counts[f"store: {act}"] += 1
    if act == "flip":
        data = bytearray(first_mib(path))
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif act == "cut":
        os.truncate(path, rng.choice([0, 10, 48, 4096, 5000]))
    elif act == "sparse":
        os.truncate(path, 1 << 40)
    elif act == "swap":
        contents = first_mib(path), first_mib(other)
        other.write_bytes(contents[0])
        path.write_bytes(contents[1])
    elif act == "date":
        os.utime(path, (rng.choice([0, 4e9]),) * 2)
    elif act == "unfinished":
        (town.store / "tmp" / f"left {rng.random()}").write_bytes(bytes(1000))
    elif act == "nfs":
        (path.parent / f".nfs left {rng.random()}").write_bytes(bytes(1000))
    else:
        path.rename(path.with_name(f"left {rng.random()}"))
        make: Mapping[str, Callable[[], None]] = {
            "pipe": lambda: os.mkfifo(path),
            "link": lambda: path.symlink_to("/etc/passwd"),
            "folder": lambda: (path / "left").mkdir(parents=True),
        }
        make[act]()


def attack(town: Town, results: Any) -> None:
    """All attackers."""
    tally = Tally()
    rng = random.Random(2)
    body = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 33554432\r\n\r\nx"
    crowds = [
        (Crowd(town.source.port, 600, b""), 0.02),
        (Crowd(town.source.port, 500, b"POST /claims HTTP/1.1\r\nContent-Length: 5000\r\n"), 0.02),
        (Crowd(town.proxy_port, 1100, b""), 0.01),
        (Crowd(town.proxy_port, 100, body), 0.1),
        (Crowd(town.proxy_port, 200, b"GET /v1/models HTTP/1.1\r\nX: "), 0.05),
    ]
    work: list[Callable[[], None]] = [
        lambda crowd=crowd, pause_s=pause_s: town.repeat(crowd.act, pause_s)  # type: ignore[misc]
        for crowd, pause_s in crowds
    ]
    work += [
        lambda: town.repeat(lambda: attack_listener(town, tally, rng), 0.02),
        lambda: town.repeat(lambda: abuse_key(town, tally), 0.05),
        lambda: town.repeat(lambda: attack_proxy(town, tally, rng), 0.2),
        lambda: town.repeat(lambda: damage_store(town, tally, rng), 0.1),
    ]
    run_threads(work)
    results.put(("attackers", tally))


# The course of it


@attrs.define
class Measured:
    """What a process held, and when. If it tells its blocks, by :func:`tell_blocks`, they are in a file."""

    pid: int
    told: Path | None = None
    seconds: list[float] = attrs.field(factory=list)
    held: list[Held] = attrs.field(factory=list)
    blocks: list[int] = attrs.field(factory=list)

    def measure(self, now: float) -> None:
        """Measure it once more."""
        self.held.append(Held.of(self.pid))
        self.seconds.append(now)
        if self.told is not None:
            self.blocks.append(int(self.told.read_text()))

    @property
    def growth(self) -> Growth:
        return growth(self.seconds, [held.mib for held in self.held])

    def __str__(self) -> str:
        mib = [held.mib for held in self.held]
        files = [held.files for held in self.held]
        threads = [held.threads for held in self.held]
        tenths = [float(np.mean(part)) for part in np.array_split(mib, 10) if part.size]
        text = (
            f"{mib[0]:.1f} MiB at first, {max(mib):.1f} at most, {trend(self.seconds, mib)} of {len(mib)} points, "
            f"by tenths of the time {' '.join(f'{mean:.1f}' for mean in tenths)}; "
            f"files {min(files)} to {max(files)}, threads {min(threads)} to {max(threads)}"
        )
        if self.blocks:
            most = max(self.blocks)
            text += f"; {self.blocks[-1]} blocks at last, {most} at most, {trend(self.seconds, self.blocks)}"
        return text


def trend(seconds: list[float], values: list[Any]) -> str:
    """How values grow after the beginning, and in the second half."""
    return f"{growth(seconds, values)} and {growth(seconds, values, seconds[-1] / 2)} in the second half"


def free_port() -> int:
    """A port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def besiege(seconds: float, plant: str, folder: Path) -> tuple[dict[str, Tally], dict[str, Measured], int]:
    """Run all of it. Return what happened to clients, what processes held, and how many were killed."""
    store = folder / "kv"
    started: list[Any] = []

    def start(target: Callable[..., None], *arguments: Any) -> Any:
        process = SPAWN.Process(target=target, args=arguments, daemon=True)
        process.start()
        started.append(process)
        return process

    proxying: subprocess.Popen[bytes] | None = None
    try:
        pipe, listener_pipe = SPAWN.Pipe()
        told = {name: folder / f"blocks of the {name}" for name in ("listener", "proxy")}
        listener = start(serve_listener, listener_pipe, told["listener"])
        source = pipe.recv()
        pipe.send("of attackers")
        lease = pipe.recv()
        stand_in_pipe, other = SPAWN.Pipe()
        start(serve_stand_ins, other, plant)
        urls = [f"http://127.0.0.1:{port}" for port in stand_in_pipe.recv()]
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.siege", PROXY, f"{told['proxy']}"]
        command += ["--prefill", urls[0], "--decode", urls[1]]
        with (folder / "proxy.log").open("wb") as log:
            proxying = subprocess.Popen([*command, "--port", f"{port}"], stdout=subprocess.PIPE, stderr=log)
        assert proxying.stdout is not None
        proxying.stdout.readline()
        results: Any = SPAWN.Queue()
        town = Town(source, port, store, SPAWN.Semaphore(0), SPAWN.Event(), lease)
        engine = start(be_an_engine, town, results)
        evictor = start(work_at_store, store, "evictor", plant)
        clients = start(be_honest, town, pipe, results)
        start(attack, town, results)
        pids = {"listener": listener.pid, "proxy": proxying.pid, "store's engine": engine.pid, "evictor": evictor.pid}
        pids["honest clients"] = clients.pid
        measured = {name: Measured(pid, told.get(name)) for name, pid in pids.items()}
        for _ in range(4):
            town.ready.acquire(timeout=4 * TIMEOUT_S)
        num_killed = wait(seconds, measured, lambda kind: start(work_at_store, store, kind, ""))
        town.over.set()
        tallies: dict[str, Tally] = {}
        for _ in range(5):
            name, tally = results.get(timeout=4 * TIMEOUT_S)
            tallies[name] = tally if name not in tallies else joined(tallies[name], tally)
        log_bytes = (folder / "proxy.log").stat().st_size
        tallies["attackers"].counts["bytes of the proxy's log"] = log_bytes
        return tallies, measured, num_killed
    finally:
        for process in started:
            process.kill()
        if proxying is not None:
            proxying.kill()
            proxying.wait()


def joined(one: Tally, other: Tally) -> Tally:
    """What happened to the clients of both."""
    wrong = one.wrong + other.wrong
    return Tally(None, one.counts + other.counts, wrong, max(one.longest_s, other.longest_s))


def wait(seconds: float, measured: Mapping[str, Measured], start: Callable[[str], Any]) -> int:
    """Measure processes, and kill writers and evictors of the store, which are replaced. Return how many."""
    rng = random.Random(3)
    begin = time.monotonic()
    num_killed, next_measure = 0, 0.0
    workers = [start("writer"), start("evictor")]
    while (now := time.monotonic() - begin) < seconds:
        if now >= next_measure:
            next_measure = now + MEASURE_S
            for each in measured.values():
                each.measure(now)
        if rng.random() < KILL_S / 10:
            number = rng.randrange(2)
            workers[number].kill()
            workers[number].join()
            workers[number] = start(("writer", "evictor")[number])
            num_killed += 1
        time.sleep(KILL_S)
    return num_killed


def main(arguments: list[str]) -> int:
    """Run the siege, and print what happened. Begun with :data:`PROXY`, run the proxy that is under attack."""
    if arguments[:1] == [PROXY]:
        tell_blocks(Path(arguments[1]))
        proxy.main(arguments[2:])
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.siege")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--plant", choices=PLANTS, default="")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="siege-"))
    try:
        tallies, measured, num_killed = besiege(options.seconds, options.plant, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    faults = []
    for name, tally in sorted(tallies.items()):
        print(f"{name}: {dict(sorted(tally.counts.items()))}, wrong: {len(tally.wrong)}", end="")
        print("" if name == "attackers" else f", longest time without an answer: {tally.longest_s:.1f} s")
        faults += [f"{name}: wrong: {what}" for what in tally.wrong[:5]]
        if name != "attackers" and not tally.counts["served"]:
            faults.append(f"{name}: nobody was served")
    print(f"killed: {num_killed} writers and evictors of the store")
    for name, each in measured.items():
        print(f"{name}: {each}")
        if each.growth.exceeds(MAX_GROWTH_MIB):
            faults.append(f"{name}: memory grows")
    print("faults:", *faults or ["none"], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
