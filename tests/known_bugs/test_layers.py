"""Layers: tensors pair by name, whatever their place in a list, their stage or their pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from kvplan import Blocks, Group, MeshPlan, View, Worker, plan_mesh, plan_reads, plan_writes, verify
from tests.edits import EditedPlan
from tests.known_bugs.faults import asking, moving, worker_of
from tests.known_bugs.known_bug import Outcome, known_bug
from tests.known_bugs.mistakes import layers_of, taken_for
from tests.small import HEAD_BYTES, axes, engine

READ = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 9])}, (0, 8))
WRITTEN = asking(READ["remote"], READ["local"], (0, 8))
PAGE = 4 * HEAD_BYTES

Slot = tuple[str, str | None]


def storing(name: str, rank: int, tensors: Iterable[str]) -> Worker:
    """A worker with a region for each of some tensors, in their order."""
    views = [View(key, "attn", f"{i}", "bfloat16", axes((0, 1, 1), 4), 10, PAGE) for i, key in enumerate(tensors)]
    return worker_of(name, [Group("attn", 4)], views, rank)


def of_layers(layers: Iterable[int], *kinds: str) -> list[str]:
    """The names of the tensors of some layers: all of the first kind, then all of the next."""
    numbers = list(layers)
    return [f"layers.{i}.{kind}" for kind in kinds or ("attn",) for i in numbers]


def misplaced(mesh: MeshPlan, *places: Sequence[str]) -> list[EditedPlan]:
    """What each source of a mesh writes if it takes its tensors, in order, for these of the destination."""
    wrong = []
    for plan, names in zip(mesh.plans, places, strict=True):
        (destination,) = plan.remotes
        views = [attrs.evolve(view, name=name) for view, name in zip(plan.local.views, names, strict=True)]
        others = [name for name in destination.tensors if name not in names]
        source = attrs.evolve(plan.local, views=views)
        wrong.append(moving(plan, plan_writes(source, [destination], not_transferred=others), **WRITTEN))
    return wrong


def _keys_then_values(stages: Sequence[int], drafts: int) -> tuple[Outcome, Outcome]:
    """Stages that find V of the destination at half of its tensors, and by their own number of layers."""
    layers, begin, parts = sum(stages), 0, []
    for number in stages:
        parts.append(range(begin, begin + number))
        begin += number
    draft = [f"draft.{i}.{kind}" for kind in "kv" for i in range(drafts)]
    there = [*of_layers(range(layers), "k", "v"), *draft]
    half = len(there) // 2
    places = []
    for part in parts:
        values = half // len(part) * len(part) if half % len(part) else half
        places.append([*there[part.start : part.stop], *there[values + part.start : values + part.stop]])
    sources = [storing("prefill", rank, of_layers(part, "k", "v")) for rank, part in enumerate(parts)]
    mesh = plan_mesh([storing("decode", 0, there)], sources, "WRITE", not_transferred=draft)
    wrong = misplaced(mesh, *places)
    return lambda: verify(wrong, **WRITTEN), lambda: verify(mesh, **WRITTEN)


@known_bug("F1", "sgl-project/sglang#27740, sgl-project/sglang#28229", "verify: VALUE, COVER, DISJOINT")
def test_a_draft_that_is_none() -> tuple[Outcome, Outcome]:
    """Stages of 7 and 8 layers derived a draft layer from the remainder of 15, and placed V wrongly."""
    return _keys_then_values([7, 8], drafts=0)


@known_bug("F2", "sgl-project/sglang#33497, sgl-project/sglang#28229", "verify: VALUE, COVER, OWN")
def test_behind_the_draft() -> tuple[Outcome, Outcome]:
    """V was taken to begin at half of all tensors, a draft's included, and was written to other layers."""
    return _keys_then_values([3, 4, 4, 4], drafts=1)


def pooled(name: str, rank: int, *slots: Slot) -> Worker:
    """A worker whose regions are slots of a pool, for a layer of full attention and one with a window."""
    views = []
    for i, slot in enumerate(slots):
        for group, layer in zip(("full", "window"), slot, strict=True):
            if layer is not None:
                views.append(View(layer, group, f"{i}", "bfloat16", axes((0, 1, 1), 4), 100, PAGE))
    return worker_of(name, [Group("full", 4), Group("window", 4)], views, rank)


