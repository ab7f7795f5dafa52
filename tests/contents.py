"""What the memory of both engines holds before and after a request, byte for byte, from the views' formula alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvplan import Blocks, FakeMemory, Worker
from kvplan.describe.worker import Key
from kvplan.verification.labels import needed, number, window

Bytes = npt.NDArray[np.uint8]
Contents = dict[tuple[Key, str], Bytes]
"""Bytes by worker, (engine id, rank), and region."""


def contents(
    sources: Sequence[Worker],
    destinations: Sequence[Worker],
    local: Mapping[str, Blocks],
    remote: Mapping[str, Blocks],
    tokens: Mapping[str, tuple[int, int]],
) -> tuple[Contents, Contents]:
    """Before and after. The request's bytes are told apart by what they mean; all others are noise, which stays."""
    views = [(worker, view) for worker in destinations for view in worker.views]
    groups = {(worker.key, group.name): group for worker in destinations for group in worker.groups}
    wanted = [
        (view, needed(groups[worker.key, view.group], local.get(view.group), tokens.get(view.group)))
        for worker, view in views
    ]
    tensors = number(wanted)
    before: Contents = {}
    after: Contents = {}
    for workers, blocks in ((sources, remote), (destinations, local)):
        for worker in workers:
            with FakeMemory([worker], label_bytes=4) as memory:
                for view in worker.views:
                    held = window(memory, worker, view, tensors[view.name], blocks.get(view.group))
                    for index, labels in held.chunks():
                        held.cells[index] = labels
                for region in worker.regions:
                    labels = memory.read(worker, region.address, region.size_bytes, region.device_id)
                    noise = np.random.default_rng(len(before)).integers(0, 256, labels.size, np.uint8)
                    filled, meant = noise.copy(), np.flatnonzero(labels)
                    filled[meant] = _byte(labels[meant])
                    place = (worker.key, region.name)
                    before[place], after[place] = (filled if workers is sources else noise), filled
    return before, after


def _byte(labels: npt.NDArray[Any]) -> Bytes:
    """Labels scattered over all bytes, so that neighbours, and equal places of other tokens, differ."""
    return ((labels.astype(np.uint32) * np.uint32(0x9E3779B1)) >> np.uint32(24)).astype(np.uint8)
