"""NIXL: the cost of kvplan_nixl beside calls by hand, and the cost of layouts, between two processes of one machine.

kvplan_nixl binds and starts a request. In turns with it the same descriptors go to NIXL's own calls, with ids from a
bind just before. Both times contain NIXL's post, which gives each descriptor to UCX: most of the time of 40,960.

The cost of events is measured without copies: a transfer is made and not posted, without a callback, with a callback
that stores the last event, and with a log of all events.

Two layouts hold the same bytes: in LBHNC each layer has a page of its own, in BLHNC a block has all layers in one
piece. There the whole request is timed, from its start until it is done.
"""

from __future__ import annotations

import io
import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import numpy as np
import pytest

from benchmarks.real_memory import PeerProcess, placed
from kvplan import Blocks, Model, TransferPlan, Worker, plan_reads
from kvplan_nixl import UCX, NixlExecutor, TransferEvent, settle
from kvplan_nixl.agent import Agent
from kvplan_nixl.executor import NixlTransfer

TIMEOUT_S = 60.0

Write = Callable[[str], None]


def worker(engine_id: str, layers: int, blocks: int) -> Worker:
    """A worker whose blocks of 4 tokens are 256 bytes in each layer."""
    keys = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": 16, "num_attention_heads": 4}
    (made,) = Model.from_config(keys).engine(engine_id, tokens_per_block=4, num_blocks=blocks)
    return made


@pytest.fixture
def write(capsys: pytest.CaptureFixture[str]) -> Write:
    """Prints a line although pytest captures output."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}")

    return show


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
    """A reader of another process, whose worker is ``source``."""
    there, _ = placed(local)
    with PeerProcess(source, UCX) as peer, NixlExecutor(there) as executor:
        plan = plan_reads(there, [executor.connect(peer.ask("envelope"))])
        executor.prepare(plan)
        yield Reader(executor, plan)


def scattered(pool: int, count: int) -> tuple[Blocks, Blocks]:
    """Random blocks of both sides."""
    rng = np.random.default_rng(1)
    ours, theirs = (Blocks(rng.permutation(pool)[:count]) for _ in range(2))
    return ours, theirs


@pytest.mark.parametrize(("layers", "blocks", "rounds"), [(2, 32, 1000), (80, 512, 10)], ids=["64", "40960"])
def test_overhead(layers: int, blocks: int, rounds: int, write: Write) -> None:
    """Bind, make and post by kvplan_nixl, and make and post by hand, in turns."""
    pool, tokens = 2 * blocks, 4 * blocks
    source, local = (worker(name, layers, pool) for name in ("prefill", "decode"))
    near, far = scattered(pool, blocks)
    with reading(source, local) as reader:
        (spec,) = reader.plan.bind(local={"attn": near}, remote={"attn": far}, tokens=(0, tokens))
        assert spec.local_ids.size == spec.num_descriptors == layers * blocks
        rows = reader.executor._peers["prefill", 0].rows[spec.remote_table]
        nixl = reader.executor._agent._agent
        message = b'["decode", 0, "request"]'
        bound, ours, by_hand = [], [], []
        for i in range(rounds + rounds // 10):
            began = time.perf_counter()
            (spec,) = reader.plan.bind(local={"attn": near}, remote={"attn": far}, tokens=(0, tokens))
            took_bind = time.perf_counter() - began
            transfer = reader.executor.start(spec, "request")
            took = time.perf_counter() - began
            reader.finish(transfer)
            (spec,) = reader.plan.bind(local={"attn": near}, remote={"attn": far}, tokens=(0, tokens))
            began = time.perf_counter()
            handle = nixl.make_prepped_xfer(
                "READ", rows.local.nixl, spec.local_ids, rows.remote.nixl, spec.remote_ids, message
            )
            state = nixl.transfer(handle)
            took_by_hand = time.perf_counter() - began
            while state == "PROC":
                state = nixl.check_xfer_state(handle)
            handle.release()
            if i >= rounds // 10:
                bound.append(took_bind)
                ours.append(took)
                by_hand.append(took_by_hand)
    mine, bind, theirs = (statistics.median(times) * 1e6 for times in (ours, bound, by_hand))
    write(
        f"{layers * blocks} descriptors: {mine:.0f} us, of which bind {bind:.0f} us, by hand {theirs:.0f} us, "
        f"{mine - theirs:+.0f} us, {100 * (mine - theirs) / theirs:+.1f}% (medians of {rounds} in turns)"
    )


@pytest.mark.parametrize(("layers", "blocks", "rounds"), [(2, 32, 2000), (80, 512, 200)], ids=["64", "40960"])
def test_events(layers: int, blocks: int, rounds: int, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a transfer that moves nothing, with and without a callback or a log, in turns."""
    monkeypatch.setattr(Agent, "post", lambda agent, handle: True)
    there, here = (placed(worker(name, layers, 2 * blocks))[0] for name in ("prefill", "decode"))
    plan = plan_reads(here, [there])
    near, far = scattered(2 * blocks, blocks)
    (spec,) = plan.bind(local={"attn": near}, remote={"attn": far}, tokens=(0, 4 * blocks))
    logger, lines, order = logging.getLogger("kvplan_nixl"), logging.StreamHandler(io.StringIO()), random.Random(1)
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [lines])
    took: dict[str, list[float]] = {"neither": [], "a callback": [], "the log": []}
    with NixlExecutor(here, progress_thread=False) as executor:
        executor.attach(there)
        executor.prepare(plan)
        for _ in range(rounds):
            for name in order.sample([*took], len(took)):
                executor._on_event = deque[TransferEvent](maxlen=1).append if name == "a callback" else None
                logger.setLevel(logging.DEBUG if name == "the log" else logging.WARNING)
                began = time.perf_counter()
                transfer = executor.start(spec, "request")
                took[name].append(time.perf_counter() - began)
                executor.release(transfer)
    logger.setLevel(logging.NOTSET)
    neither, callback, log = (statistics.median(times) * 1e6 for times in took.values())
    write(
        f"{layers * blocks} descriptors: start without posting {neither:.1f} us, {callback - neither:+.1f} us with a "
        f"callback, {log - neither:+.1f} us with a log of all events (medians of {rounds} in turns)"
    )


