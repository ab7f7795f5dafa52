"""The commands about stores: lists, checks, costs and evictions of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplan import Blocks
from kvplan_nixl.serving.store import FileBackend, StoreClient
from tests.conftest import Cli
from tests.store.engines import PAGE, PROMPT, QWEN, EngineWithStore

BLOCKS = {"attn": Blocks([3, 9, 5, 1, 7, 30])}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder with six pages of four files each."""
    EngineWithStore.of(QWEN, FileBackend(tmp_path / "kv"), seed=5, tp=2).save(PROMPT, BLOCKS, 96)
    return tmp_path / "kv"


def files(store: Path) -> list[Path]:
    """All files of a store, in order of their names."""
    return sorted(path for path in store.rglob("*") if path.is_file())


def test_ls_lists_models_and_parts(cli: Cli, store: Path) -> None:
    """A model, its pages and bytes, and each shard with what it holds."""
    run = cli("store", "ls", str(store))
    assert run.status == 0
    assert "6 pages of 16 tokens, 144 KiB, prefixes of up to 96 tokens" in run.out
    assert [line for line in run.out.splitlines() if "layers.0-3.attn bfloat16, head 2 of 4" in line]
    (space,) = json.loads(cli("store", "ls", str(store), "--json").out)["spaces"]
    assert (space["model"], space["pages"], len(space["shards"])) == ("a small model, weights 1", 6, 4)


def test_a_damaged_file_is_found_and_deleted(cli: Cli, store: Path) -> None:
    """Verify reads everything; ls sees headers alone."""
    data, header, *_ = files(store)
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    header.write_bytes(b"no page")
    run = cli("store", "verify", str(store))
    assert (run.status, run.out.splitlines()[0]) == (1, f"{store}: 22 files of 24 whole, 2 damaged, 138 KiB")
    assert run.out.count("PAGE: cannot read page") == 2
    assert cli("store", "ls", str(store)).status == 1
    assert json.loads(cli("store", "verify", str(store), "--delete", "--json").out)["files"] == 24
    assert cli("store", "verify", str(store)).out.startswith(f"{store}: 22 files of 22 whole, 0 damaged")


def test_gc_keeps_limits_and_pins(cli: Cli, store: Path) -> None:
    """Pages beyond a limit go, and a pinned page stays."""
    (worker, *_) = QWEN.engine("e", tp=2, num_blocks=9)
    client = StoreClient(FileBackend(store), worker, tokens_per_page=PAGE)
    client.pin(client.chain(PROMPT), 16)
    assert ", 1 pinned" in cli("store", "ls", str(store)).out
    run = cli("store", "gc", str(store), "--max-gib", "0")
    assert run.out == f"{store}: deleted 5 pages of 120 KiB, and 0 unfinished files; 24 KiB left\n"
    assert json.loads(cli("store", "gc", str(store), "--max-days", "0", "--json").out)["num_pages"] == 0


def test_a_folder_that_is_none_is_refused(cli: Cli, tmp_path: Path) -> None:
    """No command makes a store where there is none."""
    for command in ("ls", "verify", "gc"):
        run = cli("store", command, str(tmp_path / "none"))
        assert (run.status, run.err.split(":")[0]) == (2, "NAME")
    assert not (tmp_path / "none").exists()