@known_bug("F3", "vllm-project/vllm-ascend#15900", "verify: VALUE, COVER, OWN")
def test_slots_in_order() -> tuple[Outcome, Outcome]:
    """Pool slots were paired by the order of stages, but with one stage other layers share them."""
    first: list[Slot] = [("layers.0", "layers.1"), ("layers.2", None)]
    second: list[Slot] = [("layers.3", "layers.4"), ("layers.5", "layers.6")]
    whole: list[Slot] = [("layers.0", "layers.1"), ("layers.2", "layers.4"), ("layers.3", "layers.6")]
    last: Slot = ("layers.5", None)
    source = pooled("prefill", 0, *first)
    plan = plan_reads(pooled("decode", 0, *whole, last), [source, pooled("prefill", 1, *second)])
    in_order = plan_reads(
        pooled("decode", 0, *whole, ("layers.5", "nothing")),
        [source, pooled("prefill", 1, whole[2], ("layers.5", "nothing"))],
        not_transferred=["layers.4"],
    )
    request = asking(
        local={"full": Blocks([8, 1]), "window": Blocks([5, 2])},
        remote={"full": Blocks([3, 9]), "window": Blocks([4, 7])},
        tokens=(0, 8),
    )
    return lambda: verify(moving(plan, in_order, **request), **request), lambda: verify(plan, **request)


@known_bug("F4", "vllm-project/vllm-ascend#10202", "refused: NAME")
def test_a_draft_behind_its_stage() -> tuple[Outcome, Outcome]:
    """A draft layer after 48 layers was numbered from its stage's 24, which already had a layer 24."""
    first, last = of_layers(range(24)), of_layers(range(24, 48))
    destination, source = storing("decode", 0, of_layers(range(49))), storing("prefill", 0, first)

    def with_draft(number: int) -> Any:
        stage = storing("prefill", 1, [*last, *of_layers([number])])
        return verify(plan_reads(destination, [source, stage]), **READ)

    return lambda: with_draft(24), lambda: with_draft(48)


@known_bug("F5", "vllm-project/vllm-ascend#15507", "verify: VALUE, COVER, DISJOINT")
def test_keys_that_begin_at_0_in_each_stage() -> tuple[Outcome, Outcome]:
    """Stages of 21 and 23 layers both stored keys from layer 0 on, and overwrote each other."""
    sources = [storing("prefill", rank, of_layers(part)) for rank, part in enumerate((range(21), range(21, 44)))]
    mesh = plan_mesh([storing("store", 0, of_layers(range(44)))], sources, "WRITE")
    wrong = misplaced(mesh, of_layers(range(21)), of_layers(range(23)))
    return lambda: verify(wrong, **WRITTEN), lambda: verify(mesh, **WRITTEN)


@known_bug(
    "F6",
    "vllm-project/vllm#54926, vllm-project/vllm#49230, vllm-project/vllm#39203, sgl-project/sglang#30222",
    "refused: TENSOR",
)
def test_a_draft_on_one_side() -> tuple[Outcome, Outcome]:
    """A destination with a draft had 79 regions, its source 78, which at best crashed."""
    source = storing("prefill", 0, of_layers(range(78)))
    destination = storing("decode", 0, [*of_layers(range(78)), "draft.0.attn"])
    return (
        lambda: verify(plan_reads(destination, [source]), **READ),
        lambda: verify(plan_reads(destination, [source], not_transferred=["draft.0.attn"]), **READ),
    )


@known_bug("F7", "ROCm/ATOM#690", "verify: COVER")
def test_as_far_as_the_shorter_list() -> tuple[Outcome, Outcome]:
    """Block lists of unequal length were logged, and paired up to the shorter one."""
    (source,), (destination,) = engine("prefill"), engine("decode")
    plan = plan_writes(source, [destination])
    ours, theirs = [3, 9], [8, 1, 5]
    request = asking({"attn": Blocks([*ours, 4])}, {"attn": Blocks(theirs)}, (0, 12))
    near, far = (Blocks(ids) for ids in zip(*zip(ours, theirs, strict=False), strict=True))
    shorter = moving(plan, **asking({"attn": near}, {"attn": far}, (0, 8)))
    return lambda: verify(shorter, **request), lambda: verify(plan, **request)


@known_bug("F8", "ROCm/ATOM#2354", "verify: COVER")
def test_the_keys_of_an_indexer() -> tuple[Outcome, Outcome]:
    """A backend moved a sparse model's latents, but not its index keys."""
    model = layers_of("deepseek-v3.2", 0, 2)
    destinations, sources = (model.engine(name, tp=4, num_blocks=10) for name in ("decode", "prefill"))
    unread = [name for name in destinations[0].tensors if ".index" in name]
    mesh, latents = (plan_mesh(destinations, sources, not_transferred=names) for names in ([], unread))
    return lambda: verify(taken_for(mesh, latents, **READ), **READ), lambda: verify(mesh, **READ)
