"""Calibration: measures the :class:`~kvplan.staging.Rates` of this machine, by transfers between two processes.

One process registers memory, the other one reads from it or writes to it: one descriptor, and then many of each length.
The times of a transfer, a descriptor and a byte are those that explain all of these best. Copies go from token-major to
head-major blocks, as in most staged requests: one block of each layer, and many.
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

from kvplan import (
    Axis,
    Blocks,
    Group,
    KVPlanError,
    Region,
    TransferPlan,
    View,
    Worker,
    plan_reads,
    plan_writes,
    region_of,
)
from kvplan._arrays import Ints
from kvplan._checks import integer, is_one_of, name
from kvplan._text import shown
from kvplan.staging import Copy, Rates
from kvplan.staging.copies import CopySide
from kvplan_nixl.executor import NixlExecutor, settle
from kvplan_nixl.rearrange import TorchCopier

SIZE: Final = 64 << 20
"""Bytes of each memory: more than the caches of most processors."""

LENGTHS: Final = tuple(256 << 2 * i for i in range(6))
"""Bytes of a descriptor: several, because over TCP no two of them tell the time of the others."""

SMALL, MANY = LENGTHS[0], 1 << 14
HEADS, TOKENS, LAYERS = 8, 16, 32
BLOCK: Final = HEADS * TOKENS * SMALL
ROUNDS: Final = 15
TIMEOUT_S: Final = 120.0

PLANS: Final = {"READ": plan_reads, "WRITE": plan_writes}

Work = tuple[tuple[int, ...], Callable[[], None]]
"""The amount of each thing that has a rate, and a function that takes as many."""


def memory(engine_id: str, device: str, size: int) -> tuple[Worker, torch.Tensor]:
    """A worker with views of the same bytes as blocks of each length."""
    tensor = allocated(device, size)
    region = region_of(tensor, "memory")
    groups = {f"{length}": length for length in LENGTHS}
    views = [
        View(
            group,
            group,
            region.name,
            "uint8",
            (Axis("byte", 0, length, length, 1),),
            size // length,
            length,
        )
        for group, length in groups.items()
    ]
    return Worker(engine_id, 0, (region,), tuple(map(Group, groups)), views), tensor


def allocated(device: str, size: int) -> torch.Tensor:
    """Bytes of a device, which becomes torch's present one. Raises ``MEMORY`` where torch has none."""
    try:
        made = torch.ones(size, dtype=torch.uint8, device=device)
        if made.is_cuda:
            torch.cuda.set_device(
                made.device
            )  # before an executor is made, or UCX leaves out CUDA IPC
        return made
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        got = " ".join(str(error).split())
    raise KVPlanError(
        "MEMORY", f"allocate {size} bytes of {device}", expected="a device that has them", got=got
    )


