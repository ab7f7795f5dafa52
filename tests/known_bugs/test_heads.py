"""Heads: which ranks hold which, also with more ranks than heads, and their places in a rank's memory."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from kvplan import Axis, Blocks, Model, TransferPlan, Worker, plan_mesh, plan_reads, verify
from kvplan.verification import Report
from tests.edits import EditedPlan, edited_specs
from tests.known_bugs.faults import asking, moving
from tests.known_bugs.known_bug import Outcome, accepted, known_bug
from tests.known_bugs.mistakes import holding, layers_of, taken_for, with_axis, with_views
from tests.small import DIM, HEAD_BYTES, engine

REQUEST = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 5])}, (0, 8))


def outcomes(
    destinations: Iterable[Worker], sources: Iterable[Worker], taken: Iterable[Worker], known: Iterable[Worker]
) -> tuple[Outcome, Outcome]:
    """A mesh that takes destinations and sources for others, and the true one."""
    right = plan_mesh(destinations, sources)
    wrong = taken_for(right, plan_mesh(taken, known), **REQUEST)
    return lambda: verify(wrong, **REQUEST), lambda: verify(right, **REQUEST)


def keys(worker: Worker) -> Worker:
    """The worker with K alone, twice as wide: a row of heads for each token."""
    views = [attrs.evolve(view, axes=[axis for axis in view.axes if axis.name != "kv"]) for view in worker.views]
    return with_axis(with_views(worker, *views), "dim", stop=2 * DIM, size=2 * DIM)


@known_bug("A1", "sgl-project/sglang#19086", "verify: VALUE")
def test_heads_counted_by_ranks() -> tuple[Outcome, Outcome]:
    """4 ranks with 1 head each were taken for 4 heads, not 2 heads held twice, so halves of heads were sent."""
    sources, destinations = ([keys(w) for w in engine(name, tp, 2, order="NH")] for name, tp in (("p", 4), ("d", 1)))
    halves = [with_axis(worker, "dim", stop=DIM, size=DIM) for worker in (*sources, *destinations)]
    of_four = [holding(worker, worker.rank, 4) for worker in halves[:4]]
    in_four = with_axis(halves[4], "head", stop=4, size=4, stride_bytes=HEAD_BYTES // 2)
    return outcomes(destinations, sources, [in_four], of_four)


@known_bug("A2", "sgl-project/sglang#23746, sgl-project/sglang#23744, sgl-project/sglang#30997", "verify: VALUE")
def test_replicas_in_turn() -> tuple[Outcome, Outcome]:
    """4 destination ranks with 2 heads received heads 0, 1, 0, 1 instead of 0, 0, 1, 1."""
    sources, destinations = engine("prefill", heads=2), engine("decode", 4, heads=2)
    return outcomes(destinations, sources, [holding(worker, worker.rank % 2, 2) for worker in destinations], sources)


@known_bug(
    "A3", "sgl-project/sglang#31295, sgl-project/sglang#31968, sgl-project/sglang#32247", "verify: COVER, BOUNDS"
)
def test_a_slice_for_each_rank() -> tuple[Outcome, Outcome]:
    """A source with 2 heads was cut into 4 slices, one per rank, half of them beyond its memory."""
    sources, destinations = (engine(name, tp, 2, order="NH") for name, tp in (("prefill", 1), ("decode", 4)))
    (four_heads,) = engine("prefill", heads=4, order="NH")
    of_four = [holding(worker, worker.rank, 4) for worker in destinations]
    right, wrong = plan_mesh(destinations, sources), plan_mesh(of_four, [four_heads])
    request = {**REQUEST, "remote": {"attn": Blocks([9, 7])}}  # both in the half that would lie behind the memory
    return lambda: verify(taken_for(right, wrong, **request), **request), lambda: verify(right, **request)


@known_bug("A4", "sgl-project/sglang#39660", "verify: VALUE")
def test_one_of_four_copies() -> tuple[Outcome, Outcome]:
    """The rule for replicated heads was in four places; the fix missed one, which still sent wrong heads."""
    sources, destinations = engine("prefill", 2), engine("decode", 8)
    as_ever = [holding(worker, worker.rank // 4 * 2 + worker.rank % 2, 4) for worker in destinations]
    return outcomes(destinations, sources, as_ever, sources)


@known_bug("A5", "vllm-project/vllm#52516", "verify: COVER")
def test_a_replica_is_no_full_copy() -> tuple[Outcome, Outcome]:
    """One of 8 ranks that hold 4 heads twice was read as if it had all heads: 3 in 4 bytes were never written."""
    sources = engine("prefill", 8, tokens=4096, layers=1, blocks=2)
    plan = plan_reads(engine("decode", 1, tokens=4096, layers=1, blocks=2)[0], sources)
    request = asking({"attn": Blocks([1])}, {"attn": Blocks([0])})
    first, *others = plan.bind(**request)
    nothing = [attrs.evolve(spec, local_ids=spec.local_ids[:0], remote_ids=spec.remote_ids[:0]) for spec in others]

    def one_rank() -> Report:
        report = verify(edited_specs(plan, first, *nothing), **request)
        assert (report.num_bytes, 262_144 - report.num_bytes) == (65_536, 196_608)
        return report

    return one_rank, lambda: verify(plan, **request)


@accepted("A6", "vllm-project/vllm#45330")
def test_pages_that_stop_shrinking() -> Outcome:
    """A check expected half the page size on 16 ranks of 8, but with 8 heads both have one head per rank."""
    sources, destinations = engine("prefill", 8, heads=8), engine("decode", 16, heads=8)
    mesh = plan_mesh(destinations, sources)
    for plan in mesh.plans:
        moved = [spec for spec in plan.bind(**REQUEST) if spec.num_bytes]
        assert [spec.remote[1] for spec in moved] == [plan.local.rank // 2]
        assert set(moved[0].descriptors()[0][:, 1]) == {4 * HEAD_BYTES}  # whole pages
    return lambda: verify(mesh, **REQUEST)


@accepted("A7", "vllm-project/vllm#19691")
def test_more_ranks_than_heads() -> Outcome:
    """Models with fewer heads than ranks were refused."""
    meshes = [
        plan_mesh(engine("decode", ours, heads), engine("prefill", theirs, heads))
        for heads in (1, 2)
        for ours in (3, 8)
        for theirs in (3, 8)
    ]
    return lambda: tuple(verify(mesh, **REQUEST) for mesh in meshes)


@known_bug("A8", "vllm-project/vllm-ascend#11885, vllm-project/vllm-ascend#11886", "verify: COVER")
def test_heads_of_a_rank_for_those_of_the_model() -> tuple[Outcome, Outcome]:
    """The number of ranks to read came from one rank's heads, not the model's: 2 of 4 ranks were never read."""
    sources, destinations = engine("prefill", 8, heads=8), engine("decode", 2, heads=8)
    right = plan_mesh(destinations, sources)
    local_heads = 8 // 2
    pulled = max(1, local_heads // 2) // max(1, local_heads // 8)
    wrong = []
    for plan in right.plans:
        specs = plan.bind(**REQUEST)
        holders = [i for i, spec in enumerate(specs) if spec.num_bytes]
        for i in holders[pulled:]:
            nothing = np.empty(0, np.int32)
            specs = (*specs[:i], attrs.evolve(specs[i], local_ids=nothing, remote_ids=nothing), *specs[i + 1 :])
        wrong.append(edited_specs(plan, *specs))
    return lambda: verify(wrong, **REQUEST), lambda: verify(right, **REQUEST)


@known_bug("A9", "tests of vLLM 0.33.0, test_tp_mapping.py", "verify: VALUE")
def test_a_draft_beside_latents() -> tuple[Outcome, Outcome]:
    """One rank mapping for MLA latents and a draft's heads makes each rank read the first head of its source."""
    latents, drafts = layers_of("deepseek-v3", 0), layers_of("qwen3-0.6b", 0)
    model = latents.with_draft(drafts)
    pairs = [_draft(model, *case) for case in ((3, 8, 1, 3), (5, 8, 2, 1), (5, 16, 2, 2))]
    return (
        lambda: tuple(verify(wrong, **REQUEST) for wrong, _ in pairs),
        lambda: tuple(verify(right, **REQUEST) for _, right in pairs),
    )


