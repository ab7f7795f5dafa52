"""NIXL's executor under the contract of all executors, and on the hard pairs."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from kvplan import Model, Worker, contacts
from kvplan.cli.matrix import shortened
from kvplan.cli.sides import EngineOptions
from kvplan.cli.trials import PlacedRequest, blocks_needed
from tests.contract import Contract, Engines, OpenWorld, move
from tests.nixl.worlds import NixlWorld
from tests.plan.test_hard_pairs import PAIRS, TWELVE_HEADS

TOKENS = (5, 70)


class TestNixlExecutor(Contract):
    """NIXL under the contract, on each device."""

    @pytest.fixture
    def open_world(self, device: str) -> OpenWorld:
        """Workers are placed in memory of the device."""

        def opened(workers: Sequence[Worker]) -> NixlWorld:
            return NixlWorld(workers, device)

        return opened


def few_layers(model: Model, src: str, dst: str) -> tuple[Model, str, str]:
    """The model with a handful of layers, some of each kind, and the pair's stages as long as that allows."""
    few = shortened(model)
    stages = max(EngineOptions.parse(text, "src").pp for text in (src, dst))
    if len(few.layers) < stages:
        few = attrs.evolve(model, layers=model.layers[: stages + 1])
    return few, src, dst.replace("stages=20+40", f"stages=1+{len(few.layers) - 1}")


def tight(request: PlacedRequest, stop: int) -> tuple[EngineOptions, EngineOptions]:
    """The request's sides with pools that have two blocks more than it needs, since every byte is compared."""
    sides = []
    for side, workers in ((request.src, request.sources), (request.dst, request.destinations)):
        needed = blocks_needed(workers, stop).values()
        sides.append(attrs.evolve(side, blocks=2 + (sum(needed) if side.shared else max(needed))))
    return sides[0], sides[1]


def move_both_ways(model: str, src: str, dst: str, device: str) -> None:
    """Move a request of a hard pair by reads and by writes, in memory of a device, and check every byte each time."""
    made = Model.from_config(TWELVE_HEADS) if model == "12 heads" else Model.shipped(model)
    made, src, dst = few_layers(made, src, dst)
    request = PlacedRequest.of(made, EngineOptions.parse(src, "src"), EngineOptions.parse(dst, "dst"), TOKENS)
    request = PlacedRequest.of(made, *tight(request, TOKENS[1]), TOKENS)
    pairs = contacts(request.destinations, request.sources)
    with NixlWorld([*request.sources, *request.destinations], device, contacts=pairs) as world:
        engines = Engines(world, len(request.sources), request.local, request.remote, request.tokens)
        for operation in ("READ", "WRITE"):
            move(engines, operation, operation)


@pytest.mark.parametrize(("model", "src", "dst"), PAIRS, ids=[" ".join(pair) for pair in PAIRS])
def test_every_byte_of_a_hard_pair_is_right(model: str, src: str, dst: str, device: str) -> None:
    """The request moves by reads and by writes: every byte of both engines' memory is the one that belongs there."""
    move_both_ways(model, src, dst, device)
