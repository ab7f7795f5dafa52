"""Digests of requests, compared with one plain copy of as many bytes in the same run.

    python -m benchmarks.digest                     # a minute, in main memory
    python -m benchmarks.digest --device cuda:0     # on a GPU
    python -m benchmarks.digest --tokens 8192 --case states

Each row is one worker's part of a request, in blocks in no order. The time of a digest is that of a
worker that is prepared once, from block tables to plain values; a copy has as many bytes, in one piece. Both
take turns, and each time is the median of the rounds: processor time in main memory, so that other
processes do not count, and time that passes on a GPU. Torch has one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch

from kvplan import Blocks, Model, Worker
from kvplan_nixl.digest import WorkerDigests
from kvplan_nixl.rearrange import memories_of

STATE_ORDINAL: Final = 7


@attrs.frozen
class Case:
    """An engine of a model, in words."""

    name: str
    model: str
    arguments: dict[str, Any]

    def worker(self, num_tokens: int) -> Worker:
        """The first worker, with as many blocks as a request has."""
        return Model.shipped(self.model).engine("prefill", num_blocks=-(-num_tokens // 16), **self.arguments)[0]


CASES: Final = (
    Case("heads outside tokens", "llama-3.1-70b", {"tp": 4, "layout": "LBHNC"}),
    Case("tokens outside heads", "llama-3.1-70b", {"tp": 4, "layout": "LBNHC"}),
    Case("K and V apart", "llama-3.1-70b", {"tp": 4, "layout": "LBNHC", "kv": "split"}),
    Case("latents", "deepseek-v3", {"tp": 8}),
    Case("rows of bytes", "deepseek-v3.2", {"tp": 8}),
    Case("states and heads", "granite-4.0-h-tiny", {"tp": 4}),
)


def placed(worker: Worker, device: str) -> tuple[Worker, list[torch.Tensor]]:
    """The worker with memory of random bytes on a device."""
    tensors = []
    regions = []
    for region in worker.regions:
        tensor = torch.randint(0, 256, (region.size_bytes,), dtype=torch.uint8, device=device)
        tensors.append(tensor)
        regions.append(attrs.evolve(region, address=tensor.data_ptr()))
    return attrs.evolve(worker, regions=regions), tensors


def tables_of(worker: Worker) -> dict[str, Blocks]:
    """All blocks of each pool in no order; one state."""
    rng = np.random.default_rng(1)
    num_blocks = {view.group: view.num_blocks for view in worker.views}
    tables = {}
    for group in worker.groups:
        if group.is_state:
            tables[group.name] = Blocks([0], ordinals=[STATE_ORDINAL])
        else:
            tables[group.name] = Blocks(rng.permutation(num_blocks[group.name]))
    return tables


def medians(actions: Sequence[Callable[[], Any]], rounds: int, device: str) -> list[float]:
    """Seconds that each action takes, the median of rounds in which they take turns."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds + 1):
        for action, times in zip(actions, seconds, strict=True):
            start = clock()
            action()
            if device != "cpu":
                torch.cuda.synchronize(device)
            times.append(clock() - start)
    return [statistics.median(times[1:]) for times in seconds]


def row(case: Case, num_tokens: int, rounds: int, device: str) -> str:
    """The row of a case."""
    worker, tensors = placed(case.worker(num_tokens), device)
    memories = memories_of(tensors)
    tables = tables_of(worker)
    span = (0, num_tokens)
    num_bytes = 0
    for view in worker.views:
        num_bytes += tables[view.group].ids.size * view.block_bytes
    plain = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    copy = torch.empty_like(plain)
    prepared = WorkerDigests(worker, memories)
    actions = [lambda: prepared.of(tables, span), lambda: copy.copy_(plain)]
    digest_s, copy_s = medians(actions, rounds, device)
    return (
        f"| {case.name}: {case.model} | {num_bytes / 1e6:.0f} | {digest_s * 1e3:.1f} "
        f"| {num_bytes / digest_s / 1e9:.2f} | {digest_s / copy_s:.1f} |"
    )


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.digest", description=__doc__)
    default = "cuda:0" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="where the caches are, as torch names it")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="of the request")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="that count")
    parser.add_argument("--case", default="", metavar="WORDS", help="cases with these words")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| worker's part | MB | ms | GB/s | times a copy |\n|---|---:|---:|---:|---:|")
    for case in CASES:
        if options.case in case.name:
            print(row(case, options.tokens, options.rounds, options.device), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
