"""The real models: what kvplan reads from a configuration is what a model of transformers caches."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from transformers import OlmoHybridConfig

from kvplan import Model
from kvplan.models import FAMILIES
from kvplan.models.families import REFUSED
from kvplan.models.kinds import LAYER_TYPES
from tests.models.walk import CLASSES, TABLE, defaults, model_types, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers

TYPES = model_types()
WALKED = sorted(TYPES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny, so threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


OUTER = {"minimax_m3": "minimax_m3_vl_text", "minimax_m3_text": "minimax_m3_vl_text"}
"""Outer types of published files that transformers does not have."""


def test_each_family_is_read_or_refused() -> None:
    """Every model type of transformers has an entry or a reason."""
    assert {*WALKED} <= {*FAMILIES} | {*REFUSED}
    assert not {*FAMILIES} & {*REFUSED}


def test_defaults_are_those_of_transformers() -> None:
    """families.json has the keys and the defaults of the configuration classes, and the decoder of each outer type."""
    table = json.loads(TABLE.read_text())
    assert table["classes"] == {name: defaults(CLASSES[name]) for name in WALKED if name not in REFUSED}
    inner = {outer: name for name, outers in TYPES.items() for outer in outers if name not in REFUSED}
    assert table["outer"] == inner | OUTER


@pytest.mark.parametrize("model_type", [name for name in WALKED if name not in REFUSED])
def test_the_plan_has_what_the_model_caches(model_type: str) -> None:
    """Layers, kinds, shapes and windows are those of a forward, also of a file that leaves out what it may."""
    assert verdict(model_type) == ("equal", "")


@pytest.mark.parametrize("num_layers", range(2, 9))
def test_olmo_hybrid_has_a_full_layer_whatever_its_number_of_layers(num_layers: int) -> None:
    """OlmoHybridConfig lets the last layer attend to all positions if no fourth layer does."""
    config = OlmoHybridConfig(num_hidden_layers=num_layers)
    kinds = [layer[0].group for layer in Model.from_config(config.to_dict()).layers]
    assert kinds == [LAYER_TYPES[layer_type] for layer_type in config.layer_types]
    layers = Model.from_config({**config.to_dict(), "layer_types": None}).layers
    assert kinds == [layer[0].group for layer in layers]


def test_the_pages_state_the_counts() -> None:
    """README and the guide say how many types of transformers are read, and how many others."""
    known, refused = {*WALKED} & {*FAMILIES}, {*WALKED} & {*REFUSED}
    root = TABLE.parents[2]
    assert len(WALKED) == len(known) + len(refused) == 213
    counts = f"{len(known)} of the 213 decoders of transformers 5.23, and {len(FAMILIES) - len(known)}"
    pages = [" ".join((root / name).read_text().split()) for name in ("README.md", "docs/how-to/models.md")]
    assert f"is one of {len(FAMILIES)}: {counts} that only engines have" in pages[0]
    assert f"{counts} types that only engines have" in pages[1]
