"""What kvplan does, pinned: rows and ids of plans, bytes of messages and files, and how requests of fleets end.

A change that only moves code leaves all of it as it is. HYPOTHESIS_PROFILE=long looks at more pairs and fleets.
``python -m tests.test_pins > tests/golden/pins.json`` pins what is true now.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

import attrs
import numpy as np
import pytest

from kvplan import Blocks, Context, Group, MeshPlan, Model, Worker, encode, plan_mesh, region_of, view_of
from kvplan.describe.blocks import Range
from kvplan.protocol import Handoff, Source, prompt_digest
from kvplan.protocol.claims import ClaimMessage, answer_claims
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.leases import Leases
from kvplan.protocol.page_keys import Chain
from kvplan.protocol.page_shards import shards_of
from kvplan.protocol.pages import pack
from kvplan.testing.conformance import PairCase
from kvplan.testing.simulation import MODELS, LeaseConnector, Scenario, Simulation
from kvplan_nixl.serving import Driver
from property_tests import labelled
from property_tests.exhaustive import all_worlds
from tests.pages import ROOT
from tests.second_opinion import sglang_send, vllm_nixl, vllm_offloading
from tests.simulation.sglang_connector import SGLANG_MODELS, sglang_fleets
from tests.simulation.vllm_connector import VllmConnector, vllm_room_fleets

GOLDEN: Final = ROOT / "tests" / "golden" / "pins.json"
CHANGED: Final = "changed on purpose? regenerate with `python -m tests.test_pins > tests/golden/pins.json`"
IS_LONG: Final = os.environ.get("HYPOTHESIS_PROFILE") == "long"

WORLDS: Final = {"ci": 1000, "long": 20}
PAIRS: Final = {"ci": 40, "long": 1}
"""One in how many of the exhaustive grid's worlds, and of the second opinion's pairs."""

SCENARIOS: Final = 1000 if IS_LONG else 6
"""Seeds for each connector and model."""

TOLERANCE: Final = 0.06
"""Seeds decide incidents; the order of what happens in a simulator decides the ends of a few requests more."""

PEERS: Final = {
    "vLLM NIXL": vllm_nixl.pairs,
    "vLLM offloading": vllm_offloading.pairs,
    "SGLang": sglang_send.pairs,
    "SGLang DCP": sglang_send.dcp_pairs,
}

FLEETS: Final[Mapping[str, Callable[[], Simulation]]] = {
    "leases": lambda: Simulation(LeaseConnector),
    "vLLM": lambda: Simulation(VllmConnector),
    "vLLM with transfer ids": vllm_room_fleets,
    "SGLang": sglang_fleets,
}


FLEET_MODELS: Final = [(name, model) for name in FLEETS for model in (SGLANG_MODELS if name == "SGLang" else MODELS)]


class Digest:
    """A digest of plans: rows of tables as they are, and ids in the order that ``bind`` gives them."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add(
        self, mesh: MeshPlan, local: Mapping[str, Blocks], remote: Mapping[str, Blocks], spans: Iterable[Range]
    ) -> None:
        """Add the plans of a pair of engines, bound for some requests."""
        for plan in mesh.plans:
            for pair in plan.pairs:
                self._take(pair.remote, pair.local_table.rows, pair.remote_table.rows)
            for span in spans:
                for spec in plan.bind(local=local, remote=remote, tokens=span):
                    self._take(span, spec.remote, spec.local_ids, spec.remote_ids)

    def _take(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, np.ndarray):
                self._sha256.update(f"{value.shape} {value.dtype}".encode() + value.tobytes())
            else:
                self._sha256.update(f"{value}".encode())

    def __str__(self) -> str:
        return self._sha256.hexdigest()[:16]


def of_grids(every: int) -> dict[str, str]:
    """A digest for each grid of :mod:`property_tests.grids`."""
    worlds = all_worlds()
    digests: dict[str, Digest] = {}
    for number in range(0, len(worlds), every):
        world = worlds[number]
        ours, theirs = (
            labelled.engine(role, world.heads, side, world.positions)
            for role, side in ((labelled.DESTINATION, world.destination), (labelled.SOURCE, world.source))
        )
        mesh = plan_mesh(ours.workers, theirs.workers)
        digest = digests.setdefault(worlds.grid_of(number).name, Digest())
        for request in worlds.requests(number)[:3]:
            digest.add(mesh, ours.tables(request.start), theirs.tables(request.start), [(request.start, request.stop)])
    return {name: str(digest) for name, digest in digests.items()}


def of_pairs(pairs: Iterable[PairCase]) -> str:
    """The digest of all pairs of one peer of :mod:`tests.second_opinion`."""
    digest = Digest()
    for pair in pairs:
        source, destination = pair.engines()
        near, far = ([_placed(rank.worker) for rank in engine.ranks] for engine in (destination, source))
        digest.add(plan_mesh(near, far), {"attn": destination.table}, {"attn": source.table}, [(pair.start, pair.stop)])
    return str(digest)


def _placed(worker: Worker) -> Worker:
    """The worker with its regions at addresses of no process: they are real memory."""
    places = {region.name: (number + 1) << 32 for number, region in enumerate(worker.regions)}
    regions = [attrs.evolve(region, address=places[region.name]) for region in worker.regions]
    return attrs.evolve(worker, regions=regions)


def plans(profile: str) -> dict[str, Any]:
    """What is pinned of plans."""
    every = PAIRS[profile]
    return {
        "grids": of_grids(WORLDS[profile]),
        "pairs": {name: of_pairs(list(pairs())[::every]) for name, pairs in PEERS.items()},
    }


