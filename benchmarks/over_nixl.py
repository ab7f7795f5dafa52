"""What kvplan_nixl costs beside calls by hand: ``python -m benchmarks.over_nixl``.

All is between two processes of one machine.

kvplan_nixl binds and starts a request. In turns with it the same descriptors go to NIXL's own calls, with ids from a
bind just before. Both times contain NIXL's post, which gives each descriptor to UCX: most of the time of 40,960.

A connector's reads hand over many descriptors in several steps. An engine whose steps take 10 ms reads a request of
40,960 descriptors, so, and handed over at once.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import attrs
import numpy as np

from benchmarks.real_memory import PeerProcess, placed
from kvplan import Blocks, Model, ReadSpec, TransferPlan, Worker, plan_reads
from kvplan.plan.bind import MAX_IDS
from kvplan.protocol import Claims, Connections, PartialRead, Read, Reads, Source
from kvplan.protocol import read as read_module
from kvplan.protocol.listener import Offers
from kvplan.protocol.read import MAX_TRANSFER_IDS
from kvplan.protocol.system import Pending
from kvplan_nixl import UCX, NixlExecutor, settle
from kvplan_nixl.envelope import Envelope
from kvplan_nixl.executor import NixlTransfer
from kvplan_nixl.serving import Driver

LOGGER = logging.getLogger("benchmark")

TIMEOUT_S = 60.0


def worker(engine_id: str, layers: int, blocks: int) -> Worker:
    """Return a worker whose blocks of 4 tokens are 256 bytes in each layer."""
    keys = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": 16, "num_attention_heads": 4}
    (only_worker,) = Model.from_config(keys).engine(engine_id, tokens_per_block=4, num_blocks=blocks)
    return only_worker


@attrs.frozen
class Reader:
    """A worker that reads from another process, with a prepared plan."""

    executor: NixlExecutor
    plan: TransferPlan

    def transfer(self, local: Blocks, remote: Blocks, tokens: int) -> NixlTransfer:
        """Bind and start a request."""
        (spec,) = self.plan.bind(local={"attn": local}, remote={"attn": remote}, tokens=(0, tokens))
        return self.executor.start(spec, "request")

    def finish(self, transfer: NixlTransfer) -> None:
        """Wait until the transfer is done, and release it."""
        assert settle(self.executor, [transfer], TIMEOUT_S)
        assert transfer.error is None
        self.executor.release(transfer)


@contextmanager
def reading(source: Worker, local: Worker) -> Iterator[Reader]:
    """Yield a reader of another process, whose worker is ``source``."""
    placed_local, _ = placed(local)
    with PeerProcess(source, UCX) as peer, NixlExecutor(placed_local) as executor:
        plan = plan_reads(placed_local, [executor.connect(peer.ask("envelope"))])
        executor.prepare(plan)
        yield Reader(executor, plan)


def scattered(pool: int, count: int) -> tuple[Blocks, Blocks]:
    """Return random blocks of both sides."""
    rng = np.random.default_rng(1)
    local = Blocks(rng.permutation(pool)[:count])
    return local, Blocks(rng.permutation(pool)[:count])


def median_us(seconds: list[float]) -> float:
    """Return the median of some times, in microseconds."""
    return statistics.median(seconds) * 1e6


def overhead(layers: int, blocks: int, rounds: int) -> None:
    """Bind, make and post by kvplan_nixl, and make and post by hand, in turns."""
    pool = 2 * blocks
    tokens = 4 * blocks
    local_blocks, remote_blocks = scattered(pool, blocks)
    with reading(worker("prefill", layers, pool), worker("decode", layers, pool)) as reader:

        def bind() -> ReadSpec:
            local = {"attn": local_blocks}
            (spec,) = reader.plan.bind(local=local, remote={"attn": remote_blocks}, tokens=(0, tokens))
            return spec

        spec = bind()
        assert spec.local_ids.size == spec.num_descriptors == layers * blocks
        rows = reader.executor._peers["prefill", 0].rows[spec.remote_table]
        nixl = reader.executor._agent._agent
        message = b'["decode", 0, "request"]'
        bind_s = list[float]()
        kvplan_s = list[float]()
        by_hand_s = list[float]()
        for i in range(rounds + rounds // 10):
            began = time.perf_counter()
            spec = bind()
            bound = time.perf_counter()
            transfer = reader.executor.start(spec, "request")
            started = time.perf_counter()
            reader.finish(transfer)
            spec = bind()
            began_by_hand = time.perf_counter()
            handle = nixl.make_prepped_xfer(
                "READ", rows.local.nixl, spec.local_ids, rows.remote.nixl, spec.remote_ids, message
            )
            state = nixl.transfer(handle)
            posted_by_hand = time.perf_counter()
            while state == "PROC":
                state = nixl.check_xfer_state(handle)
            handle.release()
            # the first tenth warms up
            if i >= rounds // 10:
                bind_s.append(bound - began)
                kvplan_s.append(started - began)
                by_hand_s.append(posted_by_hand - began_by_hand)
    kvplan_us = median_us(kvplan_s)
    by_hand_us = median_us(by_hand_s)
    more_us = kvplan_us - by_hand_us
    print(
        f"{layers * blocks} descriptors: {kvplan_us:.0f} us, of which bind {median_us(bind_s):.0f} us, "
        f"by hand {by_hand_us:.0f} us, {more_us:+.0f} us, {100 * more_us / by_hand_us:+.1f}% "
        f"(medians of {rounds} in turns)"
    )


class Answers:
    """Stands in for claims: every lease is valid."""

    def ask(self, source: Source, lease: str) -> Pending[None]:
        """Answer at once."""
        answer = Pending[None]()
        answer.resolve(None)
        return answer


class Offering(Driver):
    """This machine, where every address offers the same."""

    def __init__(self, offers: Offers) -> None:
        super().__init__()
        self.offers = offers

    async def exchange(self, *_: object) -> bytes:
        return self.offers.encode()


def in_steps() -> None:
    """The longest time in a step of the engine, and the time until the request is read."""
    layers, blocks, rounds = 80, 512, 8
    local, _ = placed(worker("decode", layers, 2 * blocks))
    source = Source("prefill", "1", "127.0.0.1", 1)
    local_blocks, remote_blocks = scattered(2 * blocks, blocks)
    longest_ms: dict[int, list[float]] = {MAX_TRANSFER_IDS: [], MAX_IDS: []}
    total_ms: dict[int, list[float]] = {MAX_TRANSFER_IDS: [], MAX_IDS: []}
    with PeerProcess(worker("prefill", layers, 2 * blocks), UCX) as peer, NixlExecutor(local) as executor:
        offers = Offers("prefill", "1", (peer.ask("envelope"),))
        connections = Connections(
            open_offer=lambda envelope: Envelope.unpack(envelope).worker,
            connect=executor.connect,
            disconnect=executor.disconnect,
        )
        claims = cast(Claims, Answers())
        reads = Reads(local, executor, LOGGER, connections=connections, claims=claims, system=Offering(offers))
        for number in range(2 * rounds + 2):
            limit = (MAX_TRANSFER_IDS, MAX_IDS)[number % 2]
            read_module.MAX_TRANSFER_IDS = limit  # type: ignore[misc]
            request = Read(
                request=f"{number}",
                source=source,
                lease="1",
                local={"attn": local_blocks},
                remote={"attn": remote_blocks},
                tokens={"attn": (0, 4 * blocks)},
            )
            began_at = time.perf_counter()
            steps = [partial(reads.submit, PartialRead(request.request, request))]
            results: list[Any] = []
            times_ms = []
            while not results:
                step_at = time.perf_counter()
                results = (steps.pop() if steps else reads.poll)() or []
                times_ms.append(1000 * (time.perf_counter() - step_at))
                time.sleep(0.01)
            assert results[0].error is None
            # the first ones shake hands, and warm up
            if number >= 2:
                longest_ms[limit].append(max(times_ms))
                total_ms[limit].append(1000 * (time.perf_counter() - began_at))
    for limit, label in ((MAX_TRANSFER_IDS, "in steps"), (MAX_IDS, "at once")):
        longest = statistics.median(longest_ms[limit])
        total = statistics.median(total_ms[limit])
        print(f"{layers * blocks} descriptors {label}: longest step {longest:.0f} ms, request {total:.0f} ms")


def main() -> None:
    for layers, blocks, rounds in ((2, 32, 1000), (80, 512, 10)):
        overhead(layers, blocks, rounds)
    in_steps()


if __name__ == "__main__":
    main()
