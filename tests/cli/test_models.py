"""The command models, and what a shell completes."""

from __future__ import annotations

import json

import pytest

from kvplan import Model
from kvplan.models import FAMILIES
from tests.conftest import Cli


def test_models_lists_shipped_models_and_types(cli: Cli) -> None:
    """Each shipped model in its order, with bytes of a token or of a request, then every type of config.json."""
    run = cli("models")
    heading = f"{len(FAMILIES)} types of config.json"
    models, _, types = run.out.partition(heading)
    assert tuple(line for line in models.splitlines() if line[:1].strip()) == Model.names()
    assert models.count(" bytes per ") >= len(Model.names())
    assert set(" ".join(types.split()).replace("- ", "-").split(", ")) == set(FAMILIES)


def test_models_says_what_one_caches(cli: Cli) -> None:
    """A model is given as to other commands; JSON has its caches."""
    assert cli("models", "qwen2.5-1.5b").out == (
        "qwen2.5-1.5b\n  caches 28,672 bytes per token: attn [kv 2, head 2, dim 128] bfloat16 in 28 layers\n"
    )
    document = json.loads(cli("models", "layers=3,kv_heads=2,head_dim=64", "--json").out)
    ((cache,),) = document["models"].values()
    assert (cache["bytes"], cache["layers"], document["types"]) == (512, 3, [])
    assert cli("models", "no-such-model").status == 2


@pytest.mark.parametrize(
    "line, expected",
    [
        ("models granite-4.0-h", ["granite-4.0-h-tiny"]),
        ("verify phi", ["phi-4"]),
        ("explain phi-4 --detail w", ["workers"]),
        ("adv", ["advise"]),
    ],
)
def test_a_shell_completes(cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, expected: list[str]) -> None:
    """Commands, shipped models, and the values of options that list them."""
    words = ["kvplan", *line.split()]
    monkeypatch.setenv("_KVPLAN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    run = cli()
    assert (run.status, run.err) == (0, "")
    assert [line.partition(",")[2] for line in run.out.split()] == expected
