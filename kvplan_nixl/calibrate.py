"""Calibration: measures the :class:`~kvplan.staging.Rates` of this machine, between two processes.

One process registers memory, the other one reads from it: one descriptor, and then many of each
length. The times of a transfer, a descriptor and a byte are those that explain all of
these best. Copies go from token-major to head-major blocks, as in most staged requests: one block
of each layer, and many.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
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
    region_of,
)
from kvplan.staging import Copier, Copy, CopySide, Rates
from kvplan.support import Ints, integer, name
from kvplan_nixl.executor import NixlExecutor, settle
from kvplan_nixl.kernel import copier_of

__all__ = ["calibrate"]

SIZE: Final = 64 << 20
"""Bytes of each memory: more than the caches of most processors."""

LENGTHS: Final = tuple(256 << 2 * i for i in range(6))
"""Bytes of a descriptor: several, because over TCP no two of them tell the time of the others."""

SMALL: Final = LENGTHS[0]
MANY: Final = 1 << 14
"""Descriptors of a transfer of many."""

HEADS: Final = 8
TOKENS: Final = 16
LAYERS: Final = 32
BLOCK: Final = HEADS * TOKENS * SMALL
"""Bytes of a block that is copied, in one layer."""

ROUNDS: Final = 15
CALIBRATION_TIMEOUT_S: Final = 120.0


@attrs.frozen
class Measurement:
    """A function to time, and the amount that it takes of each thing that has a rate."""

    amounts: tuple[int, ...]
    run: Callable[[], object]


def memory(
    engine_id: str, device: str, size: int, lengths: Sequence[int] = LENGTHS
) -> tuple[Worker, torch.Tensor]:
    """Return a worker with views of the same bytes as blocks of each length, and these bytes."""
    tensor = allocated(device, size)
    region = region_of(tensor, "memory")
    groups = [Group(f"{length}") for length in lengths]
    views = list[View]()
    # one group of one tensor for each length
    for group, length in zip(groups, lengths, strict=True):
        axes = (Axis("byte", 0, length, length, 1),)
        num_blocks = size // length
        views.append(View(group.name, group.name, region, "uint8", axes, num_blocks, length))
    return Worker(engine_id, 0, (region,), groups, views), tensor


def allocated(device: str, size: int) -> torch.Tensor:
    """Return bytes of a device, which becomes torch's present one. No two blocks have the same.

    Raises ``MEMORY`` where torch has none.
    """
    try:
        array = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        tensor = torch.from_numpy(array).to(device)
        if tensor.is_cuda:
            # before an executor is made, or UCX leaves out CUDA IPC
            torch.cuda.set_device(tensor.device)
        return tensor
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        got = " ".join(str(error).split())
    raise KVPlanError(
        "MEMORY", f"allocate {size} bytes of {device}", expected="a device that has them", got=got
    )


def serve(channel: Connection, device: str, size: int, lengths: Sequence[int]) -> None:
    """Register memory until the parent process closes the channel. A child process runs this."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    # the tensor has to outlive the executor
    worker, _tensor = memory("source", device, size, lengths)
    with NixlExecutor(worker) as executor:
        channel.send_bytes(executor.envelope())
        channel.poll(None)


@contextmanager
def peer(device: str, size: int, lengths: Sequence[int] = LENGTHS) -> Iterator[bytes]:
    """Yield the envelope of a worker of another process, which runs until the context ends.

    Raises EOFError if that process has ended.
    """
    context = multiprocessing.get_context("spawn")
    channel, peer_channel = context.Pipe()
    arguments = (peer_channel, device, size, lengths)
    # a daemon ends with this process
    process = context.Process(target=serve, args=arguments, daemon=True)
    process.start()
    peer_channel.close()  # so that receiving fails when the process ends
    with channel:
        yield channel.recv_bytes()
    process.join(CALIBRATION_TIMEOUT_S)


