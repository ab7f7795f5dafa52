"""What a peer costs a rank of decode, and what each message costs both sides: ``python -m benchmarks.fleet``.

Each prefill engine offers its workers, and the rank opens the offers, plans and connects. NIXL's part, the keys to
registered memory, is stood in for by as many bytes of metadata. Figures are processor time, and memory that is still
held, a peer: the time of the first half of the handshakes, and the memory of the others, since tracing memory takes
time. Offers are fetched apart, over loopback with a key, in the time of both ends: as they are, and as they would be
without the metadata of workers that the rank does not read.

A second table has the processor time of each message, in microseconds of a reader and of a server in a process of its
own: the median of several rounds, in turns.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any, Final

from kvplan import Model, Worker, decode, encode
from kvplan.describe import Blocks
from kvplan.protocol import Connections, Handoff, Leases, Listener, Source
from kvplan.protocol.claims import ClaimMessage, send_claims
from kvplan.protocol.listener import Offers, fetch
from kvplan.protocol.peer_engines import PeerEngines
from kvplan_nixl.serving import Access, Driver

PEERS: Final = 32
FETCHES: Final = 40
ROUNDS: Final = 11
MESSAGES: Final = 50
ACCESS: Final = Access(key=b"a secret of all engines")
METADATA_BYTES_PER_REGION: Final = 1600
"""130 kB of NIXL's metadata for the 80 regions of a worker, over InfiniBand."""

MODELS: Final = (("llama-3.1-70b", 8, 8), ("llama-3.1-70b", 4, 8), ("deepseek-v3", 8, 8), ("nemotron-h-8b", 2, 4))
"""Models, and the TP of decode and of prefill."""


class Nothing:
    """An executor that prepares nothing."""

    def prepare(self, plan: object) -> None:
        """Prepare nothing."""


def offer_of(worker: Worker) -> bytes:
    """Return the offer of a worker, with room for NIXL's metadata behind its length."""
    described = encode(worker)
    metadata = random.Random(worker.rank).randbytes(METADATA_BYTES_PER_REGION * len(worker.regions))
    return len(described).to_bytes(8, "little") + described + metadata


def open_offer(offer: bytes) -> Worker:
    """Return the worker in an offer."""
    return decode(offer[8 : 8 + int.from_bytes(offer[:8], "little")])


CONNECTIONS: Final = Connections(open_offer=open_offer, connect=lambda offer: None, disconnect=lambda worker: None)


class Offering(Driver):
    """This machine, where each host is an engine of its name, which offers what ``answers`` has for it."""

    def __init__(self, answers: Mapping[str, Sequence[bytes]]) -> None:
        super().__init__()
        self.answers = answers

    async def exchange(self, peer: str, address: str, path: str, timeout_s: float, sent: bytes | None = None) -> bytes:
        host = address.partition(":")[0]
        return Offers(host, "1", tuple(self.answers[host])).encode()


def shake_hands(peers: PeerEngines, peer_name: str) -> float:
    """Shake hands with an engine, and return the milliseconds of processor time."""
    began = time.process_time()
    peer = peers.use(Source(peer_name, "1", peer_name, 1))
    while peer.plan is None:
        assert peer.error is None, peer.error
        list(peers.poll())
        time.sleep(0.001)
    return (time.process_time() - began) * 1e3


def fetch_ms(offers: Sequence[bytes]) -> float:
    """Fetch offers from a listener, and return the milliseconds of processor time of both."""
    driver = Driver(ACCESS)
    with closing(Listener("prefill", "127.0.0.1", offers, Leases(driver), system=driver)) as listener:
        began = time.process_time()
        for _ in range(FETCHES):
            driver.run(fetch(listener.source, 60.0, system=driver))
        return (time.process_time() - began) * 1e3 / FETCHES


