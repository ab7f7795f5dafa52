"""Parallel sizes: which layers, heads and positions each rank of an engine holds.

- The world rank is ``(pp_rank*pcp + pcp_rank)*tp + tp_rank``: PP is the slowest, TP the fastest
  (``initialize_model_parallel`` of vllm/distributed/parallel_state.py, 0.33).
- Runs of ``interleave`` positions go to the ``dcp`` context ranks in turn. These are existing
  ranks, counted over PCP first, then TP: a worker's context rank is
  ``(tp_rank*pcp + pcp_rank) % dcp``. PCP alone therefore replicates the cache, as in vLLM since
  0.26 (``prefill_context_parallel_size`` of vllm/config/parallel.py: it "does not increase the
  KV-cache shard count"). With pcp > 1, vLLM 0.33 accepts a dcp of 1, pcp or tp*pcp; here it is any
  divisor of tp*pcp.

The ranks over which the positions of a head are spread must all hold that head. Recurrent states
are not spread: every rank has the states of its heads.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs

from kvplan._checks import check_fields, integer
from kvplan._text import count
from kvplan.describe.axes import Axis
from kvplan.describe.views import TOKEN, Context
from kvplan.models.layouts import LocalTensor, Page, check_word, layout_error
from kvplan.models.tensors import Layer, Tensor
from kvplan.models.values import MAX_LAYERS

MAX_RANKS: Final = 1 << 16

SCALES: Final = ("inline", "page", "region")
"""Where scales of a quantized cache are.

