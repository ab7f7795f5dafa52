"""Which engines support a side: each rule of vLLM and SGLang, and the file that has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplan import Model
from kvplan.cli.advise import supporting
from kvplan.cli.model_files import load, quantize_model
from kvplan.cli.options import support_lines
from kvplan.models.engines import ENGINES, RULES, default_keys, reasons
from kvplan.models.options import EngineOptions
from tests.conftest import Cli

VLLM, SGLANG = ENGINES.values()
PHI = load("layers=2,kv_heads=10,head_dim=128,heads=40")
GRANITE, SPARSE = Model.shipped("granite-4.0-h-tiny"), Model.shipped("deepseek-v3.2")
MLA, GPT, NEMOTRON = Model.shipped("deepseek-v3"), Model.shipped("gpt-oss-20b"), Model.shipped("nemotron-h-8b")
MINICPM = Model.from_config(
    {
        "model_type": "minicpm3",
        "num_hidden_layers": 2,
        "num_attention_heads": 40,
        "hidden_size": 2560,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 32,
    }
)
MINIMAX = Model.from_config(
    {
        "model_type": "minimax_m3",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 1024,
        "head_dim": 128,
        "sparse_attention_config": {"sparse_index_dim": 128, "sparse_attention_freq": [0, 1]},
    }
)
ONE_HEAD = load("layers=2,kv_heads=1,head_dim=64,heads=12")
SOURCES = Path(__file__).parents[2] / ".second_opinion" / "sources"

CASES = [
    (VLLM, PHI, "tp=6", ["tp=6 does not divide 40 query heads", "10 KV heads and tp=6, neither of which divides"]),
    (VLLM, PHI, "tp=4", ["10 KV heads and tp=4, neither of which divides the other"]),
    (VLLM, PHI, "tp=41", ["tp=41 does not divide 40 query heads", "10 KV heads and tp=41, neither of which"]),
    (VLLM, PHI, "tp=20", []),
    (VLLM, PHI, "tp=10,dcp=2", ["dcp=2 with tp=10, not more than the 10 KV heads"]),
    (VLLM, PHI, "tp=20,dcp=2", []),
    (VLLM, PHI, "tp=20,dcp=4", ["dcp=4, more than the 2 ranks that hold each of 10 KV heads"]),
    (VLLM, ONE_HEAD, "tp=12,dcp=8", ["dcp=8 does not divide tp=12", "dcp=8 does not divide the 12 query heads"]),
    (VLLM, PHI, "tp=20,dcp=2,interleave=3", ["interleave=3 does not divide block=16"]),
    (VLLM, PHI, "pcp=2", ["pcp=2 in a model with other layers than MLA"]),
    (VLLM, MLA, "tp=4,pcp=2,dcp=4", ["dcp=4 with pcp=2 is none of 1, 2, 8"]),
    (VLLM, MLA, "tp=4,pcp=2,dcp=8", []),
    (VLLM, MLA, "kv=split", []),
    (VLLM, PHI, "block=24", ["block=24, no multiple of 16"]),
    (VLLM, SPARSE, "block=32", ["block=32, no multiple of 64, in a model with an indexer"]),
    (VLLM, SPARSE, "block=64,layout=BLHNC", ["layout=BLHNC: kernels of sparse MLA assert strides of whole rows"]),
    (VLLM, MINIMAX, "block=64,layout=BLHNC", ["layout=BLHNC, not LBHNC, in a model whose indexer chooses blocks"]),
    (VLLM, MINIMAX, "block=64", []),
    (VLLM, PHI, "kv=split", ["kv=split, not content"]),
    (VLLM, PHI, "layout=BHLNC", []),
    (VLLM, GPT, "shared=1,layout=LHBNC", []),
    (VLLM, GPT, "", ["shared=0, not 1"]),
    (VLLM, GPT, "tp=16,shared=1", ["tp=16, more than the 8 KV heads, which it does not replicate"]),
    (VLLM, MINICPM, "", ["K and V of each head in its cache, not latents"]),
    (
        VLLM,
        GRANITE,
        "block=auto,shared=1,layout=LHBNC",
        ["layout=LHBNC, which divides blocks, in a model whose layers"],
    ),
    (VLLM, GRANITE, "block=16,shared=1", ["block=16, smaller than a state, not auto"]),
    (VLLM, GRANITE, "tp=2,block=auto,shared=1", []),
    (VLLM, NEMOTRON, "tp=16,block=auto,shared=1", ["tp=16 does not divide the 8 heads, groups or channels of a state"]),
    (VLLM, quantize_model(PHI, 8), "scales=inline", []),
    (VLLM, quantize_model(PHI, 8), "scales=page", ["scales=page of float32, not inline"]),
    (VLLM, quantize_model(PHI, 4), "scales=page", []),
    (
        SGLANG,
        PHI,
        "tp=6,kv=split,layout=LBNHC",
        ["tp=6 does not divide 40 query heads", "10 KV heads and tp=6, neither"],
    ),
    (SGLANG, PHI, "tp=5,kv=split,layout=LBNHC,block=1", []),
    (SGLANG, PHI, "kv=content,layout=BLHNC", ["kv=content, not split", "layout=BLHNC, not LBNHC, the only one with"]),
    (SGLANG, PHI, "kv=split,layout=LBHNC,block=1", ["layout=LBHNC, not LBNHC, the only one with disaggregation"]),
    (SGLANG, MLA, "layout=LBHNC", []),
    (SGLANG, MLA, "layout=BLHNC", ["layout=BLHNC, neither LBNHC nor LBHNC"]),
    (SGLANG, MLA, "tp=4,dcp=3", ["dcp=3 does not divide tp=4"]),
    (SGLANG, MLA, "pcp=2", ["pcp=2, whose ranks its tp_size counts too"]),
    (SGLANG, SPARSE, "block=128", ["block=128, not 64, in a model with an indexer"]),
    (SGLANG, SPARSE, "block=64", []),
    (SGLANG, GPT, "kv=split,shared=1,layout=LBNHC", ["shared=1, not 0"]),
    (
        SGLANG,
        NEMOTRON,
        "tp=16,kv=split,layout=LBNHC",
        ["tp=16 does not divide the 8 heads, groups or channels of a state"],
    ),
    (SGLANG, quantize_model(PHI, 8), "kv=split,layout=LBNHC", ["scales=inline of float32, not stored"]),
    (SGLANG, quantize_model(PHI, 4), "kv=split,scales=region,layout=LBNHC", []),
]


@pytest.mark.parametrize(("engine", "model", "side", "expected"), CASES)
def test_each_reason(engine: str, model: Model, side: str, expected: list[str]) -> None:
    """A side has these reasons and no others; each begins so."""
    found = reasons(model, EngineOptions.parse(side, "--src"))[engine]
    assert len(found) == len(expected)
    assert all(reason.startswith(begin) for reason, begin in zip(found, expected, strict=True))


def test_each_rule_has_a_case() -> None:
    """Every rule is the reason of some case, with its source."""
    said = {
        reason for engine, model, side, _ in CASES for reason in reasons(model, EngineOptions.parse(side, ""))[engine]
    }
    assert {source for _, source, _ in RULES} == {reason.rpartition("(")[2].rstrip(")") for reason in said}


def test_sources_exist() -> None:
    """Each rule names a file of its engine, looked for where the sources are."""
    if not SOURCES.is_dir():
        pytest.skip("no sources of vLLM and SGLang here")
    assert [source for _, source, _ in RULES if not (SOURCES / source).is_file()] == []


def test_an_unknown_number_of_query_heads_is_no_reason() -> None:
    """Sizes may leave it out."""
    assert reasons(load("layers=2,kv_heads=10,head_dim=128"), EngineOptions(tp=10))[VLLM] == []


def test_lines_name_the_sides() -> None:
    """A reason that both sides have is one line, and an engine that runs both has one."""
    sides = {name: reasons(PHI, EngineOptions.parse("tp=2,layout=LBNHC", "")) for name in ("src", "dst")}
    assert [*support_lines(sides)] == [
        "vLLM 0.33 supports src and dst",
        "SGLang 0.5.23 does not support src and dst: kv=content, not split (sglang/srt/mem_cache/memory_pool.py)",
    ]
    assert supporting(sides["src"]) == "vLLM 0.33"
    assert supporting(reasons(PHI, EngineOptions(kv="axis"))) == "none"
    assert [*support_lines({})] == []


def test_verify_still_verifies_what_no_engine_runs(cli: Cli, tmp_path: Path) -> None:
    """Phi-4 moves from TP 4 to TP 6, and the answer says that vLLM runs neither."""
    model = "layers=2,kv_heads=10,head_dim=128,heads=40"
    run = cli("verify", model, "--src", "vllm,tp=4", "--dst", "vllm,tp=6", "--tokens", "40")
    assert run.status == 0
    assert "\nverified: " in run.out
    assert "vLLM 0.33 does not support src: 10 KV heads" in run.out
    assert "vLLM 0.33 does not support dst: tp=6 does not divide 40 query heads" in run.out
    document = json.loads(cli("verify", model, "--src", "vllm,tp=4", "--dst", "tp=2", "--tokens", "4", "--json").out)
    assert [{engine: len(found) for engine, found in side.items()} for side in document["unsupported"].values()] == [
        {VLLM: 1},
        {VLLM: 0},
    ]


def table() -> str:
    """How engines store three kinds of models, as a Markdown table."""
    models = {"K and V": PHI, "sliding and full layers": GPT, "states and attention": GRANITE}
    models |= {"MLA": MLA, "MLA with an indexer": SPARSE}
    rows = [f"| a model with | {' | '.join(ENGINES.values())} |", "|---|---|---|"]
    for kind, model in models.items():
        texts = (
            ",".join(f"{key}={value}" for key, value in default_keys(model, name).items()) for name in ENGINES.values()
        )
        rows.append(f"| {kind} | {' | '.join(f'`{text}`' for text in texts)} |")
    return "\n".join(rows)


def test_the_page_has_the_words_of_engines() -> None:
    """The table is that of the code."""
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    assert page.partition("<!-- words -->")[2].partition("<!-- end -->")[0].strip() == table()


def test_a_side_that_names_an_engine_has_its_defaults(cli: Cli) -> None:
    """Keys that the side states win, and no other engine is asked."""
    run = cli(
        "verify", "granite-4.0-h-tiny", "--layers", "4", "--src", "vllm,tp=2", "--dst", "sglang,block=16,ssm=bfloat16"
    )
    title, *_, first, second = run.out.splitlines()
    sides = "tp=2,block=auto,layout=BLHNC,conv=SD,shared=1,ssm=bfloat16 -> layout=LBNHC,kv=split,ssm=bfloat16"
    assert title == f"granite-4.0-h-tiny, {sides}, positions [0, 1000), 4 of 40 layers"
    assert (first, second) == ("vLLM 0.33 supports src", "SGLang 0.5.23 supports dst")


def test_a_side_names_one_engine_anywhere(cli: Cli) -> None:
    """Its place does not matter, and there is no second one."""
    first = cli("verify", "phi-4", "--layers", "1", "--src", "vllm,tp=2").out
    assert cli("verify", "phi-4", "--layers", "1", "--src", "tp=2,vllm").out == first
    assert cli("verify", "phi-4", "--src", "vllm,sglang").err.startswith(
        "NAME: cannot read a side\n  got vllm and sglang"
    )


def test_engines_that_nobody_names_say_nothing(cli: Cli) -> None:
    """A side without a name is judged by the engine of the other side; without any name there is no judge."""
    run = cli("verify", "phi-4", "--layers", "1", "--src", "vllm,tp=4")
    named = [line for line in run.out.splitlines() if "support" in line]
    assert [line.partition(" support")[0] for line in named] == ["vLLM 0.33 does not"]
    run = cli("verify", "phi-4", "--layers", "1", "--src", "tp=4")
    assert run.out.splitlines()[-1].startswith("verified: ")


@pytest.mark.parametrize("name", Model.names())
def test_engines_run_their_own_words(name: str) -> None:
    """Each engine runs each shipped model on one rank, as it stores it by default."""
    model = Model.shipped(name)
    for engine in ENGINES.values():
        text = ",".join(f"{key}={value}" for key, value in default_keys(model, engine).items())
        options = EngineOptions.parse(text, "a side")
        assert reasons(model, options)[engine] == []
        options.engine(model, "e", 300)
