"""The folder in which commands run: a small model's configuration, and offers of workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplan import encode
from tests.small import engine

TINY = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
DECODE, PREFILL, OTHER = engine("decode", tp=2, tokens=8)[1], engine("prefill")[0], engine("other", heads=2)[0]
BROKEN = encode(PREFILL).replace(b'"size":4', b'"size":"4"').replace(b'"rank":0', b'"rank":-1')
OFFERS = {"decode": encode(DECODE), "prefill": encode(PREFILL), "other": encode(OTHER), "broken": BROKEN}


def write_files(folder: Path) -> None:
    """Write the configuration, also under a name that looks like markup, and the offers."""
    for name in ("tiny", "[bold]"):
        (folder / f"{name}.json").write_text(json.dumps({**TINY, "num_key_value_heads": 2}))
    for name, data in OFFERS.items():
        (folder / f"{name}.json").write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    return tmp_path
