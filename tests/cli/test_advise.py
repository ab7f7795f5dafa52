"""advise: which changes of two engines are tried, and what the command prints and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from kvplan import Model
from kvplan.cli import trials
from kvplan.cli.advise import Result, changed_options
from kvplan.models.engines import ENGINES, default_keys, reasons
from kvplan.models.options import EngineOptions
from kvplan.verification import Report
from tests.conftest import Cli
from tests.shortened import shortened

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
TINY = shortened(Model.from_config(CONFIG, "tiny"))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The path of a small model's config.json."""
    written = tmp_path / "config.json"
    written.write_text(json.dumps(CONFIG))
    return str(written)


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
    """No layout of blocks of all layers for sparse latents in vLLM, and for SGLang."""
    model = Model.shipped(name)
    side = ",".join(f"{key}={value}" for key, value in default_keys(model, engine).items())
    tried = changed_options(model, EngineOptions.parse(side, "src"), EngineOptions(), engine)
    assert [change for change, options in tried.items() if reasons(model, options)[engine]] == []
    layouts = {options.layout[0] for options in tried.values()}
    assert layouts == ({"L"} if engine == "SGLang 0.5.23" or name == "deepseek-v3.2" else {"L", "B"})


def test_a_pair_is_compared_with_its_changes(cli: Cli, path: str) -> None:
    """Fewest descriptors first, the engines as they are last, and every line is what verify counts."""
    document = json.loads(cli("advise", path, "--src", "vllm,tp=2,layout=LBNHC", "--dst", "vllm", "--json").out)
    numbers = [cell["descriptors"] for cell in document["cells"]]
    assert len(numbers) > 2
    assert numbers == sorted(numbers)
    assert [cell["differs"] for cell in document["cells"]].index("no change") == len(numbers) - 1
    for cell in document["cells"]:
        arguments = ("verify", path, "--src", cell["src"], "--dst", cell["dst"], "--tokens", "5:150", "--json")
        assert json.loads(cli(*arguments).out)["descriptors"] == cell["descriptors"]
        assert cell["verified"]
        assert cell["unsupported"]["src"]["vLLM 0.33"] == cell["unsupported"]["dst"]["vLLM 0.33"] == []


def test_a_pair_that_cannot_work_is_refused_and_a_change_is_left_out(cli: Cli, path: str) -> None:
    """There is nothing to compare with a pair that is refused; a pool of 4 blocks of 64 has too few of 32."""
    run = cli("advise", path, "--src", "tp=16,dcp=8", "--dst", "tp=16")
    assert (run.status, run.out) == (2, "")
    assert run.err.startswith("LAYOUT: cannot spread positions")
    run = cli("advise", path, "--src", "block=64,blocks=4,layout=LBNHC", "--dst", "block=64")
    assert run.status == 0
    assert "| src layout=" in run.out
    assert "| src block=32 |" not in run.out


def test_wrong_bytes_of_a_change_are_shown(cli: Cli, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never left out for their number of descriptors, and a bar in their text is no column."""
    failed = Report(1, 1, 1, checked=("VALUE",), failures=(("VALUE", "byte 3 is\nanother | one"),))
    monkeypatch.setattr(trials, "verify", lambda *args, **kwargs: failed)
    run = cli("advise", path, "--src", "vllm", "--dst", "vllm")
    assert (run.status, run.err) == (1, "")
    assert "| wrong, VALUE: byte 3 is another \\| one |" in run.out


def test_a_wrong_change_is_shown_next_to_a_right_one_with_the_same_figures(
    cli: Cli, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both layouts of the source need as many descriptors, of the same lengths."""
    result_of = Result.of

    def one_wrong(model: Model, change: str, src: EngineOptions, dst: EngineOptions) -> Result:
        result = result_of(model, change, src, dst)
        if change != "src layout=LBHNC":
            return result
        report = attrs.evolve(result.trial.report, failures=(("VALUE", "byte 3 is another one"),))
        return attrs.evolve(result, trial=attrs.evolve(result.trial, report=report))

    monkeypatch.setattr(Result, "of", one_wrong)
    run = cli("advise", path, "--src", "tp=2,layout=LBNHC", "--dst", "tp=1")
    assert (run.status, run.err) == (1, "")
    assert "| src layout=BLHNC |" in run.out
    assert "| src layout=LBHNC |" in run.out
