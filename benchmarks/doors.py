"""The cost of a message between engines, in microseconds: ``python -m benchmarks.doors``.

A reader and a server are two processes on one host. Figures are the processor time of both, which does not count what
others use of the machine: the median of several rounds, in turns.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any, Final

from kvplan.describe import Blocks
from kvplan.protocol import Handoff, Leases, Listener, Source
from kvplan.protocol.claims import ClaimMessage, send_claims
from kvplan.protocol.listener import fetch
from kvplan_nixl.serving import Access, Driver

KEY: Final = b"a secret of all engines"
ROUNDS: Final = 11
MESSAGES: Final = 50
OFFERS: Final = [bytes(130_000)] * 16
"""Envelopes of 16 workers with 80 layers."""


def serve(pipe: Connection, access: Access) -> None:
    """Serve offers and leases, and tell the processor time of that, until the pipe ends."""
    leases = Leases(Driver(), lease_s=3600)
    with closing(Listener("prefill", "127.0.0.1", OFFERS, leases, system=Driver(access))) as listener:
        pipe.send((listener.source, [leases.grant(f"request {number}") for number in range(100)]))
        while pipe.recv():
            pipe.send(time.process_time())


def actions(source: Source, leases: list[str], access: Access) -> Mapping[str, Callable[[], Any]]:
    """What a reader does, by name."""
    claims = tuple((lease, "reader") for lease in leases)
    handoff = Handoff(source, leases[0], 8192, "8f2c", {"attn": Blocks(range(512))})
    params = handoff.params(access.key)
    driver = Driver(access)
    one, many = ClaimMessage(source.start, claims[:1]), ClaimMessage(source.start, claims)
    return {
        "claim of 1 lease": lambda: driver.run(send_claims(source, one, system=driver)),
        "claims of 100 leases": lambda: driver.run(send_claims(source, many, system=driver)),
        "offers of 16 workers, 2.8 MB": lambda: driver.run(fetch(source, 60, system=driver)),
        "handoff of 512 blocks, written": lambda: handoff.params(access.key),
        "handoff of 512 blocks, read": lambda: Handoff.of_params(params, access.key),
    }


def main() -> None:
    """Print a table of what each message costs."""
    access = Access(key=KEY)
    pipe, server_pipe = multiprocessing.get_context("spawn").Pipe()
    multiprocessing.get_context("spawn").Process(target=serve, args=(server_pipe, access), daemon=True).start()
    source, leases = pipe.recv()
    by_name = actions(source, leases, access)
    times: dict[str, list[float]] = {name: [] for name in by_name}

    def spent() -> float:
        pipe.send(True)
        return time.process_time() + float(pipe.recv())

    for _ in range(ROUNDS):
        for name, action in by_name.items():
            began = spent()
            for _ in range(MESSAGES):
                action()
            times[name].append(1e6 * (spent() - began) / MESSAGES)
    print("| message | microseconds |\n|---|---:|")
    for name, microseconds in times.items():
        print(f"| {name} | {statistics.median(microseconds):.0f} |")
    pipe.send(False)


if __name__ == "__main__":
    main()
