"""Weights are told apart by their files, wherever an engine says that they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvplan_nixl import weights
from kvplan_nixl.serving import fingerprint
from kvplan_nixl.weights import adapter_of, weights_of


def write(folder: Path, value: int, config: str = "config.json") -> None:
    """Writes a model of one tensor of 4 bytes."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + value.to_bytes(4, "little"))
    (folder / config).write_text("{}")


def test_a_folder_goes_by_its_files(tmp_path: Path) -> None:
    """Two folders of the same files are the same model, another value makes another."""
    for name, value in (("a", 1), ("b", 1), ("c", 2)):
        write(tmp_path / name, value)
    first, same, other = (weights_of(str(tmp_path / name)) for name in "abc")
    assert first == same == fingerprint(tmp_path / "a")
    assert first != other


def test_a_model_without_files_goes_by_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is stored here, a revision tells models apart, or nothing does; a hub's cache is looked at."""
    monkeypatch.setattr(weights, "_snapshot", lambda *_: None)
    assert weights_of("someone/model", "main") == "main"
    assert weights_of("someone/model") == "unknown"
    write(tmp_path / "snapshot", 1)
    monkeypatch.setattr(weights, "_snapshot", lambda *_: tmp_path / "snapshot")
    assert weights_of("someone/model", "main") == fingerprint(tmp_path / "snapshot")


def test_an_adapter_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    """An engine may replace an adapter in its place; broken files and hubs go by their path."""
    folder = tmp_path / "adapter"
    write(folder, 1, "adapter_config.json")
    first = adapter_of(str(folder))
    assert first == adapter_of(str(folder)) == fingerprint(folder)
    state = os.stat(folder / "model.safetensors")
    write(folder, 2, "adapter_config.json")
    # as copies keep the times of files
    os.utime(folder / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert adapter_of(str(folder)) not in (first, str(folder))
    (folder / "model.safetensors").write_bytes(b"broken")
    assert adapter_of(str(folder)) == str(folder)
    assert adapter_of("someone/adapter") == "someone/adapter"
