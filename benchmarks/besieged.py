"""A server with TLS under attack: ``python -m benchmarks.besieged --seconds 60``.

Engines fetch the offers of one server again and again, over encrypted connections, half of them over a new one each
time.
Beside them, clients without a certificate begin a handshake and send a byte now and then, drop it half way, send
garbage, connect and say nothing, or show a certificate that nobody has signed. All engines must be answered, and the
server must hold no more memory and no more descriptors at the end than when the attack had begun.

The server is a process of its own; engines and attackers share another one, so that the slowest answer is of a machine
whose processors all are busy.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import attrs

from benchmarks.held import Held
from kvplan import KVPlanError
from kvplan.protocol import Leases, Listener, Source
from kvplan.protocol.listener import fetch
from kvplan_nixl.serving import Access, Driver, tls_contexts

KEY: Final = b"a secret of all engines"
HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64))
"""The beginning of a TLS handshake: a record of 512 bytes, of which most never come."""

TIMEOUT_S: Final = 30.0
"""Seconds in which an engine has to be answered, on a machine that does much else."""

DRIP_S: Final = 0.2
WARM_S: Final = 1.0
"""Seconds of the attack after which the server holds what it needs for it."""


@attrs.frozen
class Siege:
    """How engines were served: their answers, errors, seconds by answer, and what the server held, with attacks."""

    errors: list[str]
    seconds: list[float]
    num_attacks: int
    before: Held
    during: Held
    after: Held


def certificates(folder: Path) -> None:
    """Make the certificates of an engine and of a stranger, each signed by itself, with openssl."""
    for name in ("engine", "stranger"):
        subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{folder}/{name}.key"]
        command = ["openssl", "req", "-x509", *key, "-out", f"{folder}/{name}.pem", "-days", "2", *subject]
        subprocess.run(command, check=True, capture_output=True)


def access_of(folder: Path) -> Access:
    server, client = tls_contexts(folder / "engine.pem", folder / "engine.key", folder / "engine.pem")
    return Access(key=KEY, server_tls=server, client_tls=client)


def serve(pipe: Connection, folder: Path) -> None:
    """Serve until the pipe ends, and say what this process holds."""
    leases = Leases(Driver())
    with closing(Listener("prefill", "127.0.0.1", [b"offer"], leases, system=Driver(access_of(folder)))) as listener:
        pipe.send(listener.source)
        while pipe.recv():
            pipe.send(Held.of())


async def drip(port: int, context: ssl.SSLContext) -> None:
    """Begin a handshake, and go on with it very slowly."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    with closing(writer):
        for byte in HELLO * 9:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(DRIP_S)


async def drop(port: int, context: ssl.SSLContext) -> None:
    """Begin a handshake, and hang up."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    with closing(writer.transport):
        writer.write(HELLO)
        await asyncio.sleep(0.01)
        writer.transport.abort()


async def garbage(port: int, context: ssl.SSLContext) -> None:
    """Send what is no TLS, until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with closing(writer):
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(1 << 12))
        await reader.read()


async def silence(port: int, context: ssl.SSLContext) -> None:
    """Connect, and say nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with closing(writer):
        await reader.read()


async def strange(port: int, context: ssl.SSLContext) -> None:
    """Shake hands with a certificate that the server does not know."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    with closing(writer):
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()


ATTACKS: Final[tuple[Callable[[int, ssl.SSLContext], Awaitable[None]], ...]] = (drip, drop, garbage, silence, strange)


async def besiege(
    source: Source, folder: Path, num_engines: int, num_attackers: int, duration_s: float
) -> tuple[list[str], list[float], int]:
    """Let engines ask while attackers attack. Return errors, the seconds of answers, and the number of attacks."""
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.load_cert_chain(folder / "stranger.pem", folder / "stranger.key")
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    stop = time.monotonic() + duration_s
    errors: list[str] = []
    seconds: list[float] = []
    num_attacks = 0

    async def attack(number: int) -> None:
        nonlocal num_attacks
        while True:
            num_attacks += 1
            with suppress(OSError, EOFError):
                await ATTACKS[number % len(ATTACKS)](source.port, stranger)
            # a client that is refused comes back, and does not wait
            await asyncio.sleep(0.005)

    async def engine(number: int) -> None:
        access = access_of(folder)
        while time.monotonic() < stop:
            began = time.monotonic()
            # another access shares no connection with those before it
            system = Driver(attrs.evolve(access) if number % 2 else access)
            try:
                await fetch(source, TIMEOUT_S, system=system)
            except KVPlanError as error:
                errors.append(f"{error}")
            else:
                seconds.append(time.monotonic() - began)
            await asyncio.sleep(0.01)

    attackers = [asyncio.ensure_future(attack(number)) for number in range(num_attackers)]
    await asyncio.gather(*(engine(number) for number in range(num_engines)))
    for attacker in attackers:
        attacker.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    return errors, seconds, num_attacks


def run(folder: Path, num_engines: int, num_attackers: int, duration_s: float) -> Siege:
    """Besiege a server of its own process for a time."""
    certificates(folder)
    context = multiprocessing.get_context("spawn")
    pipe, server_pipe = context.Pipe()
    process = context.Process(target=serve, args=(server_pipe, folder), daemon=True)
    process.start()
    source = pipe.recv()

    def held() -> Held:
        pipe.send(True)
        found: Held = pipe.recv()
        return found

    def besieged(seconds: float) -> tuple[list[str], list[float], int]:
        return Driver().run(besiege(source, folder, num_engines, num_attackers, seconds))

    before = held()
    warm_errors, *_ = besieged(WARM_S)
    during = held()
    errors, seconds, num_attacks = besieged(duration_s)
    # connections that are kept, and those of attackers that have gone, end by themselves
    until = time.monotonic() + 15
    while (after := held()).files > before.files and time.monotonic() < until:
        time.sleep(0.1)
    pipe.send(False)
    process.join(10)
    return Siege([*warm_errors, *errors], seconds, num_attacks, before, during, after)


def main() -> int:
    """Print how engines were served. Returns 1 if one was not, or the server holds more than before."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.besieged", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--attackers", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        siege = run(Path(folder), options.engines, options.attackers, options.seconds)
    ordered = sorted(siege.seconds)
    print(f"{len(ordered)} answers to {options.engines} engines, {len(siege.errors)} errors {siege.errors[:3]}")
    print(f"median {1000 * statistics.median(ordered):.0f} ms, slowest {1000 * ordered[-1]:.0f} ms")
    print(f"{siege.num_attacks} attacks of {options.attackers} attackers")
    for moment in ("before", "during", "after"):
        held: Held = getattr(siege, moment)
        print(f"{moment}: {held.mib:.1f} MiB, {held.files} descriptors")
    return int(bool(siege.errors) or siege.after.files > siege.before.files)


if __name__ == "__main__":
    sys.exit(main())