They follow each head's values, or those of all heads, or have a region of their own.
"""


@attrs.frozen
class Parallel:
    """The sizes of tensor, pipeline, decode context and prefill context parallelism of one engine.

    >>> sizes = Parallel(tp=2, pcp=2, dcp=4)
    >>> [sizes.context(pcp_rank, tp_rank).rank for pcp_rank in (0, 1) for tp_rank in (0, 1)]
    [0, 2, 1, 3]
    >>> print(Parallel(pcp=2).context(1, 0))
    Context(rank=0, size=1, interleave_tokens=1)
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1

    def __attrs_post_init__(self) -> None:
        check_fields(self, "an engine", integer, "tp", "pp", "dcp", "pcp", low=1, high=MAX_RANKS)
        integer(self.tp * self.pp * self.pcp, "tp * pp * pcp", high=MAX_RANKS)

    def context(self, pcp_rank: int, tp_rank: int) -> Context:
        """Return the context of a worker: which positions it holds."""
        rank = (tp_rank * self.pcp + pcp_rank) % self.dcp
        return Context(rank, self.dcp, self.interleave)

    def check(self, model_name: str, tensors: Iterable[Tensor]) -> None:
        """Raise ``LAYOUT`` if no rank would hold some positions of one of the ``tensors``."""
        action = f"spread positions of {model_name}"
        # PCP ranks that replicate the cache hold it as often as TP ranks do.
        num_ranks = self.tp * self.pcp
        if num_ranks % self.dcp:
            reused = "tp" if self.pcp == 1 else "tp * pcp"
            expected = f"dcp that divides {reused} {num_ranks}, whose ranks it reuses"
            raise layout_error(action, expected, f"dcp={self.dcp}", tp=self.tp, dcp=self.dcp)
        for tensor in tensors:
            heads = tensor.shards
            holders = tensor.replicas(self.tp) * self.pcp
            if holders < self.dcp:
                ranks_of_head = f"{count(holders, 'rank')} per head"
                shared = f"{num_ranks} ranks / {count(heads, 'KV head')} = {ranks_of_head}"
                # PCP copies count too, but only TP makes more of them.
                needed_tp = -(-self.dcp // self.pcp) * heads
                hint = f"{shared}; dcp={self.dcp} needs tp={needed_tp}"
                expected = f"dcp <= {holders}"
                got = f"dcp={self.dcp}"
                raise layout_error(
                    action, expected, got, hint, tp=self.tp, dcp=self.dcp, heads=heads
                )


def stages_of(
    num_layers: int,
    pp: int,
    layers_per_stage: Sequence[int] | None = None,
) -> list[range]:
    """Return the layers of each pipeline stage: as many as stated, or equally many.

    The remainder of equal stages goes to the stages before the last, one layer each, the latest
    first (``get_pp_indices`` of vllm/distributed/utils.py, 0.33). Raises ``LAYOUT`` if a stage has
    no layers, or if the stages do not add up to ``pp`` stages and ``num_layers`` layers.

    >>> stages_of(5, 2), stages_of(5, 2, [1, 4])
    ([range(0, 3), range(3, 5)], [range(0, 1), range(1, 5)])
    """
    if layers_per_stage is None:
        layer_counts = _equal_stages(num_layers, pp)
    else:
        layer_counts = []
        for length in layers_per_stage:
            layer_counts.append(integer(length, "layers_per_stage", low=1, high=MAX_LAYERS))
    if sum(layer_counts) != num_layers or len(layer_counts) != pp:
        expected = f"{count(num_layers, 'layer')} in {count(pp, 'stage')}"
        got = f"{count(sum(layer_counts), 'layer')} in {count(len(layer_counts), 'stage')}"
        raise layout_error("divide layers into stages", expected, got, pp=pp, layers=num_layers)
    stops = list(itertools.accumulate(layer_counts))
    return [range(stop - length, stop) for stop, length in zip(stops, layer_counts, strict=True)]


def _equal_stages(num_layers: int, pp: int) -> list[int]:
    """Return the number of layers of each stage, as equal as can be."""
    if pp > num_layers:
        action = "divide layers into stages"
        expected = f"pp <= {num_layers}, the number of layers"
        raise layout_error(action, expected, f"{pp}", pp=pp, layers=num_layers)
    length, remainder = divmod(num_layers, pp)
    # The stages before the last have one layer more, as many of them as there are layers left.
    first_longer = pp - 1 - remainder
    return [length + (first_longer <= stage < pp - 1) for stage in range(pp)]


@attrs.frozen
class RankShard:
    """The shard of any layer that tensor-parallel rank ``rank`` of ``ranks`` holds.

    ``blocks`` says how many tokens a block of each token group has. ``dtype`` is that of tensors
    without one.

    >>> from kvplan.models.tensors import attention
    >>> local = RankShard(1, 2, {"attn": 16}).tensor(attention(8, 128)[0])
    >>> print(*local.axes, sep="; ")
    kv [0, 2) of 2 stride 0; head [4, 8) of 8 stride 0; dim [0, 128) of 128 stride 0;
    token [0, 16) of 16 stride 0
    """

    rank: int
    ranks: int
    blocks: Mapping[str, int]
    dtype: str = "bfloat16"
    scales: str = "inline"

    def __attrs_post_init__(self) -> None:
        check_word(SCALES, self.scales, "scales")

    def tensor(self, tensor: Tensor, prefix: str = "") -> LocalTensor:
        """Return the rank's shard of a tensor, named by ``prefix`` and its kind."""
        axes = tensor.local_axes(self.rank, self.ranks)
        if tensor.paged:
            slots = self.blocks[tensor.group]
            axes += (Axis(TOKEN, 0, slots, slots, 0),)
        return LocalTensor(prefix + tensor.kind, tensor.group, tensor.dtype or self.dtype, axes)

    def tensor_bytes(self, layer: Layer) -> dict[str, int]:
        """Return the bytes of one block of the rank's shard of each tensor, by kind."""
        return {tensor.kind: self.tensor(tensor).block_bytes for tensor in layer}

    def page_bytes(self, layer: Layer) -> Counter[str]:
        """Return the bytes of one block of all tensors with tokens together, by group."""
        page_bytes = Counter[str]()
        for tensor in layer:
            if tensor.paged:
                page_bytes[tensor.group] += self.tensor(tensor).block_bytes
        return page_bytes

    def pages(self, layer: Layer, prefix: str = "") -> Iterator[tuple[str, Page]]:
        """Yield the rank's pages of a layer, each with the name of its pool."""
        # The tensors of each section, by group and pool.
        pages: dict[tuple[str, str], dict[str, list[LocalTensor]]] = {}
        for tensor in layer:
            pool = tensor.pool
            section = tensor.section
            # Scales in the page keep their own section; elsewhere they leave the page, or join
            # the section of the values that they scale.
            if tensor.scale_of is not None and self.scales == "region":
                pool = tensor.kind
            elif tensor.scale_of and self.scales == "inline":
                section = tensor.scale_of
            sections = pages.setdefault((tensor.group, pool), {})
            sections.setdefault(section, []).append(self.tensor(tensor, prefix))
        for (group, pool), sections in pages.items():
            yield f"{group}.{pool}", Page(prefix + pool, tuple(map(tuple, sections.values())))
