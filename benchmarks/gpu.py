"""NIXL on GPUs, on one machine and without a network: right bytes, and the throughput.

    python -m benchmarks.gpu

First the executor contract runs in GPU memory, which checks every byte of reads and writes. Then one request is read in
several pairs of layouts from a worker in a process of its own, on the same GPU, and from the first to the second GPU
where there are two, with kvplan's settings of UCX and with UCX's own, by which a host without NVLinks does not read by
CUDA IPC. For comparison: a copy of the same number of bytes in one piece, and copies of the same descriptors one
by one, both by torch in one process. All times are medians of several rounds. Last a source is suspended, closed or
killed under a read, and all memory of the reader is set to zero once that read has ended, or has not for a while: what
lands later is seen, which only a read that is RUNNING may do.

Without a GPU it says so and exits with 0. ``python -m benchmarks.gpu cpu`` tries the script itself.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import Any, Final

import numpy as np

from kvplan import Blocks, Model, ReadSpec, Worker, plan_reads
from kvplan.testing.executors import ExecutorContract

MODEL: Final = "llama-3.1-8b"
LAYOUTS: Final = (("BLHNC", "BLHNC"), ("LBHNC", "LBHNC"), ("LBHNC", "BLHNC"), ("LBNHC", "LBNHC"), ("LBNHC", "LBHNC"))
BLOCKS: Final = 32
"""Blocks of 16 tokens in a request. The pools have twice as many."""

ROUNDS: Final = 7
TIMEOUT_S: Final = 120.0

NVLINKS_ALONE: Final = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "auto"}
BY_TCP: Final = {"UCX_TLS": "tcp,cuda_copy"}
WITHOUT_CMA: Final = {"UCX_TLS": "^cma"}
"""Settings of UCX, as the environment has them."""

FAULTS: Final = ("lives", "is suspended", "deregisters", "closes", "is killed", "was killed before")
"""What a source does while it is read."""

FAULT_MODEL: Final = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""A model with 4 KiB for each token, which is a block of its own."""

FAULT_BLOCKS: Final = 1 << 16
FAULT_TIMEOUT_S: Final = 15.0

LATE_S: Final = 0.5
"""Seconds after the end of a read in which bytes may land that come too late."""


def check(device: str) -> list[str]:
    """Run the executor contract in memory of a device. Return the names of its tests, or raise an AssertionError."""
    from benchmarks.real_memory import NixlCluster

    class OnDevice(ExecutorContract):
        def open_cluster(self, workers: Sequence[Worker]) -> AbstractContextManager[Any]:
            return NixlCluster(workers, device)

    return OnDevice().check()


def ranges(worker: Worker, memory: dict[str, Any], descriptors: Any) -> list[Any]:
    """Return descriptors as slices of a worker's tensors."""
    regions = sorted(worker.regions, key=lambda region: region.address)
    starts = np.array([region.address for region in regions], np.uint64)
    # one element for each descriptor: the index of its region, and where it begins in that region
    region_indices = np.searchsorted(starts, descriptors[:, 0], side="right") - 1
    offsets = (descriptors[:, 0] - starts[region_indices]).tolist()
    slices = []
    for i, offset, length in zip(region_indices.tolist(), offsets, descriptors[:, 1].tolist(), strict=True):
        slices.append(memory[regions[i].name][offset : offset + length])
    return slices


