"""Parallel sizes: how many ranks an engine has, and which positions each of them keeps.

- The world rank is ``(pp_rank*pcp + pcp_rank)*tp + tp_rank``: PP, then PCP, then TP the fastest
  (``initialize_model_parallel`` of vllm/distributed/parallel_state.py, 0.33).
- Runs of ``interleave`` positions go to ``dcp`` ranks in turn. They are ranks that are there already, those of PCP
  before those of TP: a worker's is ``(tp_rank*pcp + pcp_rank) % dcp``. So PCP by itself replicates the cache, as
  vLLM has it from 0.26 on (``prefill_context_parallel_size`` of vllm/config/parallel.py: it "does not increase the
  KV-cache shard count"). vLLM 0.33 takes a dcp of 1, pcp or tp*pcp where pcp > 1; here it is any divisor of tp*pcp.
- With ``pcp_spreads`` they go to ``pcp*dcp`` ranks in turn, and a worker's is ``pcp_rank*dcp + tp_rank % dcp``, as
  vLLM had it up to 0.25 (vllm/v1/worker/block_table.py).

Either way each head of a token group must be on all ranks that its positions are spread over. Recurrent states are
not spread: every rank keeps those of its heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs

from kvplan._checks import integer, settle, wrong_type
from kvplan.describe.views import Context
from kvplan.errors import KVPlanError
from kvplan.models.tensors import Tensor

MAX_RANKS: Final = 1 << 16


def flag(value: Any, what: str) -> bool:
    """``value``, which must be True or False.

    >>> flag(True, "shared")
    True
    """
    if not isinstance(value, bool):
        raise wrong_type(what, "True or False", value)
    return value


def _spreads(value: Any) -> bool:
    return flag(value, "pcp_spreads")


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
    pcp_spreads: bool = attrs.field(default=False, converter=_spreads)

    def __attrs_post_init__(self) -> None:
        settle(self, "an engine", integer, "tp", "pp", "dcp", "pcp", low=1, high=MAX_RANKS)
        integer(self.tp * self.pp * self.pcp, "tp * pp * pcp", high=MAX_RANKS)

    def context(self, pcp_rank: int, tp_rank: int) -> Context:
        """Which positions the worker keeps."""
        if self.pcp_spreads:
            return Context(pcp_rank * self.dcp + tp_rank % self.dcp, self.pcp * self.dcp, self.interleave)
        return Context((tp_rank * self.pcp + pcp_rank) % self.dcp, self.dcp, self.interleave)

    def check(self, model_name: str, tensors: Iterable[Tensor]) -> None:
        """Raises ``LAYOUT`` where positions of one of the ``tensors`` would be nowhere."""
        copies = 1 if self.pcp_spreads else self.pcp
        if self.tp * copies % self.dcp:
            raise KVPlanError(
                "LAYOUT",
                f"spread positions of {model_name}",
                expected=f"dcp that divides {'tp' if copies == 1 else 'tp * pcp'} {self.tp * copies}, "
                "whose ranks it reuses",
                got=f"{self.dcp}",
                tp=self.tp,
                dcp=self.dcp,
            )
        for tensor in tensors:
            holders = tensor.holders(self.tp) * copies
            if holders < self.dcp:
                raise KVPlanError(
                    "LAYOUT",
                    f"spread positions of {model_name}",
                    expected=f"dcp <= {holders}, "
                    f"how many of {self.tp * copies} ranks hold each of {tensor.shards} heads",
                    got=f"{self.dcp}",
                    tp=self.tp,
                    dcp=self.dcp,
                    heads=tensor.shards,
                )
