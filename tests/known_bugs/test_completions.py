"""Completions: which workers need a notice of a request's end, and what must have moved before."""

from __future__ import annotations

import attrs

from kvplan import Blocks, plan_mesh, plan_reads, verify
from tests.edits import edited_specs
from tests.known_bugs.faults import asking, awaited, completed, grouped, notified
from tests.known_bugs.known_bug import Outcome, known_bug
from tests.small import engine


@known_bug("D11", "vllm-project/vllm#18632", "completions")
def test_nothing_to_read_is_still_done() -> tuple[Outcome, Outcome]:
    """A destination that had the whole prompt cached sent no notice, so the source never freed its blocks."""
    mesh = plan_mesh(engine("decode"), engine("prefill", 2))
    specs = mesh.plans[0].bind(local={"attn": Blocks([], first=3)}, remote={"attn": Blocks([3, 9, 4])}, tokens=(12, 12))
    of_bytes = [(spec.local, spec.remote) for spec in specs if spec.num_bytes]
    return lambda: completed(awaited(mesh), of_bytes), lambda: completed(awaited(mesh), notified(mesh))


@known_bug("H1", "sgl-project/sglang#22145", "completions")
def test_writers_of_one_name() -> tuple[Outcome, Outcome]:
    """Four writers signed with their pipeline stage, 0 for all, so the destination counted one and hung."""
    mesh = plan_mesh(engine("decode"), engine("prefill", 4), "WRITE")
    by_stage = {(("prefill", 0), other) for _, other in notified(mesh)}
    return lambda: completed(awaited(mesh), by_stage), lambda: completed(awaited(mesh), notified(mesh))


@known_bug("H2", "tests of vLLM 0.33.0, test_nixl_push_connector.py", "verify: COVER")
def test_replicas_that_were_only_notified() -> tuple[Outcome, Outcome]:
    """A source wrote an MLA cache to one of its replicas, and notified the others that it was done."""
    mesh = plan_mesh(engine("decode", 2, heads=1), engine("prefill", heads=1), "WRITE")
    request = asking({"attn": Blocks([3, 9])}, {"attn": Blocks([8, 1])}, (0, 8))
    (plan,) = mesh.plans
    one, other = plan.bind(**request)
    nothing = attrs.evolve(other, local_ids=other.local_ids[:0], remote_ids=other.remote_ids[:0])
    return lambda: verify(edited_specs(plan, one, nothing), **request), lambda: verify(mesh, **request)


@known_bug("H3", "vllm-project/vllm#46290", "completions")
def test_as_many_writes_as_tensors() -> tuple[Outcome, Outcome]:
    """A destination counted a request as done after as many writes as registered tensors, not as sent ones."""
    source, destination = grouped("prefill", full=4, window=4, draft=4), grouped("decode", full=4, window=4)
    mesh = plan_mesh([destination], [source], "WRITE")
    (pair,) = mesh.plans[0].pairs
    writes = len(set(pair.local_table.region.tolist()))

    def after(expected: int) -> str:
        return completed(awaited(mesh), notified(mesh) if writes == expected else [])

    return lambda: after(len(source.regions)), lambda: after(writes)


@known_bug("H4", "vllm-project/vllm#52234", "refused: BLOCKS")
def test_blocks_that_are_not_there() -> tuple[Outcome, Outcome]:
    """A request with block ids beyond the source's pool was called ready, and answered with garbage."""
    (source,), (destination,) = engine("prefill"), engine("decode", blocks=100)
    plan = plan_reads(destination, [source])
    own = {"attn": Blocks([8, 99])}
    beyond, inside = ({"attn": Blocks([3, last])} for last in (10, 9))
    return lambda: verify(plan, **asking(own, beyond, (0, 8))), lambda: verify(plan, **asking(own, inside, (0, 8)))
