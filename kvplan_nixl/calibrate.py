"""Calibration: the :class:`~kvplan.staging.rates.Rates` of this machine, by transfers between two of its processes.

One process keeps memory, the other one reads: one descriptor, many small ones, as between token-major and head-major
blocks here and there, and a few large ones. Those three times are what a transfer, a descriptor and a byte take. Copies
are of one block of each layer and of many, from token-major to head-major blocks too, as staged requests mostly are.
"""

from __future__ import annotations

import logging
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Final

import attrs
import numpy as np
import torch

from kvplan import Axis, Blocks, Group, Region, TransferPlan, View, Worker, plan_reads, region_of
from kvplan._arrays import Ints
from kvplan.staging.rates import Rates
from kvplan.staging.rearrange import Copy, Side
from kvplan_nixl.executor import NixlExecutor, settle
from kvplan_nixl.rearrange import TorchCopier

SIZE: Final = 64 << 20
"""Bytes of each memory: more than the caches of most processors."""

SMALL, LARGE, MANY = 256, 256 << 10, 1 << 14
HEADS, TOKENS, LAYERS = 8, 16, 32
BLOCK: Final = HEADS * TOKENS * SMALL
ROUNDS: Final = 31
TIMEOUT_S: Final = 120.0

Work = tuple[tuple[int, ...], Callable[[], None]]
"""How much there is of each thing that has a rate, and what does it."""


