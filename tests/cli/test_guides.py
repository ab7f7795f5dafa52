"""Guides in YAML as inputs: which engines they start, and what is read of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplan import KVPlanError
from kvplan.cli.guides import is_guide
from kvplan.cli.inputs import EngineInput
from kvplan.models.engines import CONNECTOR
from tests.pages import ROOT

KUBERNETES = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: scripts}
data:
  start.sh: |
    # SGLang, from a script
    exec python -m sglang.launch_server --model-path tiny.json --tp-size 2 \\
      --page-size 64
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: prefill}
spec:
  template:
    spec:
      containers:
        - name: vllm
          env: [{name: VLLM_KV_CACHE_LAYOUT, value: HND}, {name: KEY, valueFrom: {secretKeyRef: {name: a, key: b}}}]
          command: [sh, -c]
          args: ["sleep 1; exec vllm serve tiny.json --tensor-parallel-size 2"]
        - {name: sidecar, image: envoy, args: [--port, "1"]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: decode}
spec:
  template:
    spec:
      containers:
        - {name: vllm, args: [--tensor-parallel-size, "4", --block-size=32]}
"""


@pytest.mark.parametrize(
    "name, keys, engine",
    [
        ("prefill/vllm", {"tp=2", "layout=LBHNC"}, "vLLM"),
        ("decode/vllm", {"tp=4", "block=32"}, "vLLM"),
        ("start.sh", {"tp=2", "block=64"}, "SGLang"),
    ],
)
def test_each_engine_of_a_guide_has_a_name(name: str, keys: set[str], engine: str, tmp_path: Path) -> None:
    """Documents, containers, lists of arguments without a command, and scripts in texts."""
    (tmp_path / "k8s.yaml").write_text(KUBERNETES)
    side = EngineInput.parse(f"{tmp_path / 'k8s.yaml'}#{name}", "--src")
    assert ({*side.keys.split(",")}, side.engine) == (keys, side.engine)
    assert engine in f"{side.engine}"


def test_a_guide_with_several_engines_wants_a_name(tmp_path: Path) -> None:
    """The error lists them, in their order."""
    (tmp_path / "k8s.yaml").write_text(KUBERNETES)
    for name, got in (("", "a file with 3 engines"), ("#proxy", "'proxy'")):
        with pytest.raises(KVPlanError) as refused:
            EngineInput.parse(f"{tmp_path / 'k8s.yaml'}{name}", "--src")
        assert str(refused.value) == (
            f"NAME: cannot read --src: expected FILE#NAME with one of start.sh, prefill/vllm, decode/vllm, got {got}"
        )


@pytest.mark.parametrize("file, name", [("compose", "decode"), ("kubernetes", "decode/vllm")])
def test_the_guides_of_this_repository_are_read(file: str, name: str) -> None:
    side = EngineInput.parse(f"{ROOT / 'docs/deploy' / file}.yaml#{name}", "--src")
    assert (side.connector, side.model) == (CONNECTOR, "Qwen/Qwen3-8B")


def aliases(begin: str, line: str, levels: int) -> str:
    """Ten aliases of ten aliases, and so on."""
    lines = [begin, *(line.format(level, ", ".join([f"*a{level - 1}"] * 10)) for level in range(1, levels))]
    return "\n".join(lines)


ENGINE = "engine: {args: [--tensor-parallel-size, '2']}"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(aliases("a0: &a0 [x]", "a{0}: &a{0} [{1}]", 7), id="aliases"),
        pytest.param("a: &a [*a]", id="itself"),
        pytest.param("a: &a {name: x, b: *a}", id="itself, with a name"),
        pytest.param("c: &c [" + "x" * 99_999 + "]\nb: [" + "{args: *c}, " * 99 + "]", id="commands"),
        pytest.param("c: &c vllm serve " + "x" * 99_999 + "\nb: [" + "{command: *c}, " * 99 + "]", id="engines"),
        pytest.param("a: " + "[" * 3000 + "]" * 3000, id="deep"),
    ],
)
def test_a_guide_that_grows_is_refused(text: str, tmp_path: Path) -> None:
    """Read as it stands it had a million parts, or no end."""
    (tmp_path / "k8s.yaml").write_text(f"{text}\n{ENGINE}\n")
    with pytest.raises(KVPlanError) as refused:
        EngineInput.parse(f"{tmp_path / 'k8s.yaml'}", "--src")
    assert refused.value.code == "RANGE"


def test_a_text_that_is_too_long_for_a_guide_is_a_log() -> None:
    """It is not parsed as YAML."""
    line = "engine: {args: [--tp-size, '2']}\n"
    assert is_guide(line)
    assert not is_guide(line + "# \n" * (1 << 19))


@pytest.mark.parametrize(
    "value",
    ["2026-13-99", "!!timestamp x", "!!bool x", "!!int x", "!!float x", "9" * 5000, "0b", "1:99:99", "!!binary x"],
)
def test_a_value_that_is_none_is_read_as_it_stands(value: str, tmp_path: Path) -> None:
    """Nobody asks what a date or a number is: each ended the command with an error of Python's."""
    (tmp_path / "k8s.yaml").write_text(f"a: {value}\n{ENGINE}\n")
    assert EngineInput.parse(f"{tmp_path / 'k8s.yaml'}", "--src").keys == "tp=2"


def test_options_of_a_guide_are_as_they_are_written(tmp_path: Path) -> None:
    """Numbers without quotes, and settings that are flags."""
    text = """\
x-common: &common {environment: {SGLANG_USE_HND_KVCACHE: true}}
services:
  prefill: {<<: *common, command: [python, -m, sglang.launch_server, --tp-size, 2, --page-size, 64]}
"""
    (tmp_path / "compose.yaml").write_text(text)
    side = EngineInput.parse(f"{tmp_path / 'compose.yaml'}", "--src")
    assert {*side.keys.split(",")} == {"tp=2", "block=64", "layout=LBHNC"}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("\n" * 30_000 + ENGINE, id="empty lines"),
        pytest.param(f"a: {{command: [{'x ' * 30_000}], args: ['{' ' * 30_000}--tp-size 2']}}", id="spaces"),
    ],
)
def test_a_long_guide_is_read_at_once(text: str, tmp_path: Path) -> None:
    """A look at each pair of its characters took hours."""
    (tmp_path / "k8s.yaml").write_text(text)
    assert EngineInput.parse(f"{tmp_path / 'k8s.yaml'}", "--src").keys == "tp=2"


@pytest.mark.parametrize(
    "line",
    ["non-default args: {'tensor_parallel_size': 2, 'x': <object>}", "non-default args: {" + "[" * 9999 + "}"],
)
def test_a_log_that_is_no_literal_is_refused(line: str) -> None:
    with pytest.raises(KVPlanError) as refused:
        EngineInput.parse(f"vllm serve {line}", "--src")
    assert refused.value.code == "NAME"


def test_a_long_word_of_a_log_is_read_at_once() -> None:
    side = EngineInput.parse(f"sglang serve server_args=ServerArgs(tp_size=2, {'a' * 30_000})", "--src")
    assert side.keys == "tp=2"
