"""The matrix: which mismatches a model has, how each is decided, and what the command prints and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplan import Model
from kvplan.cli import matrix, trials
from kvplan.cli.matrix import (
    MISMATCHES,
    Mismatch,
    Result,
    changed_options,
    markdown,
    mismatches,
    shortened,
)
from kvplan.models.engines import ENGINES, default_keys, reasons
from kvplan.models.options import EngineOptions
from kvplan.verification import Report
from tests.conftest import Cli

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
TINY = shortened(Model.from_config(CONFIG, "tiny"))
RUNS: dict[str, dict[str, list[str]]] = {"src": {"vLLM 0.33": []}, "dst": {"vLLM 0.33": ["no"]}}
TOKEN_BYTES = 4 * 4 * 2 * 16 * 2  # 4 layers, K and V of 4 heads


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a small model's config.json, for a matrix of one possible and one impossible mismatch."""
    two = (Mismatch("TP", "tp=1", "tp=2"), Mismatch("context", "tp=16,dcp=2", "tp=16,dcp=8", "token"))
    monkeypatch.setattr(matrix, "MISMATCHES", two)
    written = tmp_path / "config.json"
    written.write_text(json.dumps(CONFIG))
    return str(written)


@pytest.mark.parametrize("name", Model.names())
def test_a_shortened_model_has_every_kind_of_layer(name: str) -> None:
    """Few layers are left, in their order, at least two of each kind where there are two."""
    whole = Model.shipped(name)
    short = shortened(whole)
    rest = iter(whole.layers)
    assert all(layer in rest for layer in short.layers)
    assert all(short.layers.count(layer) >= min(whole.layers.count(layer), 2) for layer in whole.layers)
    assert 4 <= len(short.layers) <= 6


def test_a_short_model_stays_whole() -> None:
    """A model of one layer is left as it is."""
    assert len(shortened(Model.from_config({**CONFIG, "num_hidden_layers": 1})).layers) == 1


@pytest.mark.parametrize(
    "name, missing",
    [
        ("llama-3.1-8b", {"convolution", "pools"}),
        ("gpt-oss-20b", {"convolution"}),
        ("deepseek-v3", {"convolution", "K and V", "pools", "scales"}),
        ("falcon-mamba-7b", {"K and V", "block", "context", "kernel blocks", "pools", "scales"}),
        ("granite-4.0-h-tiny", set()),
    ],
)
def test_a_model_has_the_mismatches_that_make_sense_for_it(name: str, missing: set[str]) -> None:
    """Mismatches about an axis that the model lacks are left out, and no others."""
    assert {each.differs for each in MISMATCHES} - {each.differs for each in mismatches(Model.shipped(name))} == missing


def test_every_mismatch_of_a_small_model_is_verified() -> None:
    """Each mismatch moves its positions' bytes, more with replicated heads; quantized values move with their scales."""
    bytes_by_bits = {None: TOKEN_BYTES, 8: 4 * 4 * 2 * (16 + 4), 4: 4 * 4 * 2 * (8 + 1)}
    every = mismatches(TINY)
    assert [each.src for each in every if each.src.startswith("stages")] == ["stages=1+3"]
    for mismatch in every:
        result = Result.of(TINY, mismatch)
        assert (result.verdict, result.reason) == ("verified", None)
        assert result.trial is not None
        moved, once = result.trial.report.num_bytes, 145 * bytes_by_bits[mismatch.bits]
        assert moved == once if mismatch.bits else moved >= once


