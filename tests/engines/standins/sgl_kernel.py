"""Stands in for SGLang's CUDA kernels, which no CPU build has: names exist, and nothing can be called."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


class Name(type):
    """A class whose attributes are such classes again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name, (), {})


def __getattr__(name: str) -> Any:
    return getattr(Name("sgl_kernel", (), {}), name)


def unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that makes a tensor, which never pins its memory: only a GPU needs that, and has it."""

    @wraps(function)
    def make(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return function(*arguments, **options)

    return make


# SGLang's adapters pin memory on a CPU too, where torch raises.
for name in ("arange", "empty", "tensor", "zeros"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[assignment, method-assign]