def messages() -> dict[str, Any]:
    """What is pinned of messages and files: small ones in full, and digests of others."""
    key = SharedKey.of(b"the key of this test")
    blocks = {"attn": Blocks([12, 5, 31]), "swa": Blocks([0, 7], null=0)}
    handoff = Handoff(
        Source("prefill", "a1", "10.0.0.1", 5600),
        "request 1",
        40,
        prompt_digest(range(40)),
        blocks,
        kept={"swa": 16},
        prefixes={30: prompt_digest(range(30))},
        weights_version="step 7",
    )
    leases = Leases(Driver())
    lease = leases.grant("request 1")
    claims = ClaimMessage(
        "a1", claims=((lease, "decode 1"), ("of nobody", "decode 1")), done=(("of nobody", "decode 2"),), asks=(lease,)
    )
    (worker,) = Model.shipped("qwen3-0.6b").engine("prefill", num_blocks=9)
    chain = Chain.of("qwen", range(100), [(40, "image 7")], tokens_per_page=16)
    shard, *_ = shards_of(worker, 16)
    page = pack(chain.keys[1], 32, shard, memoryview(bytes(range(256)) * (shard.num_bytes // 256)))
    return {
        "offers": {name: _sha256(offers(name)) for name in sorted(Model.names())},
        "handoff": handoff.params(key),
        "claims": json.dumps(claims.fields()).replace(lease, "LEASE"),
        "answers": json.dumps(attrs.asdict(answer_claims(leases, "a1", claims))),
        "prompts": [prompt_digest([3, 17, 5]), prompt_digest([3, 17, 5], ["adapter sql", "image 7"])],
        "page keys": [chain.space, *chain.keys],
        "parts": [each.name for each in shards_of(worker, 16)],
        "page": _sha256(page),
    }


def _sha256(chunks: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()[:16]


def offers(name: str) -> Iterator[bytes]:
    """The offers of all workers of a model, of TP 1 and 2 in two orders of axes."""
    for tp, layout in ((1, "LBHNC"), (2, "BLNHC")):
        for worker in Model.shipped(name).engine("prefill", tp=tp, layout=layout, num_blocks=9):
            yield encode(worker)


def digests() -> dict[str, Any]:
    """What is pinned of digests of a cache: a half-filled block, and one of two contexts."""
    import torch

    from kvplan_nixl.digest import WorkerDigests
    from kvplan_nixl.rearrange import memories_of

    cache = torch.arange(4 * 4 * 6 * 8, dtype=torch.float32).reshape(4, 4, 6, 8)
    region = region_of(cache)
    group = Group("attn", 4, Context(1, 2, 2))
    view = view_of(
        cache, "block token head dim", name="layers.0", group="attn", region=region, shards={"head": (0, 6, 12)}
    )
    worker = Worker("engine", 0, [region], [group], [view])
    return WorkerDigests(worker, memories_of([cache])).of({"attn": Blocks([2, 0, 3])}, (3, 21))


def share_right(simulation: Simulation, model: str) -> float:
    """How many requests of fleets are right, of 1. All rules hold in them, END among them: each request ends."""
    ends = Counter[str]()
    for seed in range(SCENARIOS):
        outcome = simulation.run(Scenario.of(seed, MODELS[model]))
        assert outcome.rule == "", str(outcome)
        ends.update(outcome.ends)
    return ends["right"] / ends.total()


def all_pins() -> dict[str, Any]:
    """What the file has."""
    logging.disable(logging.CRITICAL)
    simulations = {name: make() for name, make in FLEETS.items()}
    shares: dict[str, dict[str, float]] = {name: {} for name in FLEETS}
    for name, model in FLEET_MODELS:
        shares[name][model] = round(share_right(simulations[name], model), 2)
    return {
        "plans": {profile: plans(profile) for profile in WORLDS},
        "messages": messages(),
        "digests": digests(),
        "right": shares,
    }


@pytest.fixture(scope="module")
def pinned() -> Any:
    return json.loads(GOLDEN.read_text())


def test_plans_are_as_they_were(pinned: Any) -> None:
    """The rows of tables and the ids of requests, of a part of all small worlds, and of the second opinion's pairs."""
    profile = "long" if IS_LONG else "ci"
    assert plans(profile) == pinned["plans"][profile], CHANGED


def test_messages_and_files_are_as_they_were(pinned: Any) -> None:
    """Offers of all shipped models, a handoff's parameters, claims and their answers, and a page of a store."""
    assert messages() == pinned["messages"], CHANGED


@pytest.mark.skipif(find_spec("torch") is None or find_spec("nixl") is None, reason="torch and NIXL digest caches")
def test_digests_are_as_they_were(pinned: Any) -> None:
    """Of a cache whose positions several workers share."""
    assert digests() == pinned["digests"], CHANGED


@pytest.mark.parametrize(("name", "model"), FLEET_MODELS)
def test_fleets_keep_all_rules_and_as_many_requests_are_right(pinned: Any, name: str, model: str) -> None:
    """No rule is broken, each request ends, and about as many as before are right."""
    logging.disable(logging.CRITICAL)
    simulation = FLEETS[name]()
    share = share_right(simulation, model)
    logging.disable(logging.NOTSET)
    assert share == pytest.approx(pinned["right"][name][model], abs=TOLERANCE), CHANGED


if __name__ == "__main__":
    print(json.dumps(all_pins(), indent=1))