def transfers(executor: NixlExecutor, plan: TransferPlan, size: int) -> Iterator[Measurement]:
    """Yield transfers between scattered blocks. They take transfers, descriptors and bytes."""
    executor.prepare(plan)
    rng = np.random.default_rng(1)
    # one descriptor tells the time of a transfer, many tell those of descriptors and bytes
    for length, num_blocks in ((SMALL, 1), *((length, MANY) for length in LENGTHS)):
        local_ids = rng.permutation(size // length)[:num_blocks]
        remote_ids = rng.permutation(size // length)[:num_blocks]
        tables = block_tables(length, local_ids), block_tables(length, remote_ids)
        amounts = (1, local_ids.size, local_ids.size * length)
        yield Measurement(amounts, partial(move_blocks, executor, plan, *tables))


def block_tables(length: int, ids: Ints) -> dict[str, Blocks]:
    """Return block tables that have blocks of one length only."""
    tables = {f"{other_length}": Blocks([]) for other_length in LENGTHS}
    tables[f"{length}"] = Blocks(ids)
    return tables


def move_blocks(
    executor: NixlExecutor,
    plan: TransferPlan,
    local: Mapping[str, Blocks],
    remote: Mapping[str, Blocks],
    timeout_s: float = CALIBRATION_TIMEOUT_S,
) -> int:
    """Move blocks once, wait until they have moved, and return their bytes.

    Raises TimeoutError, and the error of the transfer.
    """
    (spec,) = plan.bind(local=local, remote=remote)
    transfer = executor.start(spec, "calibration")
    if not settle(executor, [transfer], timeout_s):
        raise TimeoutError(f"{transfer!r}")
    if transfer.error is not None:
        raise transfer.error
    executor.release(transfer)
    return spec.num_bytes


def copies(device: str, size: int) -> Iterator[Measurement]:
    """Yield copies of one block of each layer, and of many. They take origins and bytes."""
    tensors = {name: allocated(device, size) for name in ("cache", "staging")}
    cache = region_of(tensors["cache"], "cache")
    staging = region_of(tensors["staging"], "staging")
    copier = copier_of(tensors)
    for num_blocks in (1, size // LAYERS // BLOCK):
        copy = block_copy(cache, staging, num_blocks)
        yield Measurement((LAYERS, copy.num_bytes), partial(copy_and_wait, copier, [copy]))


def block_copy(cache: Region, staging: Region, num_blocks: int) -> Copy:
    """Return a copy of blocks of each layer, from staging memory to scattered blocks of a cache.

    The blocks are token-major in staging memory, and head-major in the cache.
    """
    layer_bytes = cache.size_bytes // LAYERS // BLOCK * BLOCK
    # one element for each block: where it is in a layer of the cache, and of staging memory
    block_ids = np.random.default_rng(1).permutation(layer_bytes // BLOCK)[:num_blocks]
    destination = CopySide(
        tuple((cache, layer * layer_bytes) for layer in range(LAYERS)),
        block_ids * BLOCK,
        (TOKENS * SMALL, SMALL),
    )
    source = CopySide(
        tuple((staging, layer * layer_bytes) for layer in range(LAYERS)),
        np.arange(num_blocks) * BLOCK,
        (SMALL, HEADS * SMALL),
    )
    return Copy(destination, source, (HEADS, TOKENS), SMALL)


def copy_and_wait(copier: Copier, copies: Sequence[Copy]) -> None:
    """Begin copies and wait until they are done."""
    ticket = copier.begin(copies)
    while not copier.done(ticket):
        pass


def medians(functions: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median seconds of each function, after a first call.

    The functions take turns, so that all see the same load.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(ROUNDS + 1):
        for run, run_seconds in zip(functions, seconds, strict=True):
            began = time.perf_counter()
            run()
            run_seconds.append(time.perf_counter() - began)
    return [statistics.median(run_seconds[1:]) for run_seconds in seconds]


def rates_of(amounts: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[float]:
    """Return the seconds for one of each thing.

    ``amounts`` has those of each measurement, of which there are as many as things or more. The
    shares by which the rates miss what was measured have the least sum of squares.

    >>> amounts = [(1, 1, 8), (1, 100, 800), (1, 10, 8000)]
    >>> [round(rate, 9) for rate in rates_of(amounts, [0.012008, 0.2108, 0.038])]
    [0.01, 0.002, 1e-06]
    >>> [round(rate, 3) for rate in rates_of([(1,), (1,)], [1.0, 3.0])]
    [1.2]
    """
    # one row for each measurement, whose rates add up to 1 if they explain it
    shares = np.asarray(amounts) / np.asarray(seconds)[:, None]
    solution = np.linalg.lstsq(shares, np.ones(len(seconds)), rcond=None)[0]
    rates: list[float] = np.maximum(solution, 0.0).tolist()  # noise can make small ones negative
    return rates


def calibrate(device: str = "cpu", size: int = SIZE) -> Rates:
    """Measure the rates of reads, in some seconds. Nothing else should run on the machine.

    Allocates ``size`` bytes, at least 4 MiB, in another process, and three times as many in this
    one. ``device`` is the device of all memory, as torch names it. UCX chooses how to move bytes by
    its own environment variables. Raises ``MEMORY`` where there is no such memory.
    """
    logging.getLogger("nixl").setLevel(logging.WARNING)
    name(device, "device")
    integer(size, "size", low=MANY * SMALL)
    worker, _tensor = memory("local", device, size)  # the tensor is kept until all is measured
    with peer(device, size) as envelope, NixlExecutor(worker) as executor:
        plan = plan_reads(worker, [executor.connect(envelope)])
        moves = [*transfers(executor, plan, size)]
        num_moves = len(moves)
        measurements = [*moves, *copies(device, size)]
        seconds = medians([measurement.run for measurement in measurements])
    amounts = [measurement.amounts for measurement in measurements]
    transfer, descriptor, byte = rates_of(amounts[:num_moves], seconds[:num_moves])
    copy, copied = rates_of(amounts[num_moves:], seconds[num_moves:])
    where = platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)
    how = f"UCX of NIXL {version('nixl')} between two processes, READ of {device} memory"
    measured = f"{how}, {where}, {date.today()}"
    return Rates(measured, transfer, descriptor, byte, copy, copied)


def main(device: str, path: str | None) -> int:
    """Measure and print the rates, and save them if there is a path."""
    rates = attrs.asdict(calibrate(device))
    for key, value in rates.items():
        print(f"{key:15} {value if isinstance(value, str) else f'{value:.3g}'}")
    if path is not None:
        Path(path).write_text(json.dumps(rates, indent=2) + "\n", encoding="utf-8")
    return 0