@pytest.mark.parametrize(
    ("model", "tp"), [("llama-3.1-8b", 8), ("qwen2.5-1.5b", 2), ("qwen2.5-1.5b", 1), ("qwen3-0.6b", 1)]
)
def test_layers_together(model: str, tp: int, write: Write) -> None:
    """The same request with a page for each layer and with all layers of a block in one piece."""
    made, blocks, rounds = Model.shipped(model), 64, 10
    took: dict[str, float] = {}
    counts: dict[str, tuple[int, int]] = {}
    for layout in ("LBHNC", "BLHNC"):
        source, local = (
            made.engine(name, tp=tp, layout=layout, num_blocks=2 * blocks)[0] for name in ("prefill", "decode")
        )
        near, far = scattered(2 * blocks, blocks)
        with reading(source, local) as reader:
            times = []
            for i in range(rounds + 2):
                began = time.perf_counter()
                transfer = reader.transfer(near, far, 16 * blocks)
                reader.finish(transfer)
                if i >= 2:
                    times.append(time.perf_counter() - began)
            took[layout] = statistics.median(times)
            counts[layout] = transfer.spec.num_descriptors, transfer.spec.num_bytes
    assert counts["LBHNC"][1] == counts["BLHNC"][1]
    apart, together = took["LBHNC"], took["BLHNC"]
    write(
        f"{model} tp={tp}, {counts['LBHNC'][1] / 1e6:.1f} MB: layers apart {counts['LBHNC'][0]} descriptors "
        f"{apart * 1e3:.2f} ms, together {counts['BLHNC'][0]} descriptors {together * 1e3:.2f} ms, "
        f"{apart / together:.2f}x (medians of {rounds})"
    )
