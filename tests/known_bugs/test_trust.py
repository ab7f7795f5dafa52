"""Trust: a peer's description is untrusted data, and differences are named before anything starts."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import attrs

from kvplan import Blocks, Model, Worker, compare, decode, encode, plan_mesh, plan_reads, verify
from kvplan.handshake import fingerprint
from tests.known_bugs.faults import asking, moving
from tests.known_bugs.known_bug import Outcome, accepted, known_bug
from tests.small import engine

REQUEST = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 9])}, (0, 8))


@accepted("K1", "vllm-project/vllm#29503, ai-dynamo/dynamo#10027, ai-dynamo/dynamo#12821")
def test_a_hash_that_differs() -> Outcome:
    """Engines compared one hash of all settings, refused harmless differences, and did not name them."""
    model = Model.shipped("qwen2.5-1.5b")
    (source,), (destination,) = (
        model.engine(name, layout=layout, num_blocks=10) for name, layout in (("prefill", "LBHNC"), ("decode", "BLHNC"))
    )
    assert fingerprint(source) != fingerprint(destination)
    difference = compare(destination, source)
    assert difference.ok
    assert [one.field for one in difference.differences] == ["block stride", "regions"]
    return lambda: verify(plan_reads(destination, [source]), **REQUEST)


class Exit:
    """What ends the process of whoever reads its pickle."""

    def __reduce__(self) -> Any:
        return sys.exit, ("a message was run",)


@known_bug(
    "K2",
    "GHSA-x3m8-f7g5-qhm7, GHSA-hj4w-hm2g-p6w5, sgl-project/sglang#21435 (CVE-2026-3060), InternLM/lmdeploy#4804",
    "refused: MESSAGE",
)
def test_messages_that_run() -> tuple[Outcome, Outcome]:
    """Cache descriptions were pickles, so anyone who could reach the port could run code."""
    (source,), (destination,) = engine("prefill"), engine("decode")
    plan = plan_reads(decode(encode(destination)), [decode(encode(source))])
    return lambda: str(decode(pickle.dumps(Exit()))), lambda: verify(plan, **REQUEST)


@accepted("K3", "vllm-project/vllm#50765")
def test_other_sizes_on_both_sides() -> Outcome:
    """Gemma 4 on 2 and on 4 workers failed in the transfer library, with an error that named no reason."""
    model = Model.shipped("gemma-4-31b")
    sources, destinations = model.engine("prefill", tp=2, num_blocks=12), model.engine("decode", tp=4, num_blocks=10)
    local, remote = ({group.name: Blocks([block]) for group in sources[0].groups} for block in (8, 11))
    return lambda: verify(plan_mesh(destinations, sources), **asking(local, remote, (0, 4)))


@known_bug("K4", "vllm-project/vllm#21789", "verify: VALUE")
def test_a_layout_that_was_not_passed_on() -> tuple[Outcome, Outcome]:
    """A connector inside another one did not receive the layout, and took NHD for HND."""
    (source,), (destination,) = engine("prefill", order="NH"), engine("decode")
    taken_for: Worker = attrs.evolve(source, views=engine("prefill")[0].views)
    plan = plan_reads(destination, [source])
    wrong = moving(plan, plan_reads(destination, [taken_for]), **REQUEST)
    return lambda: verify(wrong, **REQUEST), lambda: verify(plan, **REQUEST)
