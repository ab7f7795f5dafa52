"""Bits of a real engine's cache that are flipped after a read: its digests have to tell, each time."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping
from typing import Any

import numpy as np


def flip_bits(worker: Any, num_flips: int) -> dict[str, int]:
    """Flip bits of what each request has read, one at a time, while decode verifies it; returns the counts.

    ``unseen`` counts flips after which the digests were right. The last bit of each request stays flipped.
    """
    counts = {"flips": 0, "unseen": 0}
    reads = worker._reads
    compare = reads._mismatch
    generator = random.Random(0)

    def flipping(job: Any, expected: Any) -> Any:
        if compare(job, expected) is not None:
            counts["unseen"] -= 1 << 30  # nothing was flipped yet
        places = addresses(job)
        for flip in range(num_flips):
            address, length = places[generator.randrange(len(places))]
            byte = ctypes.c_uint8.from_address(address + generator.randrange(length))
            bit = 1 << generator.randrange(8)
            byte.value ^= bit
            error = compare(job, expected)
            counts["flips"] += 1
            counts["unseen"] += error is None
            if flip < num_flips - 1:
                byte.value ^= bit
        return error

    reads._mismatch = flipping
    return counts


def addresses(job: Any) -> list[tuple[int, int]]:
    """The address and length of each run of bytes that a request has read."""
    bound: Mapping[str, Any] = {"local": job.read.local, "remote": job.read.remote, "tokens": job.read.tokens}
    runs: list[tuple[int, int]] = []
    for spec in job.plan.bind(**bound):
        local, _ = spec.descriptors()
        runs += [(int(address), int(length)) for address, length, _ in np.asarray(local)]
    return runs
