"""NIXL's executor passes the executor contract, and moves the hard pairs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import pytest

from benchmarks.real_memory import NixlCluster, placed
from kvplan import Model, Worker, contacts
from kvplan.cli.trials import PlacedRequest, blocks_needed
from kvplan.models.options import EngineOptions
from kvplan.testing.executors import ExecutorContract, Transmission
from tests.nixl.conftest import DEVICES, has_gpu
from tests.plan.test_hard_pairs import PAIRS, TWELVE_HEADS
from tests.shortened import shortened
from tests.small import engine

TOKENS = (5, 70)


class TestNixlExecutor(ExecutorContract):
    """NIXL under the contract, in main memory."""

    device = "cpu"

    def open_cluster(self, workers: Sequence[Worker]) -> NixlCluster:
        """Workers get memory of the device."""
        return NixlCluster(workers, self.device)


@pytest.mark.skipif(not has_gpu, reason="no GPU")
class TestNixlExecutorOnGpu(TestNixlExecutor):
    """NIXL under the contract, in memory of a GPU."""

    device = "cuda:0"


def few_layers(model: Model, src: str, dst: str) -> tuple[Model, str, str]:
    """The model with a few layers of each kind, and the pair with as many pipeline stages as they allow."""
    few = shortened(model)
    stages = max(EngineOptions.parse(text, "src").pp for text in (src, dst))
    if len(few.layers) < stages:
        few = attrs.evolve(model, layers=model.layers[: stages + 1])
    return few, src, dst.replace("stages=20+40", f"stages=1+{len(few.layers) - 1}")


def tight(request: PlacedRequest, stop: int) -> tuple[EngineOptions, EngineOptions]:
    """The request's sides with pools of two blocks more than it needs, because every byte is compared."""
    sides = []
    for side, workers in ((request.src, request.sources), (request.dst, request.destinations)):
        needed = blocks_needed(workers, stop).values()
        sides.append(attrs.evolve(side, blocks=2 + (sum(needed) if side.shared else max(needed))))
    return sides[0], sides[1]


def test_memory_of_workers_is_not_freed_before_them() -> None:
    """Workers that were placed one after the other do not share memory, even if nothing else refers to it."""
    workers = [placed(worker)[0] for worker in (*engine("prefill", tp=2), *engine("decode", tokens=6))]
    spans = sorted((region.address, region.end) for worker in workers for region in worker.regions)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("model", "src", "dst"), PAIRS, ids=[" ".join(pair) for pair in PAIRS])
def test_every_byte_of_a_hard_pair_is_right(model: str, src: str, dst: str, device: str) -> None:
    """A request moves by reads and by writes. Each time every byte of both engines' memory is the expected one."""
    made = Model.from_config(TWELVE_HEADS) if model == "12 heads" else Model.shipped(model)
    made, src, dst = few_layers(made, src, dst)
    request = PlacedRequest.of(made, EngineOptions.parse(src, "src"), EngineOptions.parse(dst, "dst"), TOKENS)
    request = PlacedRequest.of(made, *tight(request, TOKENS[1]), TOKENS)
    pairs = contacts(request.destinations, request.sources)
    with NixlCluster([*request.sources, *request.destinations], device, contacts=pairs) as cluster:
        sources, destinations = (
            [worker for worker in cluster.workers if worker.engine_id == engine[0].engine_id]
            for engine in (request.sources, request.destinations)
        )
        one = Transmission(cluster, sources, destinations, request.local, request.remote, request.tokens)
        one.move("READ", "read")
        one.move("WRITE", "write")
