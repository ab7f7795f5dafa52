"""``kvplan check-offer``: what an offer describes, what is wrong with it, and how two offers differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan import decode, encode, explain, problems
from kvplan.handshake import fingerprint
from kvplan.handshake.messages import MAX_BYTES
from tests.cli.conftest import BROKEN, DECODE
from tests.conftest import Cli


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("files", [("decode.json", "broken.json"), ("broken.json", "decode.json")])
def test_a_bad_offer_of_two(cli: Cli, files: tuple[str, str]) -> None:
    """If one of two offers is refused, both are described and nothing is compared."""
    run = cli("check-offer", *files)
    assert run.status == 2
    assert "broken.json: refused\n" in run.out
    assert explain(DECODE) in run.out
    assert json.loads(cli("check-offer", *files, "--json").out)["comparison"] is None


@pytest.mark.usefixtures("folder")
def test_an_offer_as_json(cli: Cli) -> None:
    """With --json an offer is its worker, fingerprint and groups, and the number of its parts."""
    run = cli("check-offer", "decode.json", "--json")
    (offer,) = json.loads(run.out)["offers"]
    assert run.status == 0
    assert offer == {
        "file": "decode.json",
        "ok": True,
        "problems": [],
        "engine_id": "decode",
        "rank": 1,
        "fingerprint": fingerprint(DECODE),
        "groups": [
            {
                "name": "attn",
                "tokens_per_block": 8,
                "context": {"rank": 0, "size": 1, "interleave_tokens": 1},
                "tokens_per_slot": 1,
            }
        ],
        "regions": 2,
        "tensors": 2,
        "views": 2,
    }


@pytest.mark.usefixtures("folder")
def test_problems_as_json(cli: Cli) -> None:
    """With --json each problem has a path, a code and a text."""
    run = cli("check-offer", "broken.json", "--json")
    document = json.loads(run.out)
    found = [{"path": each.path, "code": each.code, "text": each.text} for each in problems(BROKEN)]
    assert (run.status, run.err) == (2, "")
    assert document == {"offers": [{"file": "broken.json", "ok": False, "problems": found}], "comparison": None}


@pytest.mark.usefixtures("folder")
def test_a_comparison_as_json(cli: Cli) -> None:
    """With --json every difference is an object, and one field says whether any is refused."""
    document = json.loads(cli("check-offer", "decode.json", "other.json", "--json").out)
    comparison = document["comparison"]
    assert [offer["ok"] for offer in document["offers"]] == [True, True]
    assert (comparison["ok"], comparison["local"], comparison["remote"]) == (False, "decode/1", "other/0")
    assert comparison["differences"][0] == {
        "field": "size of head",
        "where": "layers.0-1",
        "local": "4",
        "remote": "2",
        "effect": "refused",
        "code": "SIZE",
    }


def test_a_long_file_is_refused_unread(cli: Cli, folder: Path) -> None:
    """A file that is too long, or endless, is refused without reading it to the end."""
    line = f"message: MESSAGE: cannot read a message: expected at most {MAX_BYTES} bytes, got more"
    with (folder / "huge.json").open("wb") as file:
        file.truncate(1 << 40)
    for path in ("huge.json", "/dev/zero"):
        run = cli("check-offer", path)
        assert (run.status, run.out) == (2, f"{path}: refused\n  {line}\n")


def test_a_file_of_the_most_bytes_is_read(cli: Cli, folder: Path) -> None:
    """A message of exactly MAX_BYTES is not too long."""
    (folder / "padded.json").write_bytes(encode(DECODE).ljust(MAX_BYTES))
    assert cli("check-offer", "padded.json").status == 0


@pytest.mark.parametrize("data, status", [(encode(DECODE), 0), (encode(DECODE)[:-1], 2), (b"", 2), (b"\xff" * 99, 2)])
def test_an_offer_comes_from_stdin(data: bytes, status: int) -> None:
    """Any bytes from stdin are an offer or a refusal."""
    command = [sys.executable, "-m", "kvplan", "check-offer", "-", "--json"]
    run = subprocess.run(command, input=data, capture_output=True, check=False)
    (offer,) = json.loads(run.stdout)["offers"]
    assert (run.returncode, run.stderr) == (status, b"")
    assert (offer["file"], offer["ok"]) == ("-", status == 0)


def test_a_closed_stdin_is_refused() -> None:
    """If stdin is closed, the refusal says so."""
    command = f"{sys.executable} -m kvplan check-offer - <&-"
    run = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("NAME: cannot read an offer\n  got '-': ")


def test_any_name_of_a_file_is_printed(cli: Cli, folder: Path) -> None:
    """The problems of a file are printed even if its name is not valid UTF-8."""
    name = os.fsdecode(b"bad\xff.json")
    (folder / name).write_bytes(b"{}")
    run = cli("check-offer", name)
    assert run.status == 2
    assert run.out.startswith("bad\N{REPLACEMENT CHARACTER}.json: refused\n")


def test_an_offer_of_explain_is_an_offer(cli: Cli, folder: Path) -> None:
    """The offers in the JSON of explain are valid offers of its workers."""
    run = cli("explain", "qwen3-0.6b", "--src", "tp=2", "--json")
    (folder / "made.json").write_text(json.dumps(json.loads(run.out)["offers"]["src"][1]))
    assert cli("check-offer", "made.json").out.startswith("src/1: 28 views of 28 tensors in 28 regions, 1 group\n")
    assert decode((folder / "made.json").read_bytes()).key == ("src", 1)