def _draft(model: Model, rank: int, tp: int, source_tp: int, slot: int) -> tuple[EditedPlan, TransferPlan]:
    """Rank ``rank`` of ``tp`` reads from ``source_tp`` ranks, where its draft head stands in ``slot``."""
    sources = model.engine("prefill", source_tp, num_blocks=10)
    destination = model.engine("decode", tp, num_blocks=10)[rank]
    plan = plan_reads(destination, sources)
    head = _heads(destination).start
    (first_head,) = [_heads(worker).start for worker in sources if _heads(worker).start <= head < _heads(worker).stop]
    assert head - first_head == slot
    first = plan_reads(holding(destination, first_head, 8), sources)
    return moving(plan, first, **REQUEST), plan


def _heads(worker: Worker) -> Axis:
    return next(axis for axis in worker.views[-1].axes if axis.name == "head")


@known_bug("A10", "sgl-project/sglang#9960", "verify: VALUE")
def test_heads_counted_from_the_first_of_the_model() -> tuple[Outcome, Outcome]:
    """Head offsets counted from the model's first head, not the rank's, and pointed into the next token."""
    sources, destinations = (engine(name, tp, order="NH") for name, tp in (("prefill", 2), ("decode", 4)))
    right = plan_mesh(destinations, sources)
    wrong = plan_mesh(destinations, [_counting_from_the_first(worker) for worker in sources])
    return lambda: verify(taken_for(right, wrong, **REQUEST), **REQUEST), lambda: verify(right, **REQUEST)


def _counting_from_the_first(worker: Worker) -> Worker:
    ahead = HEAD_BYTES * worker.rank * 2
    regions = [attrs.evolve(region, size_bytes=region.size_bytes + ahead) for region in worker.regions]
    views = [attrs.evolve(view, offset_bytes=view.offset_bytes + ahead) for view in worker.views]
    made: Worker = attrs.evolve(worker, regions=regions, views=views)
    return made
