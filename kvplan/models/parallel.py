"""Parallel sizes: how many ranks an engine has, and which layers, heads and positions each of them holds.

- The world rank is ``(pp_rank*pcp + pcp_rank)*tp + tp_rank``: PP is the slowest, TP the fastest
  (``initialize_model_parallel`` of vllm/distributed/parallel_state.py, 0.33).
- Runs of ``interleave`` positions go to the ``dcp`` context ranks in turn. These are existing ranks, counted over PCP
  first, then TP: a worker's context rank is ``(tp_rank*pcp + pcp_rank) % dcp``. PCP alone therefore replicates the
  cache, as in vLLM since 0.26 (``prefill_context_parallel_size`` of vllm/config/parallel.py: it "does not increase the
  KV-cache shard count"). With pcp > 1, vLLM 0.33 accepts a dcp of 1, pcp or tp*pcp; here it is any divisor of tp*pcp.
- With ``pcp_spreads``, they go to ``pcp*dcp`` ranks in turn, and a worker's context rank is
  ``pcp_rank*dcp + tp_rank % dcp``, as in vLLM up to 0.25 (vllm/v1/worker/block_table.py).

In both cases the ranks over which the positions of a head are spread must all hold that head. Recurrent states are not
spread: every rank has the states of its heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from kvplan._checks import integer, settle, wrong_type
from kvplan.describe.axes import Axis
from kvplan.describe.views import TOKEN, Context
from kvplan.errors import KVPlanError
from kvplan.models.config import MAX_LAYERS
from kvplan.models.layouts import LocalTensor, Page, check_word
from kvplan.models.tensors import Layer, Tensor

MAX_RANKS: Final = 1 << 16

SCALES: Final = ("inline", "page", "region")
"""Where the scales of a quantized cache are: beside each head's values, behind those of all heads, or apart."""


def flag(value: Any, what: str) -> bool:
    """``value``, which must be True or False."""
    if not isinstance(value, bool):
        raise wrong_type(what, "True or False", value)
    return value


