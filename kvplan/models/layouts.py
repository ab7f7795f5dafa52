"""Layouts: the orders in which engines store a pool of blocks in memory.

An order names the dimensions of a pool from the slowest to the fastest: ``L`` layer, ``B`` block,
``H`` head, ``N`` token, ``C`` content. A tensor that lacks one of them (a latent has no head) skips
its letter. If ``L`` comes first, each layer has a region of its own; otherwise one region holds all
layers of the pool.

The kv form says where the ``kv`` axis (K, then V) goes, here in the order ``LBHNC``::

    content   inside C: K and V of a slot side by side         [block, head, token, 2 * dim]
    axis      directly inside L or B, whichever comes later    [block, 2, head, token, dim]
    split     K and V in separate regions, one view for each   2 x [block, head, token, dim]

A page is the part of a block that belongs to one layer. It is made of *sections*, one after the
other. Tensors of one section share heads and slots, and their contents are interleaved slot by
slot. Scales are either interleaved with the values that they scale, as a second tensor of that
section, or follow the values of all heads, as a section of their own. A recurrent state is two
sections, its convolution and its SSM state::

    conv=DS   channel by channel      [x: channel, step] [B: channel, step] [C: channel, step] [ssm]
    conv=SD   step by step            [step, x channels | B channels | C channels]             [ssm]

With ``kernel_tokens``, each block consists of several kernel blocks, one after the other, and the
order applies to the kernel blocks. ``pad_bytes`` follow each block.

The six orders are those of vLLM's ``KVCacheLayout`` (vllm/v1/kv_cache_layout.py, 0.33), which also
calls two of them ``NHD`` and ``HND`` (vllm/config/cache.py, 0.33). A cache with K and V outside its
blocks, ``[2, block, ...]``, has none of the three kv forms; describe it with
:func:`kvplan.view_of`. The two orders of the convolution are those of
``VLLM_SSM_CONV_STATE_LAYOUT`` (vllm/model_executor/layers/mamba/mamba_utils.py, 0.33). vLLM's
default is ``SD``, but its connectors for NIXL and MoRI-IO accept ``DS`` only. SGLang stores ``SD``
for KDA and ``DS`` for the rest (sglang/srt/configs/mamba_utils.py, 0.5.23). The default here is
``DS``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import check_fields, integer
from kvplan._text import plain, shown
from kvplan.describe.axes import Axis
from kvplan.describe.views import ITEMSIZE
from kvplan.errors import KVPlanError

ORDERS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""The known orders, each from the slowest dimension to the fastest."""

LETTERS: Final = "L layer, B block, H head, N token, C content"
"""The meaning of the letters of an order."""

OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType({"NHD": "LBNHC", "HND": "LBHNC"})
"""Orders by vLLM's other names for them."""

KV_FORMS: Final = ("content", "axis", "split")
"""Where K is relative to V."""

CONV_ORDERS: Final = ("DS", "SD")
"""The orders of a convolution's state: channels outside steps, and steps outside channels."""

LAYER: Final = "layer"
BLOCK: Final = "block"
HEAD: Final = "head"
KV: Final = "kv"
STEP: Final = "step"

MAX_PAD_BYTES: Final = 1 << 40


def check_word(words: tuple[str, ...], value: Any, subject: str, hint: str = "") -> None:
    """Raise ``LAYOUT`` unless ``value`` is one of the ``words``."""
    if not isinstance(value, str) or value not in words:
        expected = f"one of {', '.join(words)}"
        raise layout_error(f"read {subject}", expected, shown(value), hint, value=plain(value))


def layout_error(
    action: str, expected: str, got: str, hint: str = "", **details: Any
) -> KVPlanError:
    """Return the error for a layout, or for one of its options, that is unknown or impossible."""
    return KVPlanError("LAYOUT", action, expected=expected, got=got, hint=hint, **details)


@attrs.frozen
class Layout:
    """The arrangement of a pool of blocks in memory.

    ``order`` is one of :data:`ORDERS`, ``kv`` of :data:`KV_FORMS`, ``conv`` of :data:`CONV_ORDERS`.
    ``pad_bytes`` is the gap after each block. ``kernel_tokens`` is how many slots a kernel block
    has; None: blocks are not divided. Raises ``LAYOUT`` for an unknown word, ``TYPE`` or ``RANGE``
    for a bad number.

    >>> Layout("LBHNC", kv="interleaved")
    Traceback (most recent call last):
    ...
    kvplan.errors.KVPlanError: LAYOUT: cannot read kv: \
expected one of content, axis, split, got 'interleaved'
    """

    order: str = "LBHNC"
    kv: str = "content"
    pad_bytes: int = 0
    kernel_tokens: int | None = None
    conv: str = "DS"

    def __attrs_post_init__(self) -> None:
        # Users of vLLM may know an order by its other name.
        own_name = OTHER_NAMES.get(plain(self.order))
        hint = f"vLLM's {self.order} is {own_name}" if own_name else LETTERS
        check_word(ORDERS, self.order, "layout", hint)
        check_word(KV_FORMS, self.kv, "kv")
        check_word(CONV_ORDERS, self.conv, "conv")
        check_fields(self, "a layout", integer, "pad_bytes", high=MAX_PAD_BYTES)
        if self.kernel_tokens is not None:
            check_fields(self, "a layout", integer, "kernel_tokens", low=1, high=1 << 31)

    @property
    def inside(self) -> str:
        """The letters inside a page: those after both layer and block."""
        # The later of both letters is the innermost dimension around a page.
        return self.order[max(map(self.order.index, "LB")) + 1 :]


@attrs.frozen
class LocalTensor:
    """The part of the logical tensor ``name`` that one worker holds, before it has strides.

    ``axes`` say which part of each global size the worker holds; their strides mean nothing until a
    layout sets them. Content axes (any but ``kv``, ``head`` and ``token``) are ordered from the
    slowest to the fastest.
    """

    name: str
    group: str
    dtype: str
    axes: tuple[Axis, ...]

    def __attrs_post_init__(self) -> None:
        action = f"place tensor {self.name!r}"
        for axis in self.axes:
            # Layers and blocks are dimensions of a pool, not of a tensor.
            if axis.name in (LAYER, BLOCK):
                expected = f"axes other than {LAYER!r} and {BLOCK!r}, which its pool has"
                got = repr(axis.name)
                raise KVPlanError("AXES", action, expected=expected, got=got, axis=axis.name)
        if self.dtype not in ITEMSIZE:
            expected = f"a dtype of {', '.join(ITEMSIZE)}"
            got = repr(self.dtype)
            raise KVPlanError("DTYPE", action, expected=expected, got=got, dtype=self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of data in one block."""
        return ITEMSIZE[self.dtype] * math.prod(axis.extent for axis in self.axes)

    def has(self, axis_name: str) -> bool:
        """Return whether the tensor has an axis of this name."""
        return any(axis.name == axis_name for axis in self.axes)


@attrs.frozen
class Page:
    """The part of a block that one layer has: sections of interleaved tensors.

    The name is for the region of the layer.
    """

    name: str
    sections: tuple[tuple[LocalTensor, ...], ...]

    @classmethod
    def of(cls, *tensors: LocalTensor) -> Page:
        """Return a page of one section, named after its first tensor."""
        return cls(tensors[0].name, (tensors,))

    @property
    def tensors(self) -> Iterator[LocalTensor]:
        """The tensors of all sections."""
        return itertools.chain.from_iterable(self.sections)

    def has(self, axis_name: str) -> bool:
        """Return whether any of the tensors has an axis of this name."""
        return any(tensor.has(axis_name) for tensor in self.tensors)
