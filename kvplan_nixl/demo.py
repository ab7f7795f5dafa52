"""The demo, and a connector to copy from: a prefill and a decode process on this machine.

Prefill has 2 workers whose caches are ``[block, kv, head, token, dim]`` with blocks of 16 tokens.
Decode has 3 workers whose caches are ``[kv, block, head, token, dim]`` with blocks of 24. Each
process describes its torch tensors (:func:`make_cache`), registers them, exchanges envelopes over a
pipe (:func:`handshake`), and plans once.

For each request prefill sends its block ids. Decode binds them with its own, reads (:func:`read`),
and checks every value. Prefill reuses its blocks when it has the notices of all its readers
(:func:`wait_for_notices`).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Final

import attrs
import torch

from kvplan import Blocks, Group, ReadSpec, Region, View, Worker, plan_mesh, region_of, view_of
from kvplan.executor import PendingRequests
from kvplan_nixl.executor import NixlExecutor, settle

LAYERS: Final = 4
HEADS: Final = 12
DIM: Final = 128
REQUESTS: Final = (1000, 17, 600)
"""The number of tokens of each request."""

NOISE: Final = torch.Generator().manual_seed(1)
SIZES: Final = (max(REQUESTS), 2, HEADS, DIM)
RANDOM_BITS: Final = torch.randint(1 << 14, SIZES, dtype=torch.int16, generator=NOISE)
"""The same in both processes. As bfloat16 all of them are finite numbers."""

DEMO_TIMEOUT_S: Final = 120.0


@attrs.frozen
class Shape:
    """An engine's caches. ``pattern`` names their dimensions, as :func:`kvplan.view_of` does."""

    engine_id: str
    tp: int
    tokens_per_block: int
    num_blocks: int
    pattern: str

    def heads(self, rank: int) -> range:
        """Return the KV heads of a worker."""
        return range(rank * HEADS // self.tp, (rank + 1) * HEADS // self.tp)

    def block_ids(self, tokens: int) -> torch.Tensor:
        """Return the ids of blocks for so many tokens, in any order."""
        return torch.randperm(self.num_blocks)[: math.ceil(tokens / self.tokens_per_block)]


PREFILL: Final = Shape("prefill", 2, 16, 512, "block kv head token dim")
DECODE: Final = Shape("decode", 3, 24, 300, "kv block head token dim")


@attrs.frozen(eq=False)
class Cache:
    """The KV heads that a worker keeps, one tensor for each layer, and what kvplan knows of it."""

    heads: range
    layers: list[torch.Tensor]
    worker: Worker


def make_cache(shape: Shape, rank: int) -> Cache:
    """Allocate the cache of a worker, and describe it to kvplan."""
    heads = shape.heads(rank)
    sizes = {"block": shape.num_blocks, "token": shape.tokens_per_block, "kv": 2}
    sizes |= {"head": len(heads), "dim": DIM}
    group = Group("attn", shape.tokens_per_block)
    parts = {"head": (heads.start, heads.stop, HEADS)}
    layers = list[torch.Tensor]()
    regions = list[Region]()
    views = list[View]()
    for layer in range(LAYERS):
        tensor = torch.zeros([sizes[axis] for axis in shape.pattern.split()], dtype=torch.bfloat16)
        region = region_of(tensor, f"kv.{layer}")
        name = f"layers.{layer}.attn"
        layers.append(tensor)
        regions.append(region)
        view = view_of(tensor, shape.pattern, name=name, group=group, region=region, parts=parts)
        views.append(view)
    return Cache(heads, layers, Worker(shape.engine_id, rank, regions, [group], views))


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
    """Return the next message of the other process. Raises TimeoutError."""
    if not channel.poll(DEMO_TIMEOUT_S):
        raise TimeoutError("no message from the other process")
    return channel.recv_bytes()


def values(request: int, layer: int, tokens: int, heads: range) -> torch.Tensor:
    """Compute keys and values, ``[token, kv, head, dim]``: others in each request and layer."""
    bits = RANDOM_BITS[:tokens, :, heads.start : heads.stop] + 257 * (request * LAYERS + layer)
    return (bits & 0x3FFF).view(torch.bfloat16)


def run_prefill(channel: Connection) -> None:
    """Run the prefill process: fill blocks, send their ids, and reuse them after all notices."""
    quiet()
    caches = [make_cache(PREFILL, rank) for rank in range(PREFILL.tp)]
    workers = [cache.worker for cache in caches]
    executors = [NixlExecutor(worker) for worker in workers]
    readers = handshake(channel, executors)
    completions = plan_mesh(readers, workers).completions
    waiting = [(executor, PendingRequests()) for executor in executors]
    for request, tokens in enumerate(REQUESTS):
        ids = PREFILL.block_ids(tokens)
        for cache in caches:
            for layer, tensor in enumerate(cache.layers):
                fill(tensor, ids, values(request, layer, tokens, cache.heads))
        name = f"request {request}"
        # before decode knows of the request, so that no notice is early
        for executor, pending in waiting:
            pending.add(name, completions[executor.worker.key].awaits)
        message = {"request": name, "tokens": tokens, "ids": ids.tolist()}
        channel.send_bytes(json.dumps(message).encode())
        for executor, pending in waiting:
            wait_for_notices(executor, pending)
    for executor in executors:
        executor.close()


def quiet() -> None:
    """Let NIXL log warnings only, and torch use one thread: both processes may share two cores."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    torch.set_num_threads(1)


def fill(tensor: torch.Tensor, ids: torch.Tensor, computed: torch.Tensor) -> None:
    """Write the values of a request's tokens into blocks of a prefill cache."""
    num_slots = len(ids) * PREFILL.tokens_per_block
    padded = torch.zeros(num_slots, *computed.shape[1:], dtype=computed.dtype)
    padded[: len(computed)] = computed
    tensor[ids] = padded.unflatten(0, (len(ids), -1)).permute(0, 2, 3, 1, 4)


def wait_for_notices(executor: NixlExecutor, pending: PendingRequests) -> None:
    """Wait until all readers of the pending request have notified. Raises TimeoutError."""
    deadline = time.monotonic() + DEMO_TIMEOUT_S
    while not pending.receive(executor.notices()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{executor!r} waits for readers of {pending!r}")
        time.sleep(1e-4)


def run_decode(channel: Connection) -> bool:
    """Run the decode process: read and check each request. Return whether all values were right."""
    caches = [make_cache(DECODE, rank) for rank in range(DECODE.tp)]
    workers = [cache.worker for cache in caches]
    executors = [NixlExecutor(worker) for worker in workers]
    plans = plan_mesh(workers, handshake(channel, executors)).plans
    for executor, plan in zip(executors, plans, strict=True):
        executor.prepare(plan)
    print(f"{PREFILL.tp} prefill and {DECODE.tp} decode workers are connected")
    num_wrong = 0
    for request, tokens in enumerate(REQUESTS):
        message = json.loads(receive(channel))
        ids = DECODE.block_ids(tokens)
        started = time.perf_counter()
        local = {"attn": Blocks(ids.numpy())}
        remote = {"attn": Blocks(message["ids"])}
        specs = [plan.bind(local=local, remote=remote, tokens=(0, tokens)) for plan in plans]
        bound = time.perf_counter()
        for executor, worker_specs in zip(executors, specs, strict=True):
            read(executor, worker_specs, message["request"])
        done = time.perf_counter()
        wrong = wrong_tensors(caches, ids, request, tokens)
        num_wrong += wrong
        all_specs = list(itertools.chain.from_iterable(specs))
        megabytes = sum(spec.num_bytes for spec in all_specs) / 1e6
        num_descriptors = sum(spec.num_descriptors for spec in all_specs)
        print(
            f"{message['request']}: {tokens} tokens, {megabytes:.1f} MB in {num_descriptors} "
            f"descriptors, {(bound - started) * 1e3:.1f} ms to bind, "
            f"{(done - bound) * 1e3:.1f} ms to read, "
            f"{f'{wrong} TENSORS WRONG' if wrong else 'every value right'}"
        )
    for executor in executors:
        executor.close()
    return num_wrong == 0


def read(executor: NixlExecutor, specs: tuple[ReadSpec, ...], request: str) -> None:
    """Read one worker's part of a request from all prefill workers."""
    transfers = [executor.start(spec, request) for spec in specs]
    if not settle(executor, transfers, DEMO_TIMEOUT_S):
        raise TimeoutError(f"{executor!r} waits for {request}")
    for transfer in transfers:
        if transfer.error is not None:
            raise transfer.error
        executor.release(transfer)


def wrong_tensors(caches: list[Cache], ids: torch.Tensor, request: int, tokens: int) -> int:
    """Count the tensors of decode caches in which a request is not as prefill computed it."""
    num_wrong = 0
    for cache in caches:
        for layer, tensor in enumerate(cache.layers):
            arrived = tensor[:, ids].permute(1, 3, 0, 2, 4).flatten(0, 1)[:tokens]
            num_wrong += not torch.equal(arrived, values(request, layer, tokens, cache.heads))
    return num_wrong


def main() -> int:
    """Run both processes, joined by a pipe. Exit status 0: every value was right."""
    quiet()
    print("starting a prefill process")
    context = multiprocessing.get_context("spawn")
    channel, prefill_channel = context.Pipe()
    # a daemon ends with this process
    process = context.Process(target=run_prefill, args=(prefill_channel,), daemon=True)
    process.start()
    prefill_channel.close()  # so that reading fails when the process ends
    with channel:
        all_right = run_decode(channel)
        process.join(DEMO_TIMEOUT_S)
    return 0 if all_right and process.exitcode == 0 else 1