def median(once: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Return the median seconds of a call and of the work that it starts on the devices, after a first call."""
    seconds = []
    for _ in range(ROUNDS + 1):
        synchronize()
        began = time.perf_counter()
        once()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[str]:
    """Set variables of the environment for a while. Yield them in words."""
    os.environ.update(settings)
    try:
        yield " ".join(f"{name}={value}" for name, value in settings.items()) or "kvplan's"
    finally:
        for name in settings:
            del os.environ[name]


def measure(settings: str, layouts: tuple[str, str], devices: tuple[str, str]) -> str:
    """Return a row of the table: a request from the first device and layout to the second."""
    import torch

    from benchmarks.real_memory import PeerProcess, fill, placed, synchronized
    from kvplan_nixl import UCX, NixlExecutor, settle

    def synchronize() -> None:
        for device in devices:
            synchronized(device)

    model = Model.shipped(MODEL)
    (prefill_worker, *_) = model.engine("prefill", layout=layouts[0], num_blocks=2 * BLOCKS)
    (decode_worker, *_) = model.engine("decode", layout=layouts[1], num_blocks=2 * BLOCKS)
    # a twin of the other process' worker, for torch
    twin, twin_memory = placed(prefill_worker, devices[0])
    # last, since this process has an executor on that device
    local, local_memory = placed(decode_worker, devices[1])
    fill(twin, twin_memory, devices[0])
    rng = np.random.default_rng(1)
    local_blocks = {"attn": Blocks(rng.permutation(2 * BLOCKS)[:BLOCKS])}
    remote_blocks = {"attn": Blocks(rng.permutation(2 * BLOCKS)[:BLOCKS])}
    synchronize()
    with PeerProcess(prefill_worker, UCX, devices[0]) as prefill, NixlExecutor(local) as decode:
        source = decode.connect(prefill.ask("envelope"))
        plan = plan_reads(local, [source])
        decode.prepare(plan)

        def request() -> ReadSpec:
            (spec,) = plan.bind(local=local_blocks, remote=remote_blocks, tokens=(0, 16 * BLOCKS))
            transfer = decode.start(spec, "request")
            if not settle(decode, [transfer], TIMEOUT_S) or transfer.error is not None:
                raise transfer.error or TimeoutError(f"{transfer!r}")
            decode.release(transfer)
            return spec

        spec = request()
        synchronize()
        local_descriptors, remote_descriptors = spec.descriptors()
        written = ranges(local, local_memory, local_descriptors)
        read = ranges(source, twin_memory, remote_descriptors)
        for written_bytes, read_bytes in zip(written[:1000], read[:1000], strict=True):
            assert torch.equal(written_bytes.cpu(), read_bytes.cpu())
        by_nixl = median(request, synchronize)
    whole = [torch.zeros(spec.num_bytes, dtype=torch.uint8, device=device) for device in devices]
    in_one = median(lambda: whole[1].copy_(whole[0], non_blocking=True), synchronize)

    def piece_by_piece() -> None:
        for written_bytes, read_bytes in zip(written, read, strict=True):
            written_bytes.copy_(read_bytes, non_blocking=True)

    one_by_one = median(piece_by_piece, synchronize)
    figures = (f"{spec.num_bytes / seconds / 1e9:.2f}" for seconds in (by_nixl, in_one, one_by_one))
    return (
        f"| {settings} | {' to '.join(dict.fromkeys(devices))} | {' to '.join(layouts)} | {spec.num_descriptors:,} | "
        f"{spec.num_bytes // spec.num_descriptors:,} | {' | '.join(figures)} | {by_nixl / one_by_one:.2f} |"
    )


def faulty(settings: str, fault: str, device: str) -> str:
    """Return a row of the last table: many blocks are read from a source with a fault."""
    import torch

    from benchmarks.real_memory import PeerProcess, pattern, placed, synchronized
    from kvplan_nixl import UCX, NixlExecutor, settle

    model = Model.from_config(FAULT_MODEL, "a model")
    (prefill_worker,) = model.engine("prefill", tokens_per_block=1, num_blocks=FAULT_BLOCKS)
    (decode_worker,) = model.engine("decode", tokens_per_block=1, num_blocks=FAULT_BLOCKS)
    local, memory = placed(decode_worker, device)
    ((region, cache),) = memory.items()
    # no two blocks are neighbours on both sides, so each is a descriptor
    order = np.random.default_rng(1).permutation(FAULT_BLOCKS)
    expected = torch.from_numpy(pattern(prefill_worker, region)).to(device).view(FAULT_BLOCKS, -1)
    block_bytes = expected.shape[1]
    with PeerProcess(prefill_worker, UCX, device) as source, NixlExecutor(local) as decode:
        plan = plan_reads(local, [decode.connect(source.ask("envelope"))])
        decode.prepare(plan)
        ours, theirs = {"attn": Blocks(range(FAULT_BLOCKS))}, {"attn": Blocks(order)}
        (warm,) = plan.bind(local={"attn": Blocks([0])}, remote={"attn": Blocks([0])}, tokens=(0, 1))
        settle(decode, [decode.start(warm, "first")], TIMEOUT_S)
        # the blocks of the second read are told by what they have
        cache.zero_()
        synchronized(device)
        (spec,) = plan.bind(local=ours, remote=theirs, tokens=(0, FAULT_BLOCKS))
        if fault == "was killed before":
            source.kill()
        began_s = time.perf_counter()
        transfer = decode.start(spec, "request")
        posted_s = time.perf_counter()
        actions: dict[str, Callable[[], object]] = {
            "is suspended": source.stop,
            "deregisters": lambda: source.channel.send(("deregister",)),
            "closes": lambda: source.channel.send(("close",)),
            "is killed": source.kill,
        }
        actions.get(fault, lambda: None)()
        settle(decode, [transfer], FAULT_TIMEOUT_S)
        ended_s = time.perf_counter()
        end = transfer.status.name if transfer.error is None else f"{transfer.status.name} {transfer.error.code}"
        synchronized(device)
        blocks = cache.view(FAULT_BLOCKS, block_bytes)
        is_right = (blocks == expected[torch.from_numpy(order).to(device)]).all(dim=1)
        is_written = (blocks != 0).any(dim=1)
        cache.zero_()
        synchronized(device)
        if fault == "is suspended":
            source.resume()
        time.sleep(LATE_S)
        synchronized(device)
        num_late = int((blocks != 0).any(dim=1).sum())
    num_right = int(is_right.sum())
    num_wrong = int((is_written & ~is_right).sum())
    return (
        f"| {settings} | {fault} | {1000 * (posted_s - began_s):.0f} | {1000 * (ended_s - posted_s):,.0f} | {end} | "
        f"{num_right:,} | {num_wrong:,} | {num_late:,} |"
    )


def main(arguments: list[str]) -> int:
    """Check and measure. The exit status is 0, also without a GPU."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    try:
        import torch
    except ImportError:
        print("no torch, so no GPU: nothing to run")
        return 0
    torch.set_num_threads(1)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = arguments or [f"cuda:{i}" for i in range(min(count, 2))]
    if not devices:
        print("no GPU: nothing to run")
        return 0
    names = [
        torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or device
        for device in devices
    ]
    print(f"{time.strftime('%Y-%m-%d')}: {', '.join(names)}, torch {torch.__version__}, nixl {version('nixl')}")
    print(f"{len(check(devices[0]))} tests of the executor contract: every byte right, read and written")
    print(f"\n{MODEL}, {16 * BLOCKS} tokens, GB/s:\n")
    is_on_gpu = devices[0] != "cpu"
    print(
        "| settings | from, to | layouts | descriptors | bytes each | NIXL | in one | one by one | NIXL / one by one |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for more in ({}, NVLINKS_ALONE) if is_on_gpu else ({},):
        with environment(more) as settings:
            for pair in dict.fromkeys([(devices[0], devices[0]), (devices[0], devices[-1])]):
                for layouts in LAYOUTS:
                    print(measure(settings, layouts, pair), flush=True)
    print(f"\n{FAULT_BLOCKS:,} blocks from a source on {devices[0]} that fails under the read:\n")
    print("| settings | the source | ms to post | ms to the end | the read | right | wrong | blocks that land later |")
    print("|---|---|---|---|---|---|---|---|")
    for more in ({}, NVLINKS_ALONE) if is_on_gpu else ({}, WITHOUT_CMA, BY_TCP):
        with environment(more) as settings:
            for fault in FAULTS:
                print(faulty(settings, fault, devices[0]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
