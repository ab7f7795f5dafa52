"""Calibration: the :class:`~kvplan.rates.Rates` of this machine, by transfers between two of its processes.

One process keeps memory, the other one reads: one descriptor, many small ones, and a few large ones, in random places.
Those three times are what a transfer, a descriptor and a byte take. Copies are of one block and of many, head by head
from token-major to head-major blocks, which is what staged requests mostly are.
"""

from __future__ import annotations

import logging
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Final

import attrs
import numpy as np
import torch

from kvplan import Axis, Blocks, Group, Region, TransferPlan, View, Worker, plan_reads, region_of
from kvplan.rates import Rates
from kvplan.rearrange import Copy, Side
from kvplan_nixl.executor import NixlExecutor, settle
from kvplan_nixl.rearrange import TorchCopier

SIZE: Final = 64 << 20
"""Bytes of each memory: more than the caches of most processors."""

SMALL, LARGE, MANY = 256, 256 << 10, 1 << 14
HEADS, TOKENS = 8, 16
BLOCK: Final = HEADS * TOKENS * SMALL
ROUNDS: Final = 7
TIMEOUT_S: Final = 120.0


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


def median(once: Callable[[], None]) -> float:
    """Seconds that something takes, after it was done once."""
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        once()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def reading(executor: NixlExecutor, plan: TransferPlan, group: str, number: int) -> float:
    """Seconds to read so many pieces of a group from random places to random places."""
    pool = next(view.num_blocks for view in plan.local.views if view.group == group)
    rng = np.random.default_rng(number)
    none = {"small": Blocks([]), "large": Blocks([])}
    ours, theirs = ({**none, group: Blocks(rng.permutation(pool)[:number])} for _ in "ab")

    def once() -> None:
        (spec,) = plan.bind(local=ours, remote=theirs)
        transfer = executor.start(spec, "calibration")
        if not settle(executor, [transfer], TIMEOUT_S):
            raise TimeoutError(f"{transfer!r}")
        if transfer.error is not None:
            raise transfer.error
        executor.release(transfer)

    return median(once)


def moving(device: str, size: int) -> tuple[float, float, float]:
    """Seconds for a transfer, a descriptor and a byte: those by which the three times come about."""
    context = multiprocessing.get_context("spawn")
    channel, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, device, size), daemon=True)  # which ends with this one
    process.start()
    theirs.close()  # so that its end is noticed
    worker, _held = memory("local", device, size)
    with channel, NixlExecutor(worker) as executor:
        plan = plan_reads(worker, [executor.connect(channel.recv_bytes())])
        executor.prepare(plan)
        work = [("small", 1, SMALL), ("small", MANY, SMALL), ("large", size // LARGE, LARGE)]
        took = [reading(executor, plan, group, number) for group, number, _ in work]
        channel.send_bytes(b"end")
        process.join(TIMEOUT_S)
    return apart([(number, length) for _, number, length in work], took)


def apart(work: Sequence[tuple[int, int]], took: Sequence[float]) -> tuple[float, float, float]:
    """Seconds for a transfer, a descriptor and a byte, of three transfers of so many descriptors of so many bytes.

    >>> [round(each, 9) for each in apart([(1, 8), (100, 8), (10, 800)], [0.012008, 0.2108, 0.038])]
    [0.01, 0.002, 1e-06]
    """
    rates = np.linalg.solve([[1, number, number * length] for number, length in work], took)
    transfer, descriptor, byte = np.maximum(rates, 0.0).tolist()  # noise can make one that is small negative
    return transfer, descriptor, byte


def copying(device: str, size: int) -> tuple[float, float]:
    """Seconds for a copy and a byte of it."""
    tensors = {name: torch.ones(size, dtype=torch.uint8, device=device) for name in ("cache", "staging")}
    regions = {name: region_of(tensor, name) for name, tensor in tensors.items()}
    copier = TorchCopier(tensors)

    def took(number: int) -> float:
        copies = [heads(regions["cache"], regions["staging"], number)]

        def once() -> None:
            ticket = copier.begin(copies)
            while not copier.done(ticket):
                pass

        return median(once)

    blocks = size // BLOCK
    one, many = took(1), took(blocks)
    byte = (many - one) / (blocks - 1) / BLOCK
    return max(one - byte * BLOCK, 0.0), max(byte, 0.0)


def heads(cache: Region, staging: Region, number: int) -> Copy:
    """So many token-major blocks of a staging region into head-major blocks of a cache, in random places."""
    pool = cache.size_bytes // BLOCK
    scattered = np.random.default_rng(1).permutation(pool)[:number]
    ours = Side(cache, 0, (pool,), (BLOCK,), (scattered,), (TOKENS * SMALL, SMALL))
    theirs = Side(staging, 0, (pool,), (BLOCK,), (np.arange(number),), (SMALL, HEADS * SMALL))
    return Copy(ours, theirs, (HEADS, TOKENS), SMALL)


def calibrate(device: str = "cpu", size: int = SIZE) -> Rates:
    """Measure, which takes some seconds on a machine that does nothing else.

    It takes ``size`` bytes in each of two processes, and twice that later; at least 4 MiB. ``device`` is where the
    memory is, as torch names it. UCX moves bytes as its own environment variables say.
    """
    logging.getLogger("nixl").setLevel(logging.WARNING)
    transfer, descriptor, byte = moving(device, size)
    copy, copied = copying(device, size)
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
