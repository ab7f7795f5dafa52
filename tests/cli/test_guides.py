"""Guides in YAML as inputs: which engines they start, and what is read of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplan import KVPlanError
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
    assert (side.connector, f"{side.model}".endswith("Qwen/Qwen3-8B}" if file == "compose" else "Qwen/Qwen3-8B")) == (
        CONNECTOR,
        True,
    )
