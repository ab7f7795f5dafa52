"""Shares: what one tensor-parallel rank keeps of a layer, and how large that makes the blocks of each group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from kvplan._checks import integer
from kvplan.describe.axes import Axis
from kvplan.describe.views import TOKEN
from kvplan.errors import KVPlanError
from kvplan.models.layouts import Held, Layout, Page
from kvplan.models.pools import page_bytes
from kvplan.models.tensors import Layer, Tensor

SCALES: Final = ("inline", "page", "region")
"""Where the scales of a quantized cache stand: beside each head's values, behind those of all heads, or apart."""


def tokens_of_block(value: Any) -> int:
    """``value`` as a number of tokens in a block.

    >>> tokens_of_block(16)
    16
    """
    return integer(value, "tokens_per_block", low=1, high=1 << 31)


def _scales(value: Any) -> str:
    if value not in SCALES:
        raise KVPlanError("LAYOUT", "read scales", expected=f"one of {', '.join(SCALES)}", got=repr(value))
    return str(value)


@attrs.frozen
class Share:
    """What rank ``rank`` of ``ranks`` keeps of any layer, given the tokens in a block of each token group.

    ``dtype`` is that of tensors which state none.

    >>> from kvplan.models.tensors import attention
    >>> held = Share(1, 2, {"attn": 16}).held(attention(8, 128)[0])
    >>> print(*held.axes, sep="; ")
    kv [0, 2) of 2 step 0; head [4, 8) of 8 step 0; dim [0, 128) of 128 step 0; token [0, 16) of 16 step 0
    """

    rank: int
    ranks: int
    blocks: Mapping[str, int]
    dtype: str = "bfloat16"
    scales: str = attrs.field(default="inline", converter=_scales)

    def held(self, tensor: Tensor, prefix: str = "") -> Held:
        """The rank's part of a tensor whose name is ``prefix`` and its kind."""
        axes = tensor.parts(self.rank, self.ranks)
        if tensor.paged:
            tokens = self.blocks[tensor.group]
            axes += (Axis(TOKEN, 0, tokens, tokens, 0),)
        return Held(prefix + tensor.kind, tensor.group, tensor.dtype or self.dtype, axes)

    def pages(self, layer: Layer, prefix: str = "") -> Iterator[tuple[str, Page]]:
        """The rank's pages of a layer, each with the name of its pool."""
        pages: dict[tuple[str, str], dict[str, list[Held]]] = {}
        for tensor in layer:
            apart = tensor.scale_of is not None and self.scales == "region"
            pool = tensor.kind if apart else tensor.pool
            strip = tensor.scale_of if tensor.scale_of is not None and self.scales == "inline" else tensor.strip
            pages.setdefault((tensor.group, pool), {}).setdefault(strip, []).append(self.held(tensor, prefix))
        for (group, pool), strips in pages.items():
            yield f"{group}.{pool}", Page(prefix + pool, tuple(map(tuple, strips.values())))


def shares(ranks: int, blocks: Mapping[str, int], dtype: str) -> Iterator[Share]:
    """The share of each rank."""
    return (Share(rank, ranks, blocks, dtype) for rank in range(ranks))


def stated_blocks(model_name: str, groups: tuple[str, ...], tokens: Mapping[str, int]) -> dict[str, int]:
    """Tokens in a block of each of ``groups`` as ``tokens`` states them. Raises ``NAME`` unless it states just those.

    >>> stated_blocks("gemma-4-31b", ("swa", "attn"), {"attn": 16, "swa": 48})
    {'swa': 48, 'attn': 16}
    """
    if set(tokens) != set(groups):
        raise KVPlanError(
            "NAME",
            f"page {model_name}",
            expected=f"tokens_per_block of {', '.join(groups) or 'no group'}",
            got=", ".join(map(str, tokens)) or "none",
            groups=groups,
        )
    return {group: tokens_of_block(tokens[group]) for group in groups}


def equal_blocks(layers: Iterable[Layer], tp: int, tokens: Mapping[str, int], dtype: str) -> dict[str, int]:
    """Tokens in a block of each group, so that groups of smaller pages have blocks as large as the largest page.

    A group whose page does not divide the largest keeps its ``tokens`` (``unify_kv_cache_spec_page_size`` of
    vllm/v1/core/kv_cache_planning.py, 0.33, which pads such a page).

    >>> from kvplan.models.tensors import attention
    >>> equal_blocks([attention(16, 256, "swa"), attention(4, 512)], 4, {"swa": 16, "attn": 16}, "bfloat16")
    {'swa': 16, 'attn': 32}
    """
    pages: dict[str, int] = {}
    for layer in dict.fromkeys(layers):
        for group in dict.fromkeys(tensor.group for tensor in layer if tensor.paged):
            for share in shares(tp, tokens, dtype):
                size = sum(share.held(tensor).block_bytes for tensor in layer if tensor.group == group)
                pages[group] = max(pages.get(group, 0), size)
    largest = max(pages.values(), default=0)
    return {g: n if g not in pages or largest % pages[g] else n * largest // pages[g] for g, n in tokens.items()}


def kernel_blocks(layers: Iterable[Layer], tp: int, kernel_tokens: int, kv: str, dtype: str) -> int:
    """How many kernel blocks of ``kernel_tokens`` a page of attention needs to be as large as that of a state.

    1 where there are not both.

    >>> from kvplan.models.tensors import attention
    >>> from kvplan.models.states import mamba1
    >>> kernel_blocks([attention(2, 8), mamba1(64, 16, 3, "bfloat16", "float32")], 1, 16, "content", "bfloat16")
    5
    """
    layout = Layout(kv=kv)
    layers = list(dict.fromkeys(layers))
    blocks = {tensor.group: tokens_of_block(kernel_tokens) for layer in layers for tensor in layer}
    needed = 1
    for share in shares(tp, blocks, dtype):
        pages = {True: 0, False: 0}
        for layer in layers:
            for paged in pages:
                for _, page in share.pages(tuple(tensor for tensor in layer if tensor.paged == paged)):
                    pages[paged] = max(pages[paged], page_bytes(layout, page))
        if pages[True]:
            needed = max(needed, -(-pages[False] // pages[True]))
    return needed
