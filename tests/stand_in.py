"""A tensor with PyTorch's attributes and nothing behind them, for tests that need no memory."""

from __future__ import annotations

import math

import attrs


@attrs.frozen
class StandIn:
    """``strides`` counts elements, as PyTorch does; left out, the tensor is dense."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    dtype: str = "torch.bfloat16"
    address: int = 4096
    device: str = "cpu"

    def stride(self) -> tuple[int, ...]:
        """Elements from neighbour to neighbour."""
        if self.strides is None:
            return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        return self.strides

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.address
