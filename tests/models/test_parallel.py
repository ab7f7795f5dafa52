"""Parallel sizes: which positions each rank keeps, and that each is kept somewhere."""

from __future__ import annotations

import pytest

from kvplan import KVPlanError
from kvplan.models.parallel import Parallel
from kvplan.models.tensors import attention, latent


def contexts(sizes: Parallel) -> list[int]:
    """The context rank of each worker of a stage, in order of world rank."""
    return [sizes.context(pcp, tp).rank for pcp in range(sizes.pcp) for tp in range(sizes.tp)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param(Parallel(tp=4, dcp=2), [0, 1, 0, 1], id="tensor-ranks-alone"),
        pytest.param(Parallel(tp=2, pcp=2), [0, 0, 0, 0], id="pcp-alone-replicates"),
        pytest.param(Parallel(tp=2, pcp=2, dcp=2), [0, 0, 1, 1], id="dcp-spans-pcp"),
        pytest.param(Parallel(tp=2, pcp=2, dcp=4), [0, 2, 1, 3], id="dcp-spans-pcp-then-tp"),
        pytest.param(Parallel(tp=2, pcp=2, dcp=2, pcp_spreads=True), [0, 1, 2, 3], id="pcp-spreads"),
    ],
)
def test_context_ranks_by_world_rank(sizes: Parallel, expected: list[int]) -> None:
    """Context ranks count PCP ranks before TP ranks, as vLLM's groups do, or PCP the slower where it spreads."""
    assert contexts(sizes) == expected


@pytest.mark.parametrize("spreads", [False, True])
@pytest.mark.parametrize("heads", [None, 1, 2, 3, 4])
def test_sizes_that_pass_keep_each_position_of_each_head(heads: int | None, spreads: bool) -> None:
    """The check passes exactly the sizes at which every head is held at every context rank."""
    (tensor,) = latent(12, 4) if heads is None else attention(heads, 8)
    passed = 0
    for tp in range(1, 9):
        for pcp in range(1, 4):
            for dcp in range(1, 13):
                sizes = Parallel(tp=tp, dcp=dcp, pcp=pcp, pcp_spreads=spreads)
                kept = {
                    (unit, sizes.context(p, t).rank)
                    for p in range(pcp)
                    for t in range(tp)
                    for unit in tensor.units(t, tp)
                }
                every = {(unit, rank) for unit in range(tensor.shards) for rank in range(sizes.context(0, 0).size)}
                even = tp * (1 if spreads else pcp) % dcp == 0
                if kept == every and even:
                    sizes.check("tiny", [tensor])
                    passed += 1
                else:
                    with pytest.raises(KVPlanError, match="cannot spread positions of tiny"):
                        sizes.check("tiny", [tensor])
    assert passed > 24


def test_a_refusal_names_the_ranks_it_counts() -> None:
    """With pcp the ranks of both are counted."""
    with pytest.raises(KVPlanError, match=r"dcp that divides tp \* pcp 8, whose ranks it reuses, got 3"):
        Parallel(tp=4, pcp=2, dcp=3).check("tiny", latent(12, 4))
    with pytest.raises(KVPlanError, match=r"dcp <= 4, how many of 8 ranks hold each of 2 heads, got 8"):
        Parallel(tp=4, pcp=2, dcp=8).check("tiny", attention(2, 8))