@pytest.mark.usefixtures("path")
def test_a_mismatch_is_verified_refused_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal has the reason of the error; wrong bytes are neither verified nor refused, and are one line."""
    possible, impossible = mismatches(TINY)
    refused = Result.of(TINY, impossible)
    assert refused.verdict == "refused"
    assert str(refused).startswith("refused, LAYOUT: cannot spread positions of tiny: expected dcp <= 4")
    failed = Report(1, 1, 1, checked=("VALUE",), failures=(("VALUE", "byte 3 is\nanother"),))
    monkeypatch.setattr(trials, "verify", lambda *args, **kwargs: failed)
    wrong = Result.of(TINY, possible)
    assert (wrong.verdict, str(wrong)) == ("wrong", "wrong, VALUE: byte 3 is another")


def test_what_a_model_cannot_have_is_one_refused_line(cli: Cli) -> None:
    """One layer has no two stages, and 40 elements are no whole number of scales: all other lines stand."""
    run = cli("matrix", "layers=1,kv_heads=3,head_dim=40")
    lines = [line for line in run.out.splitlines() if line.startswith("| ")]
    refused = [line.partition(" | refused, ")[2].partition(":")[0] for line in lines if " refused, " in line]
    assert run.status == 0
    assert refused == ["LAYOUT"] * 3 + ["RANGE", "SIZE"]
    assert len(lines) > 20


def test_the_table_has_a_line_for_each_result() -> None:
    """The Markdown table has five columns in every line, also if a reason has a bar; bits are named."""
    lines = list(
        markdown([Result(Mismatch("scales", "tp=1", "tp=2", bits=8), "refused", "LAYOUT: a|b", None, RUNS)] * 2)
    )
    assert len(lines) == 4
    assert all(line.replace("\\|", "").count("|") == 6 for line in lines)
    assert lines[3].startswith("| scales, 8 bits | tp=1 | tp=2 | vLLM 0.33 -> none | refused, ")


def test_the_command_prints_the_table(cli: Cli, path: str) -> None:
    """The command prints a title and the table, and exits with 0 if a mismatch is refused with a reason."""
    run = cli("matrix", path)
    assert (run.status, run.err) == (0, "")
    # By hand: on 2 workers and 4 layers, 8 whole blocks of 2 heads in one piece, 2 cut blocks with each head apart.
    title, _, caches, blank, *table = run.out.splitlines()
    assert (title, blank) == (f"{path}, 4 of 9 layers, positions [5, 150):", "")
    assert caches.startswith("- caches ")
    assert (
        table[2]
        == "| TP | tp=1 | tp=2 | vLLM 0.33, SGLang 0.5.23 | verified: 96 descriptors of 384 bytes to 2048 bytes |"
    )
    assert table[3].startswith("| context | tp=16,dcp=2 | tp=16,dcp=8 | none | refused, LAYOUT: ")
    assert len(table) == 4


def test_the_command_prints_one_json_document(cli: Cli, path: str) -> None:
    """With --json each result is an object: the two engines, the verdict, and the reason or what moved."""
    document = json.loads(cli("matrix", path, "--json").out)
    verified, refused = document.pop("cells")
    assert {*verified.pop("unsupported")} == {*refused.pop("unsupported")} == {"src", "dst"}
    assert document == {"model": path, "layers": {"moved": 4, "of": 9}, "tokens": [5, 150]}
    moved = {"bytes": 145 * TOKEN_BYTES, "descriptors": 96, "lengths": [384, 2048]}
    pair = {"differs": "TP", "src": "tp=1", "dst": "tp=2"}
    assert verified == {**pair, "verdict": "verified", "reason": None, **moved}
    assert {*refused} == {*pair, "verdict", "reason"}
    assert refused["reason"].startswith("LAYOUT: cannot spread positions")


def test_the_command_fails_if_bytes_differ(cli: Cli, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result whose bytes are wrong makes the exit status 1."""
    failed = Report(1, 1, 1, checked=("VALUE",), failures=(("VALUE", "byte 3 is another"),))
    monkeypatch.setattr(trials, "verify", lambda *args, **kwargs: failed)
    run = cli("matrix", path)
    assert run.status == 1
    assert "| wrong, VALUE: byte 3 is another |" in run.out


def keys(model: Model, side: str = "", other: str = "", engine: str | None = None) -> list[str]:
    """The changes of an engine."""
    options, opposite = EngineOptions.parse(side, "src"), EngineOptions.parse(other, "dst")
    return [*changed_options(model, options, opposite, engine)]


def test_changes_are_those_that_make_sense_for_a_model() -> None:
    """Latents have no kv form and attention has no convolution; no change is what the engine has already."""
    hybrid = shortened(Model.shipped("granite-4.0-h-tiny"))
    assert {change.partition("=")[0] for change in keys(TINY)} == {"layout", "kv", "block"}
    assert {change.partition("=")[0] for change in keys(Model.shipped("deepseek-v3"))} == {"layout", "block"}
    assert {change.partition("=")[0] for change in keys(Model.shipped("falcon-mamba-7b"))} == {"layout", "conv"}
    assert not {"layout=LBHNC", "kv=content", "block=16", "conv=DS"} & {*keys(TINY), *keys(hybrid)}
    assert "block=48" in keys(TINY, other="block=48")
    assert "block=auto" in keys(hybrid, other="block=auto")


@pytest.mark.parametrize("engine", ENGINES.values())
@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3.2", "granite-4.0-h-tiny", "gpt-oss-20b"])
def test_a_named_engine_supports_what_is_tried(name: str, engine: str) -> None:
    """No layout of blocks of all layers for sparse latents in vLLM, and two layouts for SGLang."""
    model = Model.shipped(name)
    side = ",".join(f"{key}={value}" for key, value in default_keys(model, engine).items())
    tried = changed_options(model, EngineOptions.parse(side, "src"), EngineOptions(), engine)
    assert [change for change, options in tried.items() if reasons(model, options)[engine]] == []
    layouts = {options.layout[0] for options in tried.values()}
    assert layouts == ({"L"} if engine == "SGLang 0.5.23" or name == "deepseek-v3.2" else {"L", "B"})


def test_a_pair_is_compared_with_its_changes(cli: Cli, path: str) -> None:
    """Fewest descriptors first, the engines as they are last, and every line is what verify counts."""
    document = json.loads(cli("matrix", path, "--src", "vllm,tp=2,layout=LBNHC", "--dst", "vllm", "--json").out)
    numbers = [cell["descriptors"] for cell in document["cells"]]
    assert len(numbers) > 2
    assert numbers == sorted(numbers)
    assert [cell["differs"] for cell in document["cells"]].index("no change") == len(numbers) - 1
    for cell in document["cells"]:
        arguments = ("verify", path, "--src", cell["src"], "--dst", cell["dst"], "--tokens", "5:150", "--json")
        assert json.loads(cli(*arguments).out)["descriptors"] == cell["descriptors"]
        assert cell["unsupported"]["src"]["vLLM 0.33"] == cell["unsupported"]["dst"]["vLLM 0.33"] == []


def test_wrong_bytes_of_a_change_are_shown(cli: Cli, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never left out for their number of descriptors."""
    failed = Report(1, 1, 1, checked=("VALUE",), failures=(("VALUE", "byte 3 is another"),))
    monkeypatch.setattr(trials, "verify", lambda *args, **kwargs: failed)
    run = cli("matrix", path, "--src", "vllm", "--dst", "vllm")
    assert (run.status, run.err) == (1, "")
    assert "| wrong, VALUE: byte 3 is another |" in run.out