@attrs.frozen
class Parallel:
    """The sizes of tensor, pipeline, decode context and prefill context parallelism of one engine.

    >>> [Parallel(tp=2, pcp=2, dcp=4).context(pcp_rank, tp_rank).rank for pcp_rank in (0, 1) for tp_rank in (0, 1)]
    [0, 2, 1, 3]
    >>> print(Parallel(pcp=2).context(1, 0), Parallel(pcp=2, pcp_spreads=True).context(1, 0), sep="; ")
    Context(rank=0, size=1, interleave_tokens=1); Context(rank=1, size=2, interleave_tokens=1)
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    pcp_spreads: bool = False

    def __attrs_post_init__(self) -> None:
        settle(self, "an engine", integer, "tp", "pp", "dcp", "pcp", low=1, high=MAX_RANKS)
        integer(self.tp * self.pp * self.pcp, "tp * pp * pcp", high=MAX_RANKS)
        flag(self.pcp_spreads, "pcp_spreads")

    def context(self, pcp_rank: int, tp_rank: int) -> Context:
        """Which positions the worker holds."""
        if self.pcp_spreads:
            return Context(pcp_rank * self.dcp + tp_rank % self.dcp, self.pcp * self.dcp, self.interleave)
        return Context((tp_rank * self.pcp + pcp_rank) % self.dcp, self.dcp, self.interleave)

    def check(self, model_name: str, tensors: Iterable[Tensor]) -> None:
        """Raises ``LAYOUT`` if no rank would hold some positions of one of the ``tensors``."""
        copies, what = 1 if self.pcp_spreads else self.pcp, f"spread positions of {model_name}"
        ranks = self.tp * copies
        if ranks % self.dcp:
            expected = f"dcp that divides {'tp' if copies == 1 else 'tp * pcp'} {ranks}, whose ranks it reuses"
            raise KVPlanError("LAYOUT", what, expected=expected, got=f"{self.dcp}", tp=self.tp, dcp=self.dcp)
        for tensor in tensors:
            holders, heads = tensor.replicas(self.tp) * copies, tensor.shards
            if holders < self.dcp:
                expected = f"dcp <= {holders}, the number of the {ranks} ranks that hold each of {heads} heads"
                got = f"{self.dcp}"
                raise KVPlanError("LAYOUT", what, expected=expected, got=got, tp=self.tp, dcp=self.dcp, heads=heads)


def stages_of(num_layers: int, pp: int, layers_per_stage: Sequence[int] | None = None) -> list[range]:
    """The layers of each pipeline stage: as many as given, or equally many.

    The remainder of equal stages goes to the stages before the last, one layer each, the latest first
    (``get_pp_indices`` of vllm/distributed/utils.py, 0.33). Raises ``LAYOUT`` if a stage has no layers, or if the
    stages do not add up to ``pp`` stages and ``num_layers`` layers.

    >>> stages_of(5, 2), stages_of(5, 2, [1, 4])
    ([range(0, 3), range(3, 5)], [range(0, 1), range(1, 5)])
    """
    if layers_per_stage is None:
        if pp > num_layers:
            raise _uneven(f"pp <= {num_layers}, the number of layers", f"{pp}", pp, num_layers)
        each, rest = divmod(num_layers, pp)
        given = [each + (pp - 1 - rest <= stage < pp - 1) for stage in range(pp)]
    else:
        given = [integer(layers, "layers_per_stage", low=1, high=MAX_LAYERS) for layers in layers_per_stage]
    if sum(given) != num_layers or len(given) != pp:
        raise _uneven(f"{num_layers} layers in {pp} stages", f"{sum(given)} in {len(given)}", pp, num_layers)
    return [range(sum(given[:stage]), sum(given[: stage + 1])) for stage in range(pp)]


def _uneven(expected: str, got: str, pp: int, layers: int) -> KVPlanError:
    return KVPlanError("LAYOUT", "divide layers into stages", expected=expected, got=got, pp=pp, layers=layers)


@attrs.frozen
class RankPart:
    """The part of any layer that tensor-parallel rank ``rank`` of ``ranks`` holds.

    ``blocks`` says how many tokens a block of each token group has. ``dtype`` is that of tensors without one.

    >>> from kvplan.models.tensors import attention
    >>> local = RankPart(1, 2, {"attn": 16}).tensor(attention(8, 128)[0])
    >>> print(*local.axes, sep="; ")
    kv [0, 2) of 2 stride 0; head [4, 8) of 8 stride 0; dim [0, 128) of 128 stride 0; token [0, 16) of 16 stride 0
    """

    rank: int
    ranks: int
    blocks: Mapping[str, int]
    dtype: str = "bfloat16"
    scales: str = "inline"

    def __attrs_post_init__(self) -> None:
        check_word(SCALES, self.scales, "scales")

    def tensor(self, tensor: Tensor, prefix: str = "") -> LocalTensor:
        """The rank's part of a tensor, named by ``prefix`` and its kind."""
        axes = tensor.local_axes(self.rank, self.ranks)
        if tensor.paged:
            tokens = self.blocks[tensor.group]
            axes += (Axis(TOKEN, 0, tokens, tokens, 0),)
        return LocalTensor(prefix + tensor.kind, tensor.group, tensor.dtype or self.dtype, axes)

    def pages(self, layer: Layer, prefix: str = "") -> Iterator[tuple[str, Page]]:
        """The rank's pages of a layer, each with the name of its pool."""
        pages: dict[tuple[str, str], dict[str, list[LocalTensor]]] = {}
        for tensor in layer:
            apart = tensor.scale_of is not None and self.scales == "region"
            pool = tensor.kind if apart else tensor.pool
            section = tensor.scale_of if tensor.scale_of and self.scales == "inline" else tensor.section
            pages.setdefault((tensor.group, pool), {}).setdefault(section, []).append(self.tensor(tensor, prefix))
        for (group, pool), sections in pages.items():
            yield f"{group}.{pool}", Page(prefix + pool, tuple(map(tuple, sections.values())))