def memory(engine_id: str, device: str, size: int) -> tuple[Worker, torch.Tensor]:
    """A worker whose memory is in small pieces and, the same bytes, in large ones."""
    tensor = torch.ones(size, dtype=torch.uint8, device=device)
    region = region_of(tensor, "memory")
    views = [
        View(name, name, region.name, "uint8", (Axis("byte", 0, length, length, 1),), size // length, length)
        for name, length in (("small", SMALL), ("large", LARGE))
    ]
    return Worker(engine_id, 0, (region,), (Group("small"), Group("large")), views), tensor


def serve(channel: Connection, device: str, size: int) -> None:
    """The process that keeps memory, until it is told to end."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    worker, _ = memory("source", device, size)
    with NixlExecutor(worker) as executor:
        channel.send_bytes(executor.envelope())
        channel.recv_bytes()


def reader(executor: NixlExecutor, plan: TransferPlan, group: str, ours: Ints, theirs: Ints) -> Callable[[], None]:
    """What reads pieces of a group."""
    tables = [{"small": Blocks([]), "large": Blocks([]), group: Blocks(ids)} for ids in (ours, theirs)]

    def once() -> None:
        (spec,) = plan.bind(local=tables[0], remote=tables[1])
        transfer = executor.start(spec, "calibration")
        if not settle(executor, [transfer], TIMEOUT_S):
            raise TimeoutError(f"{transfer!r}")
        if transfer.error is not None:
            raise transfer.error
        executor.release(transfer)

    return once


@contextmanager
def peer(device: str, size: int) -> Iterator[bytes]:
    """The envelope of a worker of another process, which keeps its memory for so long."""
    context = multiprocessing.get_context("spawn")
    channel, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, device, size), daemon=True)  # which ends with this one
    process.start()
    theirs.close()  # so that its end is noticed
    with channel:
        yield channel.recv_bytes()
        channel.send_bytes(b"end")
        process.join(TIMEOUT_S)


def readers(executor: NixlExecutor, plan: TransferPlan, size: int) -> Iterator[Work]:
    """Three transfers, of so many descriptors and bytes."""
    executor.prepare(plan)
    rng = np.random.default_rng(1)
    here, there = (rng.permutation(size // BLOCK)[:, None] * (HEADS * TOKENS) for _ in range(2))
    by_head = np.arange(HEADS * TOKENS)
    by_token = by_head.reshape(HEADS, TOKENS).T.reshape(-1)
    ours, theirs = (here + by_head).reshape(-1)[:MANY], (there + by_token).reshape(-1)[:MANY]
    large = rng.permutation(size // LARGE), rng.permutation(size // LARGE)
    yield (1, 1, SMALL), reader(executor, plan, "small", ours[:1], theirs[:1])
    yield (1, MANY, MANY * SMALL), reader(executor, plan, "small", ours, theirs)
    yield (1, size // LARGE, size), reader(executor, plan, "large", *large)


def apart(amounts: Sequence[Sequence[int]], took: Sequence[float]) -> list[float]:
    """Seconds for one of each, of as many measures of so much of each as there are rates.

    >>> [round(each, 9) for each in apart([(1, 1, 8), (1, 100, 800), (1, 10, 8000)], [0.012008, 0.2108, 0.038])]
    [0.01, 0.002, 1e-06]
    """
    rates: list[float] = np.maximum(np.linalg.solve(amounts, took), 0.0).tolist()  # noise can make small ones negative
    return rates


def copiers(device: str, size: int) -> Iterator[Work]:
    """A copy of as many origins as a request has layers, of one block each and of many: so many origins and bytes."""
    tensors = {name: torch.ones(size, dtype=torch.uint8, device=device) for name in ("cache", "staging")}
    cache, staging = (region_of(tensor, name) for name, tensor in tensors.items())
    copier = TorchCopier(tensors)
    for number in (1, size // LAYERS // BLOCK):
        yield (LAYERS, LAYERS * number * BLOCK), partial(copied, copier, [heads(cache, staging, number)])


def copied(copier: TorchCopier, copies: Sequence[Copy]) -> None:
    """Copies, begun and waited for."""
    ticket = copier.begin(copies)
    while not copier.done(ticket):
        pass


def medians(each: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds that each takes, after it was done once. They take turns: machines have better moments and worse ones."""
    took: list[list[float]] = [[] for _ in each]
    for _ in range(ROUNDS + 1):
        for times, once in zip(took, each, strict=True):
            began = time.perf_counter()
            once()
            times.append(time.perf_counter() - began)
    return [statistics.median(times[1:]) for times in took]


def heads(cache: Region, staging: Region, number: int) -> Copy:
    """So many token-major blocks of each layer in staging memory, into head-major blocks here and there in a cache."""
    pool = cache.size_bytes // LAYERS // BLOCK
    here, there = np.random.default_rng(1).permutation(pool)[:number], np.arange(number)
    ours, theirs = (
        Side(tuple((region, layer * pool * BLOCK) for layer in range(LAYERS)), (pool,), (BLOCK,), (index,), inner)
        for region, index, inner in (
            (cache, here, (TOKENS * SMALL, SMALL)),
            (staging, there, (SMALL, HEADS * SMALL)),
        )
    )
    return Copy(ours, theirs, (HEADS, TOKENS), SMALL)


def calibrate(device: str = "cpu", size: int = SIZE) -> Rates:
    """Measure, which takes some seconds on a machine that does nothing else.

    It takes ``size`` bytes, at least 4 MiB, in another process, and three times that in this one. ``device`` is where
    the memory is, as torch names it. UCX moves bytes as its own environment variables say.
    """
    logging.getLogger("nixl").setLevel(logging.WARNING)
    worker, _held = memory("local", device, size)
    with peer(device, size) as envelope, NixlExecutor(worker) as executor:
        moves = list(readers(executor, plan_reads(worker, [executor.connect(envelope)]), size))
        copies = list(copiers(device, size))
        took = medians([once for _, once in moves + copies])
    transfer, descriptor, byte = apart([amounts for amounts, _ in moves], took[: len(moves)])
    copy, copied = apart([amounts for amounts, _ in copies], took[len(moves) :])
    where = platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)
    measured = f"UCX of NIXL {version('nixl')} between two processes, {device} memory, {where}, {date.today()}"
    return Rates(measured, transfer, descriptor, byte, copy, copied)


def main(device: str, path: str | None) -> int:
    """Measure, print, and save if there is a path."""
    rates = calibrate(device)
    for key, value in attrs.asdict(rates).items():
        print(f"{key:15} {value if isinstance(value, str) else f'{value:.3g}'}")
    if path is not None:
        rates.save(path)
    return 0
