"""The command line: exit status, one line for a refusal, and no traceback whatever the input."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan import KVPlanError, Model
from kvplan.cli import demo, trials
from kvplan.cli.sides import load
from kvplan.verification.report import Report
from tests.conftest import Cli

SMALL = ("verify", "qwen3-0.6b", "--tokens", "40")
QUICK = (*SMALL, "--src", "tp=2,layout=LBNHC", "--dst", "tp=4,block=8")

REFUSALS = {
    "no command": (("frob",), "NAME: cannot read the command line"),
    "no model": (("verify",), "NAME: cannot read the command line"),
    "unknown option": ((*SMALL, "--frob"), "NAME: cannot read the command line"),
    "unknown model": (("verify", "llama-9"), "CONFIG: cannot load a model"),
    "directory": (("verify", "/"), "CONFIG: cannot load a model"),
    "null byte": (("verify", "a\0b"), "CONFIG: cannot load a model"),
    "line break": (("verify", "a\nb"), "CONFIG: cannot load a model"),
    "unknown key": ((*SMALL, "--src", "tq=4"), "LAYOUT: cannot read --src"),
    "key twice": ((*SMALL, "--dst", "tp=1,tp=2"), "NAME: cannot read --dst"),
    "word for a number": ((*SMALL, "--src", "tp=two"), "TYPE: cannot read tp of --src"),
    "no number": ((*SMALL, "--src", "tp"), "TYPE: cannot read tp of --src"),
    "negative": ((*SMALL, "--src", "block=-16"), "TYPE: cannot read block of --src"),
    "zero": ((*SMALL, "--dst", "block=0"), "RANGE: cannot read block of --dst"),
    "huge": ((*SMALL, "--src", "tp=99999999999999999999999"), "TYPE: cannot read tp of --src"),
    "too many workers": ((*SMALL, "--src", "tp=64,pp=64,pcp=2"), "RANGE: cannot read tp * pp * pcp of --src"),
    "unknown draft": ((*SMALL, "--dst", "draft=llama"), "NAME: cannot load a shipped model"),
    "unknown bits": ((*SMALL, "--bits", "3"), "NAME: cannot read the command line"),
    "unknown scales": ((*SMALL, "--dst", "scales=out"), "LAYOUT: cannot read scales"),
    "missing layers": ((*SMALL, "--dst", "stages=1+2"), "LAYOUT: cannot divide layers into stages"),
    "unknown layout": ((*SMALL, "--src", "layout=HND"), "LAYOUT: cannot read layout"),
    "unknown kv": ((*SMALL, "--src", "kv=both"), "LAYOUT: cannot read kv"),
    "impossible context": ((*SMALL, "--dst", "tp=4,dcp=3"), "LAYOUT: cannot spread positions"),
    "too few blocks": ((*SMALL, "--dst", "blocks=2"), "BLOCKS: cannot place a request of 40 tokens on --dst"),
    "bad tokens": ((*SMALL, "--tokens", "many"), "TYPE: cannot read --tokens"),
    "too much memory": (("verify", "llama-3.1-70b", "--tokens", "9999999"), "MEMORY: cannot carry out the transfer"),
    "no tokens": (("advise", "qwen3-0.6b", "--tokens", "0"), "RANGE: cannot read --tokens"),
    "advice on the impossible": (("advise", "qwen3-0.6b", "--dst", "layout=HND"), "LAYOUT: cannot read layout"),
    "reversed tokens": ((*SMALL, "--tokens", "30:20"), "RANGE: cannot read --tokens"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_line_and_status_2(cli: Cli, name: str) -> None:
    """Bad input writes exactly one line to stderr, in the grammar of every error, nothing to stdout, and exits 2."""
    arguments, start = REFUSALS[name]
    run = cli(*arguments)
    assert (run.status, run.out) == (2, "")
    assert run.err.startswith(start)
    assert run.err.count("\n") == 1
    assert re.fullmatch(r"[A-Z]+: cannot .+: expected .+, got .+\n", run.err)


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("verify", "--srcc", "x"), "'kvplan verify --help' shows, got option '--srcc' (did you mean '--src'?)"),
        (("verifyy",), "'kvplan --help' shows, got command 'verifyy' (did you mean 'verify'?)"),
        (("verify",), "'kvplan verify --help' shows, got no argument 'MODEL'"),
        (("verify", "a", "b"), "'kvplan verify --help' shows, got unexpected extra argument (b)"),
        (
            (*SMALL, "--bits", "3"),
            "'kvplan verify --help' shows, got invalid value for '--bits': '3' is not one of '8'",
        ),
    ],
)
def test_a_word_that_is_none_is_told_with_those_like_it(cli: Cli, arguments: tuple[str, ...], told: str) -> None:
    """What is wrong with the words of a command is told as a value, and what may have been meant as a hint."""
    assert cli(*arguments).err.startswith(f"NAME: cannot read the command line: expected what {told}")


def test_the_help_names_every_shipped_model(cli: Cli) -> None:
    """The help lists the models that have a name, in their order, and no others."""
    listed = " ".join(cli("--help").out.partition("Shipped models: ")[2].split())
    assert tuple(listed.removesuffix(".").replace("- ", "-").split(", ")) == Model.names()


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_as_json_is_one_document(cli: Cli, name: str) -> None:
    """With --json a refusal also writes one JSON object: code, message and details."""
    arguments, start = REFUSALS[name]
    run = cli(*arguments, "--json")
    document = json.loads(run.out)
    assert run.status == 2
    assert set(document) == {"code", "message", "details"}
    assert f"{document['code']}: {document['message']}\n" == run.err
    assert f"{document['code']}: {document['message']}".startswith(start)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2]", "null", "3", '"llama"', "{}", '{"model_type": 3}', '{"model_type": "llama"}', "[" * 100_000],
)
def test_a_bad_config_is_refused(cli: Cli, tmp_path: Path, text: str) -> None:
    """A file that is no usable config.json is refused with one line, whatever it holds."""
    path = tmp_path / "config.json"
    path.write_text(text)
    run = cli("verify", str(path))
    assert run.status == 2
    assert run.err.startswith(("CONFIG: cannot ", "TYPE: cannot "))
    assert run.err.count("\n") == 1


def test_a_config_of_other_bytes_is_refused(tmp_path: Path) -> None:
    """A file that is not text is refused as a configuration, not with a decoding error."""
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(KVPlanError, match="CONFIG: cannot load a model"):
        load(str(path))


def test_a_path_is_a_model(cli: Cli, tmp_path: Path) -> None:
    """MODEL can be the path of a config.json."""
    path = tmp_path / "config.json"
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    path.write_text(json.dumps(config | {"num_key_value_heads": 2}))
    run = cli("verify", str(path), "--dst", "tp=2", "--tokens", "40", "--json")
    assert run.status == 0, run.err
    assert json.loads(run.out)["bytes"] == 2 * 40 * 2 * 2 * 16 * 2


def test_verify_says_what_it_found(cli: Cli) -> None:
    """A verified pair exits 0, with a line for each destination worker and the report last."""
    run = cli(*QUICK)
    assert (run.status, run.err) == (0, "")
    title, *workers, report = run.out.splitlines()
    assert title == "qwen3-0.6b, tp=2,layout=LBNHC -> tp=4,block=8, positions [0, 40)"
    assert [line.split()[0] for line in workers] == ["dst/0", "dst/1", "dst/2", "dst/3"]
    assert report.startswith("verified: ")


def test_verify_says_what_it_leaves_out(cli: Cli) -> None:
    """Draft layers that only the destination has are named as not transferred."""
    run = cli(*SMALL, "--dst", "draft=llama-3.2-1b")
    assert (run.status, run.err) == (0, "")
    assert run.out.splitlines()[-2] == "  not transferred: draft.0-15.attn, which no source has"


def test_a_quantized_cache_moves_with_its_scales(cli: Cli) -> None:
    """With --bits 4 a head of a token is half a byte for each value and a byte for each 16 of them."""
    run = cli(*SMALL, "--bits", "4", "--src", "scales=page", "--dst", "tp=2,scales=region", "--json")
    assert run.status == 0, run.err
    assert json.loads(run.out)["bytes"] == 28 * 40 * 8 * 2 * (64 + 8)


def test_verify_as_json(cli: Cli) -> None:
    """--json writes one document whose sums are those of its pairs and of the request."""
    document = json.loads(cli(*QUICK, "--json").out)
    assert document["model"] == "qwen3-0.6b"
    assert document["tokens"] == [0, 40]
    assert document["src"]["layout"] == "LBNHC"
    assert document["dst"]["block"] == 8
    assert document["workers"] == {"src": 2, "dst": 4}
    assert len(document["pairs"]) == 8
    assert document["bytes"] == 28 * 40 * 8 * 2 * 128 * 2
    for what in ("bytes", "descriptors"):
        assert document[what] == sum(pair[what] for pair in document["pairs"])
    assert document["verified"] is True
    assert document["failures"] == []
    assert set(document["promises"].values()) == {True}
    assert {"VALUE", "COVER", "DISJOINT", "BOUNDS", "OWN"} <= set(document["promises"])


def test_verify_takes_a_start(cli: Cli) -> None:
    """--tokens START:STOP moves those positions and no others."""
    document = json.loads(cli(*QUICK, "--tokens", "7:9", "--json").out)
    assert document["tokens"] == [7, 9]
    assert document["bytes"] == 28 * 2 * 8 * 2 * 128 * 2


def test_bytes_that_differ_are_status_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where verification fails, the report says where, and the exit status is 1."""
    failed = Report(1, 1, 1, checked=("VALUE",), failures=(("VALUE", "head 3 is head 1"),))
    monkeypatch.setattr(trials, "verify", lambda *args, **kwargs: failed)
    run = cli(*QUICK)
    assert run.status == 1
    assert "head 3 is head 1" in run.out
    document = json.loads(cli(*QUICK, "--json").out)
    assert document["verified"] is False
    assert document["failures"] == [{"code": "VALUE", "text": "head 3 is head 1"}]


