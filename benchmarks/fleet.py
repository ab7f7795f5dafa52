"""What a peer costs a rank of decode, and a fleet of them: ``python -m benchmarks.fleet``.

Each prefill engine offers its workers, and the rank opens the offers, plans and connects. NIXL's part, the keys to
registered memory, is stood in for by as many bytes of metadata. Figures are processor time, and memory that is still
held, a peer: the time of the first half of the handshakes, and the memory of the others, since tracing memory takes
time. Offers are fetched apart, over loopback with a key, in the time of both ends: as they are, and as they would be
without the metadata of workers that the rank does not read. ``benchmarks.doors`` has what a message takes.

A second table has what a step of the rank takes with many reads under way, where nothing has happened to them since the
last step: their bytes still move, or have moved and the source has not yet said that the lease was valid. What NIXL
takes to look at a transfer is left out.
"""

from __future__ import annotations

import gc
import logging
import random
import statistics
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Final

from kvplan import Blocks, Model, Status, Transfer, Worker, decode, encode
from kvplan.plan import ReadSpec
from kvplan.protocol import Connections, Leases, Listener, PartialRead, Read, Reads, Source
from kvplan.protocol.listener import Offers, fetch
from kvplan.protocol.peer_engines import PeerEngines
from kvplan.protocol.system import Pending
from kvplan.testing import FakeExecutor, FakeNetwork
from kvplan_nixl.serving import Access, Driver

PEERS: Final = 32
FETCHES: Final = 40
STEPS: Final = 31
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


class Moving(FakeExecutor):
    """Moves bytes once it ``may_move`` them."""

    may_move = False
    num_started = 0

    def start(self, spec: ReadSpec, request: str) -> Transfer:
        """Return a transfer, and count it."""
        self.num_started += 1
        return super().start(spec, request)

    def poll(self, transfer: Transfer) -> Status:
        """Return how far the transfer is."""
        return super().poll(transfer) if self.may_move else transfer.status


class Unanswered:
    """In place of claims: no source has answered yet."""

    def ask(self, source: Source, lease: str) -> Pending[None]:
        """Return an answer that is outstanding."""
        return Pending()


def step_ms(reads: Reads) -> float:
    """Return the milliseconds of processor time of a step."""
    times = []
    for _ in range(STEPS):
        began = time.process_time()
        reads.poll()
        reads.late()
        times.append((time.process_time() - began) * 1e3)
    return statistics.median(times)


def print_steps() -> None:
    """Print a table: what a step takes, by the number of reads under way."""
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 1}
    model = Model.from_config(config, "m")
    (local,), (remote,) = model.engine("decode", num_blocks=9), model.engine("prefill", num_blocks=9)
    tables = {"attn": Blocks([1])}
    source = Source("prefill", "1", "prefill", 1)
    print("\n| reads under way | ms, bytes move | ms, bytes have moved |\n|---:|---:|---:|")
    for number in (100, 1000, 10_000):
        executor = Moving(FakeNetwork([local, remote]), local)
        claims: Any = Unanswered()
        system = Offering({"prefill": [offer_of(remote)]})
        logger = logging.getLogger("fleet")
        reads = Reads(local, executor, logger, connections=CONNECTIONS, claims=claims, system=system)
        names = [f"request {each}" for each in range(number)]
        for name in names:
            span = {"attn": (0, 16)}
            read = Read(request=name, source=source, lease=name, local=tables, remote=tables, tokens=span)
            reads.submit(PartialRead(name, read))
        while executor.num_started < number:
            reads.poll()
            time.sleep(0.001)
        moving_ms = step_ms(reads)
        executor.may_move = True
        reads.poll()
        executor.may_move = False
        print(f"| {number:,} | {moving_ms:.2f} | {step_ms(reads):.2f} |", flush=True)


def main() -> None:
    """Print both tables."""
    print_peers()
    print_steps()


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


if __name__ == "__main__":
    main()
