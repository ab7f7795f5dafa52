"""Stands in for SGLang's CUDA kernels, which no CPU build has: names exist, and nothing can be called."""

from __future__ import annotations

from typing import Any


class Name(type):
    """A class whose attributes are such classes again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name, (), {})


def __getattr__(name: str) -> Any:
    return getattr(Name("sgl_kernel", (), {}), name)
