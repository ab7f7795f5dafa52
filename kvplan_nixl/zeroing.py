"""Sets bytes of tensors to zero, such as the :func:`~kvplan.tails` of a request that has been read.

Some engines ask for it: their kernels multiply the slots after a request's last token by 0, and 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from kvplan._arrays import listed
from kvplan.plan.rows import Descriptors
from kvplan_nixl.rearrange import Memory


def memories_of(tensors: Iterable[torch.Tensor]) -> tuple[Memory, ...]:
    """The memory of tensors, each storage once."""
    return tuple({tensor.untyped_storage().data_ptr(): Memory(tensor) for tensor in tensors}.values())


def set_zero(memories: Iterable[Memory], descriptors: Descriptors) -> None:
    """Set all bytes of descriptors, (n, 3) of address, length and device, to zero. Those in no memory stay.

    >>> cache = torch.ones(4, 3, dtype=torch.uint8)
    >>> rows = [[cache.data_ptr() + 2, 3, 0], [cache.data_ptr() + 9, 1, 0]]
    >>> set_zero(memories_of([cache]), np.array(rows, np.uint64))
    >>> cache.tolist()
    [[1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 1, 1]]
    """
    for memory in memories:
        start = descriptors[:, 0].astype(np.int64) - memory.address
        inside = (start >= 0) & (start < memory.size_bytes)
        if inside.any():
            stop = start[inside] + descriptors[inside, 1].astype(np.int64)
            index = listed(np.stack([start[inside], stop], axis=1))  # of each byte in the storage
            words = memory.words(1)
            words.index_fill_(0, torch.from_numpy(index).to(words.device), 0)
