"""Layouts: the orders in which engines keep a pool of blocks in memory, as strides.

An order names the dimensions of a pool from the slowest to the fastest: ``L`` layer, ``B`` block, ``H`` head,
``N`` token, ``C`` content. A tensor without one of them (a latent has no head) leaves the letter out. Where ``L``
stands first each layer has a region of its own; otherwise one region holds all layers of the pool.

The kv form says where the ``kv`` axis, K before V, goes::

    content   inside C: K and V of a slot side by side             LBHNC  [block, head, token, 2 * dim]
    axis      right inside the later of L and B                    LBHNC  [block, 2, head, token, dim]
    split     K and V in separate regions, one view for each       LBHNC  2 x [block, head, token, dim]

A page, what one block keeps of one layer, is a row of *strips*, one after the other. A strip holds tensors that
share heads and slots, their contents side by side. So scales stand inline, as a second tensor of the strip of
what they scale, or behind all heads' data, as a strip of their own; and a recurrent state is the strip of its
convolution and the strip of its SSM state::

    conv=DS   channel by channel      [x: channel, step] [B: channel, step] [C: channel, step] [ssm]
    conv=SD   step by step            [step, x channels | B channels | C channels]             [ssm]

``kernel_tokens`` makes the pool one of kernel blocks: each block is several of them, one after the other, and
the order holds for the kernel blocks. ``pad_bytes`` follow each block, so a block is never contiguous with the
next. All of it is one list of dimensions, with strides counted from the fastest; no order is a special case.

The six orders are those of vLLM's ``KVCacheLayout`` (vllm/v1/kv_cache_layout.py, 0.33), which calls two of them ``NHD``
and ``HND`` as well (vllm/config/cache.py, 0.33). A cache with K and V outside its blocks, ``[2, block, ...]``, has none
of the three kv forms; :func:`kvplan.view_of` describes it. The two of the convolution
those of ``VLLM_SSM_CONV_STATE_LAYOUT`` (vllm/model_executor/layers/mamba/mamba_utils.py, 0.33). There ``SD`` is the
default, and vLLM's connectors for NIXL and MoRI-IO take ``DS`` alone; SGLang keeps ``SD`` for KDA and ``DS`` for the
rest (sglang/srt/configs/mamba_utils.py, 0.5.23). Here ``DS`` is the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import integer
from kvplan.describe.axes import Axis
from kvplan.describe.views import ITEMSIZE
from kvplan.errors import KVPlanError

ORDERS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""The known orders, each from the slowest dimension to the fastest."""

LETTERS: Final = "L layer, B block, H head, N token, C content"
"""What the letters of an order stand for."""

OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType({"NHD": "LBNHC", "HND": "LBHNC"})
"""Orders by the names that vLLM also has for them."""

KV_FORMS: Final = ("content", "axis", "split")
"""Where K and V stand in relation to each other."""

CONV_ORDERS: Final = ("DS", "SD")
"""The orders of a convolution's state: channels outside steps, and steps outside channels."""

LAYER: Final = "layer"
BLOCK: Final = "block"
HEAD: Final = "head"
KV: Final = "kv"
STEP: Final = "step"

MAX_PAD_BYTES: Final = 1 << 40


def _one_of(known: tuple[str, ...], value: Any, what: str, hint: str = "") -> str:
    if not isinstance(value, str) or value not in known:
        expected = f"one of {', '.join(known)}"
        raise KVPlanError("LAYOUT", f"read {what}", expected=expected, got=repr(value), hint=hint, value=value)
    return value


def _order(value: Any) -> str:
    other = OTHER_NAMES.get(value) if isinstance(value, str) else None
    return _one_of(ORDERS, value, "layout", f"vLLM's {value} is {other}" if other else LETTERS)


def _form(value: Any) -> str:
    return _one_of(KV_FORMS, value, "kv")


def _conv(value: Any) -> str:
    return _one_of(CONV_ORDERS, value, "conv")


def _pad(value: Any) -> int:
    return integer(value, "pad", high=MAX_PAD_BYTES)


def _kernel(value: Any) -> int | None:
    return None if value is None else integer(value, "kernel_tokens", low=1, high=1 << 31)


@attrs.frozen
class Layout:
    """How a pool of blocks lies in memory: one of :data:`ORDERS`, :data:`KV_FORMS` and :data:`CONV_ORDERS`, and more.

    ``pad_bytes`` is the gap after each block; ``kernel_tokens``, where given, how many slots a kernel block has.
    Raises ``LAYOUT`` for an unknown word, ``TYPE`` or ``RANGE`` for a bad number.

    >>> Layout("LBHNC", kv="interleaved")
    Traceback (most recent call last):
    ...
    kvplan.errors.KVPlanError: LAYOUT: cannot read kv: expected one of content, axis, split, got 'interleaved'
    """

    order: str = attrs.field(default="LBHNC", converter=_order)
    kv: str = attrs.field(default="content", converter=_form)
    pad_bytes: int = attrs.field(default=0, converter=_pad)
    kernel_tokens: int | None = attrs.field(default=None, converter=_kernel)
    conv: str = attrs.field(default="DS", converter=_conv)

    @property
    def inside(self) -> str:
        """The letters inside a page: those faster than both layer and block."""
        return self.order[max(map(self.order.index, "LB")) + 1 :]


@attrs.frozen
class Held:
    """What one worker holds of the logical tensor ``name``, before a layout gives it strides.

    ``axes`` say which part of each global size is held; their strides mean nothing. Content axes (any but
    ``kv``, ``head`` and ``token``) stand from the slowest to the fastest.
    """

    name: str
    group: str
    dtype: str
    axes: tuple[Axis, ...]

    def __attrs_post_init__(self) -> None:
        what = f"place tensor {self.name!r}"
        for axis in self.axes:
            if axis.name in (LAYER, BLOCK):
                expected = f"axes other than {LAYER!r} and {BLOCK!r}, which its pool has"
                raise KVPlanError("AXES", what, expected=expected, got=repr(axis.name), axis=axis.name)
        if self.dtype not in ITEMSIZE:
            expected = f"a dtype of {', '.join(ITEMSIZE)}"
            raise KVPlanError("DTYPE", what, expected=expected, got=repr(self.dtype), dtype=self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of data that one block holds."""
        count = ITEMSIZE[self.dtype]
        for axis in self.axes:
            count *= axis.extent
        return count


Strip = tuple[Held, ...]


@attrs.frozen
class Page:
    """What one block keeps of one layer: strips of tensors, and a name for the region of the layer."""

    name: str
    strips: tuple[Strip, ...]

    @classmethod
    def of(cls, *tensors: Held) -> Page:
        """A page of one strip, named after its first tensor."""
        return cls(tensors[0].name, (tensors,))

    @property
    def tensors(self) -> Iterator[Held]:
        """The tensors of all strips."""
        return (tensor for strip in self.strips for tensor in strip)
