"""NIXL: what kvplan_nixl costs beside calls by hand, and what layouts cost, between two processes of one machine.

A request is bound and begun by kvplan_nixl, and, in turns with it, begun with NIXL's own calls on the same descriptors
with all ids at hand, made in the same way just before. UCX copies the bytes on one machine before it returns, so that
both contain the same copies; at 40,960 descriptors of 256 bytes those are what takes the time.

What events cost is taken without copies: a transfer is made and not posted, with nobody listening, with a listener that
keeps the last event, and with a log of their lines.

The layouts are two that hold the same bytes: in LBHNC each layer has a page of its own, in BLHNC a block has all layers
in one piece. The whole request is timed, from its begin until it is done.
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
from tests.nixl.peers import PeerProcess
from tests.nixl.worlds import placed

from kvplan import Blocks, Model, TransferPlan, Worker, plan_reads
from kvplan_nixl import UCX, Agent, NixlExecutor, TransferEvent, settle
from kvplan_nixl.executor import NixlTransfer
from tests.small import engine

TIMEOUT_S = 60.0

Write = Callable[[str], None]


@pytest.fixture
def write(capsys: pytest.CaptureFixture[str]) -> Write:
    """Prints a line, also where pytest keeps output to itself."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}")

    return show


@attrs.frozen
class Reader:
    """A worker that reads from another process, prepared."""

    executor: NixlExecutor
    plan: TransferPlan

    def transfer(self, local: Blocks, remote: Blocks, tokens: int) -> NixlTransfer:
        """A request, bound and begun."""
        (spec,) = self.plan.bind(local={"attn": local}, remote={"attn": remote}, tokens=(0, tokens))
        return self.executor.start(spec, "request")

    def finish(self, transfer: NixlTransfer) -> None:
        """Wait until it is done, and give it back."""
        assert settle(self.executor, [transfer], TIMEOUT_S)
        assert transfer.error is None
        self.executor.release(transfer)


@contextmanager
def reading(source: Worker, local: Worker) -> Iterator[Reader]:
    """A reader of a process that has ``source``."""
    there, _ = placed(local)
    with PeerProcess(source, UCX) as peer, NixlExecutor(there) as executor:
        plan = plan_reads(there, [executor.connect(peer.ask("envelope"))])
        executor.prepare(plan)
        yield Reader(executor, plan)


def scattered(pool: int, count: int) -> tuple[Blocks, Blocks]:
    """Blocks of both sides, no two neighbours in order."""
    rng = np.random.default_rng(1)
    ours, theirs = (Blocks(rng.permutation(pool)[:count]) for _ in range(2))
    return ours, theirs


@pytest.mark.parametrize(("layers", "blocks", "rounds"), [(2, 32, 1000), (80, 512, 10)], ids=["64", "40960"])
def test_overhead(layers: int, blocks: int, rounds: int, write: Write) -> None:
    """Bind, make and post by kvplan_nixl, and make and post by hand, in turns."""
    pool, tokens = 2 * blocks, 4 * blocks
    (source,), (local,) = (engine(name, layers=layers, blocks=pool) for name in ("prefill", "decode"))
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
                "READ", rows.local.handle, spec.local_ids, rows.remote.handle, spec.remote_ids, message
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
    """Start a transfer that moves nothing with and without somebody who listens, in turns."""
    monkeypatch.setattr(Agent, "post", lambda agent, handle: True)
    (local,) = engine("decode", layers=layers, blocks=2 * blocks)
    there, here = (placed(attrs.evolve(local, engine_id=name))[0] for name in ("prefill", "decode"))
    plan = plan_reads(here, [there])
    near, far = scattered(2 * blocks, blocks)
    (spec,) = plan.bind(local={"attn": near}, remote={"attn": far}, tokens=(0, 4 * blocks))
    logger, lines, order = logging.getLogger("kvplan_nixl"), logging.StreamHandler(io.StringIO()), random.Random(1)
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [lines])
    took: dict[str, list[float]] = {"nobody": [], "a listener": [], "the log": []}
    with NixlExecutor(here, progress_thread=False) as executor:
        executor.attach(there)
        executor.prepare(plan)
        for _ in range(rounds):
            for name in order.sample([*took], len(took)):
                executor._on_event = deque[TransferEvent](maxlen=1).append if name == "a listener" else None
                logger.setLevel(logging.DEBUG if name == "the log" else logging.WARNING)
                began = time.perf_counter()
                transfer = executor.start(spec, "request")
                took[name].append(time.perf_counter() - began)
                executor.release(transfer)
    logger.setLevel(logging.NOTSET)
    nobody, listener, log = (statistics.median(times) * 1e6 for times in took.values())
    write(
        f"{layers * blocks} descriptors: start without posting {nobody:.1f} us, {listener - nobody:+.1f} us with a "
        f"listener, {log - nobody:+.1f} us with a log of all events (medians of {rounds} in turns)"
    )


@pytest.mark.parametrize(
    ("model", "tp"), [("llama-3.1-8b", 8), ("qwen2.5-1.5b", 2), ("qwen2.5-1.5b", 1), ("qwen3-0.6b", 1)]
)
def test_layers_together(model: str, tp: int, write: Write) -> None:
    """The same request with a page for each layer, and with all layers of a block in one piece."""
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