def test_advise_tells_what_would_help(cli: Cli) -> None:
    """advise prints what it compares, a line for each change that helps, and what there is now."""
    run = cli("advise", "qwen3-0.6b", "--src", "block=32,layout=BLNHC", "--dst", "layout=BLNHC", "--tokens", "64")
    assert (run.status, run.err) == (0, "")
    title, heading, *changes, now = run.out.splitlines()
    assert title == "qwen3-0.6b, block=32,layout=BLNHC -> layout=BLNHC, 64 tokens in scattered blocks"
    assert heading.split()[0] == "descriptors"
    assert changes[0].endswith("src block=64 and dst block=64")
    assert changes[1].split() == ["2", "56x", "3.5", "MiB", "4", "dst", "block=32"]
    assert now.split() == ["112", "1x", "64", "KiB", "4", "as", "it", "is"]


def test_advise_as_json(cli: Cli) -> None:
    """--json writes one document: what there is now, every change planned, and what was refused."""
    document = json.loads(cli("advise", "qwen3-0.6b", "--src", "layout=LBNHC", "--tokens", "40", "--json").out)
    assert (document["model"], document["tokens"]) == ("qwen3-0.6b", 40)
    assert (document["src"], document["dst"]) == ("layout=LBNHC", "tp=1")
    assert document["bytes"] == 28 * 40 * 8 * 2 * 128 * 2
    assert document["now"]["descriptors"] == 28 * 40 * 8 == document["now"]["lengths"]["512"]
    assert document["options"][0]["descriptors"] < document["now"]["descriptors"]
    assert document["refused"] == []