def print_peers() -> None:
    """Print a table: bytes, processor time and memory of a peer."""
    print(
        "| model, TP of decode and prefill | offers, kB: all, needed | fetched, ms: all, needed | ms | held, kB "
        "| 512 peers: s, MB |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for model_name, decode_tp, prefill_tp in MODELS:
        model = Model.shipped(model_name)
        local = model.engine("decode", tp=decode_tp, num_blocks=8192)[0]
        answers: dict[str, list[bytes]] = {}
        for number in range(PEERS):
            peer_name = f"prefill-{number}"
            workers = model.engine(peer_name, tp=prefill_tp, num_blocks=8192)
            answers[peer_name] = [offer_of(worker) for worker in workers]
        executor: Any = Nothing()
        peers = PeerEngines(local, executor, logging.getLogger("fleet"), CONNECTIONS, None, Offering(answers))
        timed, traced = [*answers][: PEERS // 2], [*answers][PEERS // 2 :]
        ms = statistics.median([shake_hands(peers, peer_name) for peer_name in timed])
        gc.collect()
        tracemalloc.start()
        for peer_name in traced:
            shake_hands(peers, peer_name)
        gc.collect()
        held_bytes = tracemalloc.get_traced_memory()[0] / len(traced)
        tracemalloc.stop()
        offers = answers[traced[0]]
        plan = peers.use(Source(traced[0], "1", traced[0], 1)).plan
        assert plan is not None
        # a description says which metadata is needed
        needed = [offer if offer in plan.offers.values() else encode(open_offer(offer)) for offer in offers]
        kb = ", ".join(f"{sum(map(len, sent)) / 1e3:.0f}" for sent in (offers, needed))
        fetched_ms = ", ".join(f"{fetch_ms(sent):.1f}" for sent in (offers, needed))
        of_fleet = f"{ms * 0.512:.0f}, {held_bytes * 512 / 1e6:.0f}"
        engines = f"{model_name}, {decode_tp}, {prefill_tp}"
        print(f"| {engines} | {kb} | {fetched_ms} | {ms:.0f} | {held_bytes / 1e3:.0f} | {of_fleet} |")


def serve(pipe: Connection) -> None:
    """Serve leases, and offers as long as those of 16 workers with 80 layers, and tell the processor time of that."""
    leases = Leases(Driver(), lease_s=3600)
    with closing(Listener("prefill", "127.0.0.1", [bytes(130_000)] * 16, leases, system=Driver(ACCESS))) as listener:
        pipe.send((listener.source, [leases.grant(f"request {number}") for number in range(100)]))
        while pipe.recv():
            pipe.send(time.process_time())


def actions(source: Source, leases: list[str]) -> Mapping[str, Callable[[], Any]]:
    """What a reader does, by name."""
    claims = tuple((lease, "reader") for lease in leases)
    handoff = Handoff(source, leases[0], 8192, "8f2c", {"attn": Blocks(range(512))})
    params = handoff.params(ACCESS.key)
    driver = Driver(ACCESS)
    one, many = ClaimMessage(source.start, claims[:1]), ClaimMessage(source.start, claims)
    return {
        "claim of 1 lease": lambda: driver.run(send_claims(source, one, system=driver)),
        "claims of 100 leases": lambda: driver.run(send_claims(source, many, system=driver)),
        "offers of 16 workers, 2.8 MB": lambda: driver.run(fetch(source, 60, system=driver)),
        "handoff of 512 blocks, written": lambda: handoff.params(ACCESS.key),
        "handoff of 512 blocks, read": lambda: Handoff.of_params(params, ACCESS.key),
    }


def print_messages() -> None:
    """Print a table of what each message costs."""
    spawn = multiprocessing.get_context("spawn")
    pipe, server_pipe = spawn.Pipe()
    spawn.Process(target=serve, args=(server_pipe,), daemon=True).start()
    by_name = actions(*pipe.recv())
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
    print("\n| message | microseconds |\n|---|---:|")
    for name, microseconds in times.items():
        print(f"| {name} | {statistics.median(microseconds):.0f} |")
    pipe.send(False)


if __name__ == "__main__":
    print_peers()
    print_messages()
