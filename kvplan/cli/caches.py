"""The lines that say what a model caches: bytes per token and per request, sizes and dtypes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs

from kvplan._text import count
from kvplan.models import Model
from kvplan.models.tensors import Tensor


@attrs.frozen
class Cache:
    """A tensor of a model, and in how many layers it is cached.

    ``num_bytes`` is its size in one layer: of a token, or of a request if it is a state.
    """

    tensor: Tensor
    dtype: str
    num_layers: int
    num_bytes: int

    @property
    def total_bytes(self) -> int:
        """The size in all layers."""
        return self.num_layers * self.num_bytes

    def __str__(self) -> str:
        axes = ", ".join(f"{axis} {size}" for axis, size in self.tensor.axes)
        layers = count(self.num_layers, "layer")
        # layers that slide have a tensor of the same kind as layers that do not
        within = "chunks of " if self.tensor.chunked else ""
        slides = f" within {within}{self.tensor.window} tokens" if self.tensor.window else ""
        return f"{self.tensor.kind} [{axes}] {self.dtype}{slides} in {layers}"

    def to_json(self) -> dict[str, Any]:
        return {
            "tensor": self.tensor.kind,
            "group": self.tensor.group,
            "axes": dict(self.tensor.axes),
            "dtype": self.dtype,
            "window": self.tensor.window,
            "chunked": self.tensor.chunked,
            "layers": self.num_layers,
            "bytes": self.num_bytes,
            "per": "token" if self.tensor.paged else "request",
        }


def caches_of(model: Model) -> list[Cache]:
    """Return what a model caches, each distinct tensor once, without draft layers.

    >>> print(*caches_of(Model.shipped("gpt-oss-20b")), sep="; ")
    attn [kv 2, head 8, dim 64] bfloat16 within 128 tokens in 12 layers; \
attn [kv 2, head 8, dim 64] bfloat16 in 12 layers
    """
    num_layers = Counter[Tensor]()
    num_bytes = dict[Tensor, int]()
    blocks_of_one = dict.fromkeys(model.windows, 1)
    layers_bytes = model.tensor_bytes(tokens_per_block=blocks_of_one)
    for layer, bytes_by_kind in zip(model.layers, layers_bytes, strict=True):
        num_layers.update(layer)
        for tensor in layer:
            num_bytes[tensor] = bytes_by_kind[tensor.kind]
    caches = []
    for tensor, number in num_layers.items():
        caches.append(Cache(tensor, tensor.dtype or model.dtype, number, num_bytes[tensor]))
    return caches


def cache_lines(model: Model, engine_id: str = "") -> list[str]:
    """Return a line of what each token takes in all layers, and one of what each request takes.

    They are the bytes of a whole engine that holds everything once. ``engine_id`` names the engine.

    >>> print(*cache_lines(Model.shipped("falcon-mamba-7b")), sep="\\n")
      caches 36,700,160 bytes per request: conv.x [channel 8192, step 3] bfloat16 in 64 layers; \
ssm [channel 8192, state 16] float32 in 64 layers
    """
    lines = []
    subject = f"{engine_id} caches".strip()
    caches = caches_of(model)
    for unit, is_paged in (("token", True), ("request", False)):
        of_unit = [cache for cache in caches if cache.tensor.paged == is_paged]
        if of_unit:
            total_bytes = sum(cache.total_bytes for cache in of_unit)
            contents = "; ".join(map(str, of_unit))
            lines.append(f"  {subject} {total_bytes:,} bytes per {unit}: {contents}")
    return lines
