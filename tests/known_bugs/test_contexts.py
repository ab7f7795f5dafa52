"""Context parallel: which rank holds which positions, and which ranks hold the same."""

from __future__ import annotations

from itertools import product
from typing import Any

import attrs

from kvplan import Axis, Blocks, Context, Group, TransferPlan, View, Worker, plan_mesh, plan_reads, verify
from kvplan.verification import Report
from tests.known_bugs.faults import asking, awaited, completed, cost, moving, notified, worker_of
from tests.known_bugs.known_bug import VERIFIED, Outcome, accepted, check, known_bug
from tests.small import engine


@known_bug("G1", "vllm-project/vllm#38433", "verify: VALUE")
def test_every_second_block() -> tuple[Outcome, Outcome]:
    """With 2 decode and 2 prefill context ranks, each rank used every second block instead of every fourth."""
    (source,) = engine("prefill", heads=1, blocks=20)
    ranks = engine("decode", heads=1, contexts=(4, 4))
    mesh = plan_mesh(ranks, [source])
    request = asking({"attn": Blocks([8, 1, 5])}, {"attn": Blocks(range(12, 0, -1))}, (0, 48))
    wrong = []
    for plan in mesh.plans:
        dcp = Group("attn", 4, Context(plan.local.rank % 2, 2, 4))
        stepping_by_dcp = plan_reads(attrs.evolve(plan.local, groups=[dcp]), [source])
        wrong.append(moving(plan, stepping_by_dcp, **{**request, "tokens": (0, 24)}))
    return lambda: verify(wrong, **request), lambda: verify(mesh, **request)


@known_bug("G2", "vllm-project/vllm#52779", "completions")
def test_replicas_that_nobody_reads() -> tuple[Outcome, Outcome]:
    """All source ranks waited for a notice of the request's end, also replicas that no rank reads."""
    shards = engine("prefill", 2)
    replicas = [attrs.evolve(worker, rank=worker.rank + 2) for worker in shards]
    mesh = plan_mesh(engine("decode", 2), [*shards, *replicas])
    everyone = {("prefill", rank): [("decode", rank % 2)] for rank in range(4)}
    return lambda: completed(everyone, notified(mesh)), lambda: completed(awaited(mesh), notified(mesh))


@accepted("G3", "vllm-project/vllm#50611, vllm-project/vllm#54803")
def test_some_of_the_ranks() -> Outcome:
    """A cache spread over some ranks was refused: one rank was allowed, or all."""
    request = asking({"attn": Blocks([8, 1, 5, 2])}, {"attn": Blocks([3, 9, 4])}, (0, 30))

    def four_to_two(theirs: int, ours: int) -> Report:
        """Four source ranks with a context each, two destination ranks for each of two; so many positions at a time."""
        mesh = plan_mesh(
            engine("decode", 2, heads=1, contexts=(2, ours)), engine("prefill", heads=1, contexts=(4, theirs))
        )
        if theirs == ours == 4:
            serving = [[pair.remote[1] for pair in plan.pairs if pair.group_pairs] for plan in mesh.plans]
            assert serving == [[0, 2], [1, 3]] * 2
        return verify(mesh, **request)

    return lambda: tuple(four_to_two(theirs, ours) for theirs, ours in product((1, 3, 4), (1, 4)))


@accepted("G4", "vllm-project/vllm-ascend#13934, vllm-project/vllm-ascend#16492")
def test_room_for_drafts_on_8_ranks() -> Outcome:
    """Ranks of DCP 8, with room for 5 draft tokens, read beyond a list or from wrong ranks."""

    def moved(theirs: int, ours: int) -> Report:
        sources, destinations = (
            engine(name, heads=1, contexts=(size, 4), blocks=20)
            for name, size in (("prefill", theirs), ("decode", ours))
        )
        local, remote = ({"attn": Blocks(range(-(-n // (4 * size))))} for n, size in ((63 + 5, ours), (63, theirs)))
        return verify(plan_mesh(destinations, sources), **asking(local, remote, (0, 63)))

    return lambda: tuple(moved(theirs, ours) for theirs, ours in product((1, 2, 4, 8), repeat=2))


def latents(name: str, rank: int, context: Context) -> Worker:
    """A worker with 24 layers of latents in fp8, 576 bytes for each token, and room for 56000 tokens of a request."""
    axes, page = (Axis("token", 0, 64, 64, 576), Axis("dim", 0, 576, 576, 1)), 64 * 576
    blocks = -(-56000 // (64 * context.size))
    views = [View(f"layers.{i}", "attn", f"{i}", "float8_e4m3fn", axes, blocks, page) for i in range(24)]
    return worker_of(name, [Group("attn", 64, context)], views, rank)


@known_bug("G5", "sgl-project/sglang#35186, sgl-project/sglang#35762", "cost")
def test_tokens_one_by_one() -> tuple[Outcome, Outcome]:
    """Ranks with every eighth token received 7000 tokens of 56000 in 168000 ranges of 576 bytes."""
    source, destination = latents("prefill", 0, Context()), latents("decode", 3, Context(3, 8))
    packed = latents("prefill", 1, destination.groups[0].context)  # memory at the source, for what the rank takes
    direct, packing, sending = (
        plan_reads(*pair) for pair in ((destination, [source]), (packed, [source]), (destination, [packed]))
    )

    def request(plan: TransferPlan, tokens: int) -> dict[str, Any]:
        """All blocks of both sides, in order."""
        local, remote = ({"attn": Blocks(range(one.views[0].num_blocks))} for one in (plan.local, *plan.remotes))
        return asking(local, remote, (0, tokens))

    def counted(plan: TransferPlan) -> str:
        (spec,) = plan.bind(**request(plan, 56000))
        return cost(spec.num_descriptors, too_many=168000, enough=24)

    def in_two_steps() -> tuple[Report, ...]:
        check(lambda: counted(sending), VERIFIED)
        return tuple(verify(plan, **request(plan, 1000)) for plan in (packing, sending))

    return lambda: counted(direct), in_two_steps
