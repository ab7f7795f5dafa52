"""Pairs that existing connectors refuse or get wrong, on the geometry of real models, verified byte for byte."""

from __future__ import annotations

import pytest

from kvplan import Model
from kvplan.cli.trials import PlacedRequest, Trial
from kvplan.models.options import EngineOptions

TWELVE_HEADS = {
    "model_type": "llama",
    "hidden_size": 12 * 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}

PAIRS = [
    ("llama-3.1-8b", "tp=2", "tp=8"),
    ("llama-3.1-8b", "tp=8", "tp=2"),
    ("llama-3.1-8b", "tp=3", "tp=8"),
    ("llama-3.1-8b", "tp=4,block=16,layout=LBNHC", "tp=2,block=64,layout=BLHNC"),
    ("llama-3.1-70b", "tp=16", "tp=4"),
    ("llama-3.1-70b", "tp=8,block=16", "tp=8,block=64"),
    ("llama-3.1-70b", "tp=8,block=64", "tp=8,block=16"),
    ("llama-3.2-1b", "tp=2,block=48", "tp=4,block=32"),
    ("llama-3.2-1b", "kv=split", "tp=2,kv=axis,pad=256"),
    ("llama-3.2-1b", "layout=BHLNC", "layout=LHBNC,block=24"),
    ("qwen3-0.6b", "tp=1,layout=LBNHC", "tp=2,layout=LBHNC"),
    ("qwen3-0.6b", "layout=BLHNC", "layout=BLHNC"),
    ("qwen3-0.6b", "layout=BLNHC", "tp=2,layout=LBNHC"),
    ("qwen3-32b", "pp=2,tp=4", "tp=8"),
    ("qwen3-32b", "pp=3", "pp=5"),
    ("qwen3-235b-a22b", "tp=8", "tp=2"),
    ("deepseek-v3", "tp=16,block=64", "tp=8,block=64"),
    ("deepseek-v3", "tp=8,block=64", "tp=16,block=64"),
    ("deepseek-v3", "tp=8,block=64", "tp=8,dcp=8,block=64"),
    ("deepseek-v3", "tp=2,dcp=2,block=64", "tp=8,dcp=8,block=64"),
    ("deepseek-v2-lite", "block=64", "tp=4,block=16"),
    ("gemma-3-27b", "tp=2", "tp=4"),
    ("gemma-4-31b", "tp=4", "tp=8"),
    ("gemma-4-31b", "tp=2", "tp=4"),
    ("gemma-4-31b", "tp=4", "tp=2"),
    ("gemma-4-31b", "tp=4", "tp=1"),
    ("gpt-oss-120b", "tp=2", "tp=8"),
    ("deepseek-v3.2", "tp=4,block=64", "tp=8,block=64"),
    ("deepseek-v3.2", "tp=4,block=64", "tp=8,dcp=4,interleave=3,block=16"),
    ("nemotron-h-8b", "tp=1", "tp=2"),
    ("nemotron-h-8b", "tp=8", "tp=16"),
    ("nemotron-h-8b", "tp=4", "tp=16"),
    ("nemotron-3-nano-30b-a3b", "tp=1", "tp=8"),
    ("qwen3-next-80b", "tp=8", "tp=2"),
    ("qwen3-next-80b", "tp=8,dcp=4", "tp=2,pp=3,layout=BLNHC"),
    ("granite-4.0-h-tiny", "tp=1", "tp=2"),
    ("granite-4.0-h-tiny", "tp=2", "tp=1"),
    ("granite-4.0-h-tiny", "tp=3,conv=SD", "tp=2,layout=LHBNC"),
    ("jamba-v0.1", "tp=1", "tp=2"),
    ("jamba-v0.1", "tp=2,conv=SD", "tp=1,conv=SD"),
    ("falcon-mamba-7b", "tp=1", "tp=2"),
    ("qwen3-next-80b", "tp=8,shared=1", "tp=2,shared=1,layout=BLHNC"),
    ("gemma-4-31b", "tp=4,shared=1", "tp=2,stages=20+40"),
    ("deepseek-v3", "tp=2,pcp=4,dcp=8,block=64", "tp=8,dcp=2,block=64"),
    ("qwen2.5-1.5b", "tp=4,pcp=2,dcp=4", "tp=4,pcp=3,dcp=3,interleave=5"),
    ("12 heads", "tp=2", "tp=3"),
    ("12 heads", "tp=3", "tp=2"),
    ("12 heads", "tp=4", "tp=6"),
    ("12 heads", "tp=6", "tp=4"),
    ("12 heads", "tp=5", "tp=7"),
]


def trial(model: str, src: str, dst: str, tokens: tuple[int, int]) -> Trial:
    made = Model.from_config(TWELVE_HEADS) if model == "12 heads" else Model.shipped(model)
    return Trial.of(PlacedRequest.of(made, EngineOptions.parse(src, "src"), EngineOptions.parse(dst, "dst"), tokens))


@pytest.mark.parametrize(("model", "src", "dst"), PAIRS, ids=[" ".join(pair) for pair in PAIRS])
def test_every_byte_of_a_hard_pair_is_right(model: str, src: str, dst: str) -> None:
    """A range that neither begins nor ends on a block moves whole, once, and nothing else does."""
    report = trial(model, src, dst, (5, 70)).report
    assert report.ok, str(report)
    assert report.num_bytes > 0


@pytest.mark.parametrize(
    ("model", "src", "dst", "lengths"),
    [
        ("llama-3.1-8b", "tp=8", "tp=8", {8192: 8 * 32 * 4}),
        ("llama-3.1-8b", "tp=2", "tp=8", {8192: 8 * 32 * 4}),
        ("qwen3-0.6b", "layout=BLHNC", "layout=BLHNC", {28 * 65536: 4}),
        ("qwen3-0.6b", "layout=LBHNC", "layout=BLHNC", {65536: 28 * 4}),
        ("qwen3-0.6b", "layout=BHLNC", "tp=4,layout=BHLNC", {28 * 16384: 4 * 4}),
        ("qwen3-0.6b", "tp=4,layout=BHLNC", "tp=2,layout=BHLNC", {28 * 16384: 4 * 4}),
        ("qwen3-0.6b", "layout=BHLNC", "pp=2,layout=BHLNC", {14 * 8192: 2 * 8 * 4}),
        ("qwen3-0.6b", "layout=BLHNC", "pp=2,layout=BLHNC", {14 * 65536: 2 * 4}),
        ("gpt-oss-120b", "layout=BHLNC,shared=1", "tp=8,layout=BHLNC,shared=1", {18 * 4096: 2 * 8 * 4}),
        ("qwen3-235b-a22b", "tp=8", "tp=2", {8192: 4 * 94 * 4}),
        ("deepseek-v3", "tp=2,block=64", "tp=1,block=64", {73728: 61}),
        ("deepseek-v3", "block=16", "block=64", {18432: 61 * 4}),
    ],
)
def test_runs_are_as_long_as_the_layouts_allow(model: str, src: str, dst: str, lengths: dict[int, int]) -> None:
    """Over whole blocks, descriptors by length are what can be worked out by hand from the model's sizes."""
    found: dict[int, int] = {}
    for moved in trial(model, src, dst, (0, 64)).pairs:
        for length, times in moved.lengths.items():
            found[length] = found.get(length, 0) + times
    assert found == lengths
