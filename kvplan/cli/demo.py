"""The demo's cases: pairs of engines that differ, on the geometry of real models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs

from kvplan.cli.bars import Progress, told, untold
from kvplan.cli.sides import Side
from kvplan.cli.trials import Request, Trial
from kvplan.models.model import Model

TOKENS: Final = (0, 150)

TWELVE_HEADS: Final = "12 KV heads"
"""A geometry and no model: what 2 and 3 workers share without either count dividing the other."""


@attrs.frozen
class Case:
    """A model, its prefill engine and its decode engine, in the words of :class:`Side`."""

    model: str
    src: str
    dst: str


CASES: Final = (
    Case("llama-3.1-8b", "tp=2", "tp=8"),
    Case("llama-3.1-8b", "tp=2,block=16", "tp=2,block=64"),
    Case("llama-3.1-8b", "tp=2,block=64", "tp=2,block=16"),
    Case("llama-3.1-70b", "tp=16", "tp=4"),
    Case("qwen3-0.6b", "tp=1,layout=LBNHC", "tp=2,layout=LBHNC"),
    Case("qwen3-32b", "pp=2,tp=4,layout=LBNHC", "tp=8,block=64,layout=BLHNC"),
    Case("qwen3-235b-a22b", "tp=8", "tp=2"),
    Case("deepseek-v3", "tp=16,block=64", "tp=8,block=64"),
    Case("deepseek-v3", "tp=8,block=64", "tp=8,dcp=8,block=64"),
    Case(TWELVE_HEADS, "tp=2", "tp=3"),
)


def trials(progress: Progress = untold) -> Iterator[tuple[Case, Trial]]:
    """Each case and its trial, one after the other."""
    for case in told(CASES, progress):
        src, dst = Side.parse(case.src, "the demo's source"), Side.parse(case.dst, "the demo's destination")
        yield case, Trial.of(Request.of(_model(case.model), src, dst, TOKENS))


def _model(name: str) -> Model:
    if name != TWELVE_HEADS:
        return Model.shipped(name)
    config = {
        "model_type": "llama",
        "hidden_size": 12 * 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 128,
    }
    return Model.from_config(config)