def serve(channel: Connection, device: str, size: int) -> None:
    """Register memory until a message comes: what the other process runs."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    worker, _ = memory("source", device, size)
    with NixlExecutor(worker) as executor:
        channel.send_bytes(executor.envelope())
        channel.recv_bytes()


def mover(
    executor: NixlExecutor, plan: TransferPlan, length: int, ours: Ints, theirs: Ints
) -> Callable[[], None]:
    """A function that moves blocks of a length once."""
    tables = [
        {f"{each}": Blocks(ids if each == length else []) for each in LENGTHS}
        for ids in (ours, theirs)
    ]

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
    """The envelope of a worker of another process, which runs until the context ends."""
    context = multiprocessing.get_context("spawn")
    channel, theirs = context.Pipe()
    process = context.Process(
        target=serve, args=(theirs, device, size), daemon=True
    )  # it ends with this process
    process.start()
    theirs.close()  # so that receiving fails when the process ends
    with channel:
        yield channel.recv_bytes()
        channel.send_bytes(b"end")
        process.join(TIMEOUT_S)


def movers(executor: NixlExecutor, plan: TransferPlan, size: int) -> Iterator[Work]:
    """Transfers between scattered blocks, each with its numbers of transfers, descriptors and bytes."""
    executor.prepare(plan)
    rng = np.random.default_rng(1)
    for length, most in ((SMALL, 1), *((length, MANY) for length in LENGTHS)):
        ours, theirs = (rng.permutation(size // length)[:most] for _ in range(2))
        yield (1, ours.size, ours.size * length), mover(executor, plan, length, ours, theirs)


def apart(amounts: Sequence[Sequence[int]], took: Sequence[float]) -> list[float]:
    """Seconds for one of each thing, given the amounts of each and the seconds of as many measurements or more.

    The shares by which they miss what was measured have the least sum of squares.

    >>> [round(each, 9) for each in apart([(1, 1, 8), (1, 100, 800), (1, 10, 8000)], [0.012008, 0.2108, 0.038])]
    [0.01, 0.002, 1e-06]
    >>> [round(each, 3) for each in apart([(1,), (1,)], [1.0, 3.0])]
    [1.2]
    """
    shares = np.asarray(amounts) / np.asarray(took)[:, None]
    found = np.linalg.lstsq(shares, np.ones(len(took)), rcond=None)[0]
    rates: list[float] = np.maximum(found, 0.0).tolist()  # noise can make small ones negative
    return rates


def copiers(device: str, size: int) -> Iterator[Work]:
    """Two copies of one origin for each layer, of one block and of many, each with its numbers of origins and bytes."""
    tensors = {name: allocated(device, size) for name in ("cache", "staging")}
    cache, staging = (region_of(tensor, name) for name, tensor in tensors.items())
    copier = TorchCopier(tensors)
    for number in (1, size // LAYERS // BLOCK):
        yield (
            (LAYERS, LAYERS * number * BLOCK),
            partial(copied, copier, [heads(cache, staging, number)]),
        )


def copied(copier: TorchCopier, copies: Sequence[Copy]) -> None:
    """Begin copies and wait until they are done."""
    ticket = copier.begin(copies)
    while not copier.done(ticket):
        pass


def medians(each: Sequence[Callable[[], None]]) -> list[float]:
    """The median seconds of each function, after a first call. They take turns, so that all see the same load."""
    took: list[list[float]] = [[] for _ in each]
    for _ in range(ROUNDS + 1):
        for times, once in zip(took, each, strict=True):
            began = time.perf_counter()
            once()
            times.append(time.perf_counter() - began)
    return [statistics.median(times[1:]) for times in took]


def heads(cache: Region, staging: Region, number: int) -> Copy:
    """A copy of ``number`` token-major blocks of each layer, from staging memory to scattered head-major blocks."""
    pool = cache.size_bytes // LAYERS // BLOCK
    here, there = np.random.default_rng(1).permutation(pool)[:number], np.arange(number)
    ours, theirs = (
        CopySide(
            tuple((region, layer * pool * BLOCK) for layer in range(LAYERS)), index * BLOCK, strides
        )
        for region, index, strides in (
            (cache, here, (TOKENS * SMALL, SMALL)),
            (staging, there, (SMALL, HEADS * SMALL)),
        )
    )
    return Copy(ours, theirs, (HEADS, TOKENS), SMALL)


def calibrate(device: str = "cpu", size: int = SIZE, operation: str = "READ") -> Rates:
    """Measure the rates of an operation, in some seconds. Nothing else should run on the machine.

    Allocates ``size`` bytes, at least 4 MiB, in another process, and three times as many in this one. ``device`` is the
    device of all memory, as torch names it. UCX chooses how to move bytes by its own environment variables. Raises
    ``MEMORY`` where there is no such memory, and ``NAME`` for an unknown operation.
    """
    logging.getLogger("nixl").setLevel(logging.WARNING)
    name(device, "device")
    integer(size, "size", low=MANY * SMALL)
    if not is_one_of(operation, PLANS):
        raise KVPlanError(
            "NAME", "calibrate", expected=f"operation {' or '.join(PLANS)}", got=shown(operation)
        )
    worker, _held = memory("local", device, size)
    with peer(device, size) as envelope, NixlExecutor(worker) as executor:
        moves = list(movers(executor, PLANS[operation](worker, [executor.connect(envelope)]), size))
        copies = list(copiers(device, size))
        took = medians([once for _, once in moves + copies])
    transfer, descriptor, byte = apart([amounts for amounts, _ in moves], took[: len(moves)])
    copy, copied = apart([amounts for amounts, _ in copies], took[len(moves) :])
    where = platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)
    how = f"UCX of NIXL {version('nixl')} between two processes, {operation} of {device} memory"
    measured = f"{how}, {where}, {date.today()}"
    return Rates(measured, transfer, descriptor, byte, copy, copied)


def main(device: str, operation: str, path: str | None) -> int:
    """Measure and print the rates, and save them if there is a path."""
    rates = calibrate(device, operation=operation)
    for key, value in attrs.asdict(rates).items():
        print(f"{key:15} {value if isinstance(value, str) else f'{value:.3g}'}")
    if path is not None:
        rates.save(path)
    return 0