def test_demo_verifies_every_pair(cli: Cli) -> None:
    """The demo moves every pair, says what verified means, and exits 0."""
    run = cli("demo")
    assert run.status == 0
    assert "Verified means" in run.out
    assert len(re.findall(r"yes *$", run.out, re.MULTILINE)) == len(demo.CASES)
    assert "NO" not in run.out


def test_the_demo_as_json(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """--json writes one document with every case, as verify tells it, and nothing else."""
    monkeypatch.setattr(demo, "CASES", demo.CASES[4:5])
    document = json.loads(cli("demo", "--json").out)
    (case,) = document["cases"]
    assert document["tokens"] == [0, 150]
    assert (case["model"], case["src"]["layout"], case["dst"]["tp"]) == ("qwen3-0.6b", "LBNHC", 2)
    assert (case["verified"], case["bytes"]) == (True, 28 * 150 * 8 * 2 * 128 * 2)


def test_the_demo_fails_where_bytes_differ(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo in which verification fails shows it and exits 1."""
    failed = Report(1, 1, 1, checked=("VALUE",), failures=(("VALUE", "wrong"),))
    monkeypatch.setattr(trials, "verify", lambda *args, **kwargs: failed)
    monkeypatch.setattr(demo, "CASES", demo.CASES[4:5])
    run = cli("demo")
    assert run.status == 1
    assert "NO: VALUE" in run.out
    assert cli("demo", "--json").status == 1


def test_a_terminal_shows_the_demo_line_by_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal the table is drawn anew after each pair, over the one before, and is there once in the end."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(demo, "CASES", demo.CASES[3:5])
    run = cli("demo")
    first, last = (run.out.count(case.model) for case in demo.CASES)
    *_, end = run.out.split("\x1b[2K")  # what erases a line
    assert run.status == 0
    assert first > last > 0
    assert [end.count(case.model) for case in demo.CASES] == [1, 1]


def test_memory_that_runs_out_is_a_refusal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no more memory, one line says so."""

    def none_left(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr(trials, "verify", none_left)
    run = cli(*QUICK)
    assert (run.status, run.out) == (2, "")
    assert run.err == "MEMORY: cannot carry out the transfer: expected memory for it, got none left\n"


def test_an_interrupt_is_status_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a command as it ends others: no report, no traceback, and the shell's status for it."""

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trials, "verify", interrupted)
    run = cli(*QUICK)
    assert (run.status, run.out, run.err.strip()) == (130, "", "")


def test_no_command_shows_help(cli: Cli) -> None:
    """Without a command, the help is shown."""
    run = cli()
    assert run.status == 0
    assert run.out.startswith("Usage: kvplan ")


@pytest.mark.parametrize("package", ["click", "rich"])
def test_the_missing_extra_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Where the cli extra is not installed, one line says how to install it."""
    monkeypatch.setitem(sys.modules, package, None)
    run = cli("demo")
    assert (run.status, run.out) == (2, "")
    assert run.err == f"kvplan: the command line needs {package}: pip install 'kvplan[cli]'\n"


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m kvplan`` in a process of its own."""
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    run = [sys.executable, "-m", "kvplan", *arguments]
    return subprocess.run(run, env=kept | environment, capture_output=True, text=True, check=False)


def test_the_module_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m kvplan`` is the command line, exit status included."""
    for arguments, status in ((QUICK, 0), (("verify", "llama-9"), 2)):
        monkeypatch.setattr(sys, "argv", ["kvplan", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("kvplan", run_name="__main__")
        assert ended.value.code == status


def test_a_pipe_gets_no_colour() -> None:
    """What is written to a pipe has no escape sequences."""
    assert "\x1b" not in command(*QUICK).stdout


def test_no_color_is_respected() -> None:
    """A terminal gets colour unless NO_COLOR is set."""
    colour = re.compile(r"\x1b\[[\d;]*3[1-7]")
    assert colour.search(command(*QUICK, FORCE_COLOR="1", TERM="xterm").stdout)
    assert not colour.search(command(*QUICK, FORCE_COLOR="1", TERM="xterm", NO_COLOR="1").stdout)
