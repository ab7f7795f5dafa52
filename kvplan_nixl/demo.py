"""The demo, and a connector to copy from: a prefill process and a decode process on this machine.

Prefill has 2 workers whose caches are ``[block, kv, head, token, dim]`` with blocks of 16 tokens. Decode has 3 workers
whose caches are ``[kv, block, head, token, dim]`` with blocks of 24. Each process describes its torch tensors
(:func:`make_worker`), registers them, exchanges envelopes over a pipe (:func:`handshake`), and plans once.

For each request prefill sends its block ids. Decode binds them with its own, reads (:func:`read`), and checks every
value. Prefill reuses its blocks when it has the notices of all its readers (:func:`wait_for_notices`).
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import attrs
import torch

from kvplan import Blocks, Group, ReadSpec, Worker, plan_mesh, region_of, view_of
from kvplan.executor import PendingRequests
from kvplan_nixl.executor import NixlExecutor, settle

LAYERS, HEADS, DIM = 4, 12, 128
REQUESTS: Final = (1000, 17, 600)
"""The number of tokens of each request."""

NOISE: Final = torch.Generator().manual_seed(1)
RANDOM_BITS: Final = torch.randint(
    1 << 14, (max(REQUESTS), 2, HEADS, DIM), dtype=torch.int16, generator=NOISE
)
"""The same in both processes. As bfloat16 all of them are finite numbers."""

TIMEOUT_S: Final = 120.0


@attrs.frozen
class Shape:
    """An engine's cache. ``pattern`` names its dimensions in order, as :func:`kvplan.view_of` takes them."""

    engine_id: str
    tp: int
    tokens_per_block: int
    num_blocks: int
    pattern: str

    def heads(self, rank: int) -> range:
        """The KV heads of a worker."""
        return range(rank * HEADS // self.tp, (rank + 1) * HEADS // self.tp)


PREFILL: Final = Shape("prefill", 2, 16, 512, "block kv head token dim")
DECODE: Final = Shape("decode", 3, 24, 300, "kv block head token dim")


def make_worker(shape: Shape, rank: int) -> tuple[Worker, list[torch.Tensor]]:
    """A worker and its caches, one tensor for each layer."""
    heads = shape.heads(rank)
    sizes = {
        "block": shape.num_blocks,
        "token": shape.tokens_per_block,
        "kv": 2,
        "head": len(heads),
        "dim": DIM,
    }
    caches = [
        torch.zeros([sizes[name] for name in shape.pattern.split()], dtype=torch.bfloat16)
        for _ in range(LAYERS)
    ]
    regions = [region_of(cache, f"kv.{i}") for i, cache in enumerate(caches)]
    parts = {"head": (heads.start, heads.stop, HEADS)}
    views = [
        view_of(
            cache, shape.pattern, name=f"layers.{i}.attn", group="attn", region=region, parts=parts
        )
        for i, (cache, region) in enumerate(zip(caches, regions, strict=True))
    ]
    return Worker(
        shape.engine_id, rank, regions, [Group("attn", shape.tokens_per_block)], views
    ), caches


def handshake(channel: Connection, executors: list[NixlExecutor]) -> list[Worker]:
    """Exchange envelopes with the other process, connect to all its workers, and return them."""
    channel.send_bytes(json.dumps(len(executors)).encode())
    for executor in executors:
        channel.send_bytes(executor.envelope())
    workers = []
    for _ in range(json.loads(receive(channel))):
        envelope = receive(channel)
        connected = [executor.connect(envelope) for executor in executors]
        workers.append(connected[0])
    return workers


def receive(channel: Connection) -> bytes:
    """The next message of the other process. Raises TimeoutError."""
    if not channel.poll(TIMEOUT_S):
        raise TimeoutError("no message from the other process")
    return channel.recv_bytes()


def values(request: int, layer: int, tokens: int, heads: range) -> torch.Tensor:
    """What prefill computes, ``[token, kv, head, dim]``: different values for each request and layer."""
    bits = (
        RANDOM_BITS[:tokens, :, heads.start : heads.stop] + 257 * (request * LAYERS + layer)
        & 0x3FFF
    )
    return bits.view(torch.bfloat16)


def prefill(channel: Connection) -> None:
    """The prefill process: fill blocks, send their ids to decode, wait for its notices, and reuse the blocks."""
    quiet()
    made = [make_worker(PREFILL, rank) for rank in range(PREFILL.tp)]
    executors = [NixlExecutor(worker) for worker, _ in made]
    readers = handshake(channel, executors)
    completions = plan_mesh(readers, [worker for worker, _ in made]).completions
    waiting = [(executor, PendingRequests()) for executor in executors]
    for request, tokens in enumerate(REQUESTS):
        ids = torch.randperm(PREFILL.num_blocks)[: math.ceil(tokens / PREFILL.tokens_per_block)]
        for rank, (_, caches) in enumerate(made):
            for layer, cache in enumerate(caches):
                fill(cache, ids, values(request, layer, tokens, PREFILL.heads(rank)))
        message: dict[str, Any] = {
            "request": f"request {request}",
            "tokens": tokens,
            "ids": ids.tolist(),
        }
        for executor, pending in waiting:
            pending.add(message["request"], completions[executor.worker.key].awaits)
        channel.send_bytes(json.dumps(message).encode())
        for executor, pending in waiting:
            wait_for_notices(executor, pending)
    for executor in executors:
        executor.close()


def quiet() -> None:
    """Let NIXL log warnings only, and torch use one thread, because both processes may share two cores."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    torch.set_num_threads(1)


def fill(cache: torch.Tensor, ids: torch.Tensor, computed: torch.Tensor) -> None:
    """Write the values of a request's tokens into blocks of a prefill cache."""
    padded = torch.zeros(
        len(ids) * PREFILL.tokens_per_block, *computed.shape[1:], dtype=computed.dtype
    )
    padded[: len(computed)] = computed
    cache[ids] = padded.unflatten(0, (len(ids), -1)).permute(0, 2, 3, 1, 4)


def wait_for_notices(executor: NixlExecutor, pending: PendingRequests) -> None:
    """Wait until all readers of the pending request have notified. Raises TimeoutError."""
    deadline = time.monotonic() + TIMEOUT_S
    while not pending.receive(executor.notices()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{executor!r} waits for readers of {pending!r}")
        time.sleep(1e-4)


def decode(channel: Connection) -> bool:
    """The decode process: read and check each request. Return whether all values were right."""
    made = [make_worker(DECODE, rank) for rank in range(DECODE.tp)]
    executors = [NixlExecutor(worker) for worker, _ in made]
    plans = plan_mesh([worker for worker, _ in made], handshake(channel, executors)).plans
    for executor, plan in zip(executors, plans, strict=True):
        executor.prepare(plan)
    print(f"{PREFILL.tp} prefill and {DECODE.tp} decode workers are connected")
    all_right = True
    for request, tokens in enumerate(REQUESTS):
        message = json.loads(receive(channel))
        ids = torch.randperm(DECODE.num_blocks)[: math.ceil(tokens / DECODE.tokens_per_block)]
        began = time.perf_counter()
        local, remote = {"attn": Blocks(ids.numpy())}, {"attn": Blocks(message["ids"])}
        specs = [plan.bind(local=local, remote=remote, tokens=(0, tokens)) for plan in plans]
        bound = time.perf_counter()
        for executor, its in zip(executors, specs, strict=True):
            read(executor, its, message["request"])
        done = time.perf_counter()
        wrong = sum(
            not torch.equal(
                tokens_of(cache, ids, tokens), values(request, layer, tokens, DECODE.heads(rank))
            )
            for rank, (_, caches) in enumerate(made)
            for layer, cache in enumerate(caches)
        )
        all_right &= not wrong
        megabytes = sum(spec.num_bytes for its in specs for spec in its) / 1e6
        pieces = sum(spec.num_descriptors for its in specs for spec in its)
        print(
            f"{message['request']}: {tokens} tokens, {megabytes:.1f} MB in {pieces} descriptors, "
            f"{(bound - began) * 1e3:.1f} ms to bind, {(done - bound) * 1e3:.1f} ms to read, "
            f"{f'{wrong} TENSORS WRONG' if wrong else 'every value right'}"
        )
    for executor in executors:
        executor.close()
    return all_right


def read(executor: NixlExecutor, specs: tuple[ReadSpec, ...], request: str) -> None:
    """Read one worker's part of a request from all prefill workers."""
    transfers = [executor.start(spec, request) for spec in specs]
    if not settle(executor, transfers, TIMEOUT_S):
        raise TimeoutError(f"{executor!r} waits for {request}")
    for transfer in transfers:
        if transfer.error is not None:
            raise transfer.error
        executor.release(transfer)


def tokens_of(cache: torch.Tensor, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """The values of a request's tokens in a decode cache: ``[token, kv, head, dim]``."""
    return cache[:, ids].permute(1, 3, 0, 2, 4).flatten(0, 1)[:tokens]


def main() -> int:
    """Run both processes, joined by a pipe. Exit status 0: every value was right."""
    quiet()
    print("starting a prefill process")
    context = multiprocessing.get_context("spawn")
    channel, theirs = context.Pipe()
    process = context.Process(
        target=prefill, args=(theirs,), daemon=True
    )  # daemon: it ends with this process
    process.start()
    theirs.close()  # so that reading fails when the process ends
    with channel:
        all_right = decode(channel)
        process.join(TIMEOUT_S)
    return 0 if all_right and process.exitcode == 0 else 1
