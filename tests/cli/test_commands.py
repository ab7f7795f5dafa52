"""The commands as a user runs them: what they print, as text and as JSON, their exit statuses, refusals and help."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import click
import pytest

from kvplan import Model, decode, encode, plan_mesh
from kvplan._text import WIDTH
from kvplan.cli import advise, demo, main, trials
from kvplan.cli.app import kvplan
from kvplan.cli.console import print_lines
from kvplan.models.layouts import KV_FORMS, LETTERS, ORDERS
from kvplan.models.options import EngineOptions
from kvplan.verification import Report
from tests.conftest import Cli
from tests.pages import ROOT
from tests.small import engine

VERIFY = ("verify", "qwen3-0.6b", "--tokens", "40")
TWO_ENGINES = (*VERIFY, "--src", "tp=2,layout=LBNHC", "--dst", "tp=4,block=8")
EXPLAIN = ("explain", "qwen3-0.6b", "--src", "tp=2,blocks=9", "--dst", "tp=4,blocks=10")
SHOW = ("show", "qwen3-0.6b", "--src", "tp=2,layout=LBNHC", "--dst", "tp=4,block=8")
QUICK = {
    "advise": ("advise", "qwen3-0.6b"),
    "check-offer": ("check-offer", "offer.json"),
    "demo": ("demo",),
    "explain": EXPLAIN,
    "models": ("models",),
    "show": SHOW,
    "verify": TWO_ENGINES,
}
FAILED = Report(1, 1, 1, checked=("VALUE",), failures=(("VALUE", "head 3 is head 1"),))


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo has one line, advise tries one block size, and the working directory has an offer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "EXAMPLES", demo.EXAMPLES[3:4])
    monkeypatch.setattr(advise, "BLOCK_SIZES", (32,))
    monkeypatch.setattr(advise, "ORDERS", ("LBHNC",))
    Path("offer.json").write_bytes(encode(engine()[0]))


def fail_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "verify", lambda *args, **kwargs: FAILED)


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m kvplan`` in a process of its own."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    run = [sys.executable, "-m", "kvplan", *arguments]
    return subprocess.run(run, env=inherited | environment, capture_output=True, text=True, check=False)


# Refusals


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[1, 2]", b"null", b"3", b'"llama"', b"{}", b'{"model_type": 3}', b'{"model_type": "llama"}'),
        *(b"[" * 100_000, b"\xff\xfe\x00\xd8"),
    ],
)
def test_a_bad_config_is_refused(cli: Cli, tmp_path: Path, data: bytes) -> None:
    """A file that is no usable config.json is refused in three lines, whatever its bytes are."""
    path = tmp_path / "config.json"
    path.write_bytes(data)
    run = cli("verify", str(path))
    assert run.status == 2
    assert run.err.startswith(("CONFIG: cannot ", "TYPE: cannot "))
    assert run.err.count("\n") == 3


# Exit statuses


def test_bytes_that_differ_are_status_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """If verification fails, the report says where, in text and in JSON, and the exit status is 1."""
    fail_verification(monkeypatch)
    run = cli(*TWO_ENGINES)
    assert run.status == 1
    assert "head 3 is head 1" in run.out
    with_json = cli(*TWO_ENGINES, "--json")
    document = json.loads(with_json.out)
    assert (with_json.status, document["verified"], document["promises"]) == (1, False, {"VALUE": False})
    assert document["failures"] == [{"code": "VALUE", "text": "head 3 is head 1"}]


@pytest.mark.parametrize(
    "raised, status, err",
    [
        (MemoryError, 2, "MEMORY: cannot carry out the transfer\n  got none left\n  expected enough free memory\n"),
        (KeyboardInterrupt, 130, ""),
        (SystemExit(1), 141, ""),
    ],
)
def test_what_ends_a_command(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int, err: str
) -> None:
    """Exhausted memory is a refusal, Ctrl-C is 130, and the exit of a library that lost its pipe is 141."""

    def ended(*args: object, **kwargs: object) -> None:
        raise raised

    monkeypatch.setattr(trials, "verify", ended)
    run = cli(*TWO_ENGINES)
    assert (run.status, run.out, run.err.lstrip()) == (status, "", err)


@pytest.mark.parametrize("arguments", [(*EXPLAIN, "--detail", "rows"), ("show", "qwen3-0.6b"), ("advise", "--help")])
def test_a_closed_pipe_is_no_error(arguments: tuple[str, ...]) -> None:
    """If nobody reads stdout, a command ends with 141 and writes nothing to stderr."""
    command = [sys.executable, "-m", "kvplan", *arguments]
    # closed before the command begins: what it writes would fit into the pipe
    reading, writing = os.pipe()
    os.close(reading)
    try:
        run = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (run.returncode, run.stderr) == (141, b"")


def test_the_module_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m kvplan`` is the command line, with its exit status."""
    for arguments, status in ((TWO_ENGINES, 0), (("verify", "llama-9"), 2)):
        monkeypatch.setattr(sys, "argv", ["kvplan", *arguments])
        monkeypatch.delitem(sys.modules, "kvplan.__main__", raising=False)  # tests of all modules import it
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("kvplan", run_name="__main__")
        assert ended.value.code == status


def test_the_missing_extra_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the cli extra, one line says how to install it."""
    monkeypatch.setitem(sys.modules, "click", None)
    run = cli("demo")
    assert (run.status, run.out) == (2, "")
    assert run.err == "kvplan: the command line needs click: pip install click\n"


# Help


def test_the_help_lists_commands_and_statuses(cli: Cli) -> None:
    """Without a command the help is printed: all commands, and all exit statuses."""
    run = cli()
    assert (run.status, run.err) == (0, "")
    assert run.out.startswith("Usage: kvplan ")
    assert run.out == cli("--help").out
    assert {*QUICK, "doctor", "store"} == {*kvplan.commands} <= {*run.out.split()}
    assert "..." not in run.out.partition("Commands:")[2]
    statuses = run.out.partition("Exit status:\n")[2].partition("'kvplan models'")[0]
    assert [int(line.split()[0]) for line in statuses.splitlines() if line.strip()] == [0, 1, 2, 130, 141]


@pytest.mark.parametrize("name", kvplan.commands)
def test_every_help_has_an_example(name: str) -> None:
    """Each command's help shows a line to type, which the command can read."""
    help_text = kvplan.commands[name].get_help(click.Context(kvplan.commands[name], info_name=name))
    examples = [shlex.split(line)[2:] for line in help_text.splitlines() if line.strip().startswith(f"kvplan {name}")]
    assert examples
    for arguments in examples:
        kvplan.commands[name].make_context(name, arguments)


@pytest.mark.parametrize("name", ["verify", "explain", "show", "advise"])
def test_the_help_explains_every_key_of_an_engine(cli: Cli, name: str) -> None:
    """Keys, memory orders and their letters, and places of K and V are in the help; the defaults shown are true."""
    text = " ".join(cli(name, "--help").out.partition("Keys of --src and --dst:")[2].split())
    words = {*re.findall(r"\w+", text)}
    fields = {field.name: field.default for field in attrs.fields(EngineOptions)}
    assert {*fields} | {*ORDERS} | {*KV_FORMS} <= words
    assert LETTERS in text
    shown = re.findall(r"\(default: (\w+)\)", text)
    given = [(name, value) for name, value in fields.items() if value is not None]
    assert shown == [str(int(value) if isinstance(value, bool) else value) for _, value in given]
    assert EngineOptions.parse(
        ",".join(f"{key}={value}" for (key, _), value in zip(given, shown, strict=True)), ""
    ) == (EngineOptions())


# verify


def test_verify_as_json(cli: Cli) -> None:
    """The document has the request, both engines' options, and sums that are those of its pairs."""
    document = json.loads(cli(*TWO_ENGINES, "--json").out)
    assert (document["model"], document["tokens"]) == ("qwen3-0.6b", [0, 40])
    assert (document["src"]["layout"], document["dst"]["block"]) == ("LBNHC", 8)
    assert document["workers"] == {"src": 2, "dst": 4}
    assert len(document["pairs"]) == 8
    assert document["bytes"] == 28 * 40 * 8 * 2 * 128 * 2
    for what in ("bytes", "descriptors"):
        assert document[what] == sum(pair[what] for pair in document["pairs"])
    assert document["pairs"][0] == {
        "dst": "dst/0",
        "src": "src/0",
        "rows": {"local": 28, "remote": 28},
        "ids": 2240,
        "descriptors": 2240,
        "bytes": 2240 * 512,
        "lengths": {"512": 2240},
    }
    assert document["tail_slots"] == 0
    assert (document["verified"], document["failures"], document["not_transferred"]) == (True, [], [])
    assert set(document["promises"].values()) == {True}
    assert {"VALUE", "COVER", "DISJOINT", "BOUNDS", "OWN"} <= set(document["promises"])


# demo


def test_demo_verifies_every_example(cli: Cli) -> None:
    """The demo says what verified means, has a line for each example, and exits with 0."""
    run = cli("demo")
    assert (run.status, run.err) == (0, "")
    assert "was written" in run.out
    assert run.out.endswith("\n")
    assert len(re.findall(r"yes *$", run.out, re.MULTILINE)) == len(demo.EXAMPLES)
    words = run.out[run.out.index("model ") :].split("\n", 1)[0].split("  ")
    assert [word.strip() for word in words if word] == [
        *("model", "prefill (source)", "decode (destination)"),
        *("descriptors", "of bytes", "moved", "verified"),
    ]


@pytest.mark.usefixtures("quick")
def test_demo_as_json(cli: Cli) -> None:
    """--json writes one document with every example, as verify describes it."""
    document = json.loads(cli("demo", "--json").out)
    (case,) = document["cases"]
    assert document["tokens"] == [0, 100]
    assert (case["model"], case["src"]["layout"], case["dst"]["tp"]) == ("qwen3-0.6b", "LBNHC", 2)
    assert (case["verified"], case["bytes"]) == (True, 28 * 100 * 8 * 2 * 128 * 2)


@pytest.mark.usefixtures("quick")
def test_demo_fails_if_bytes_differ(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo in which verification fails shows it and exits with 1."""
    fail_verification(monkeypatch)
    run = cli("demo")
    assert run.status == 1
    assert "NO: VALUE" in run.out
    assert cli("demo", "--json").status == 1


# explain


@pytest.mark.parametrize("columns", [80, 120])
def test_explain_fits_the_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Lines are folded to the width of the terminal, which the longest ones use."""
    monkeypatch.setenv("COLUMNS", str(columns))
    run = cli("explain", "gemma-3-27b", "--src", "tp=2", "--dst", "tp=4,block=64")
    assert columns - 10 < max(map(len, run.out.splitlines())) <= columns


def engines_of_explain():  # type: ignore[no-untyped-def]
    """The engines that EXPLAIN is about, and their mesh."""
    model = Model.shipped("qwen3-0.6b")
    sources, destinations = model.engine("src", tp=2, num_blocks=9), model.engine("dst", tp=4, num_blocks=10)
    return sources, destinations, plan_mesh(destinations, sources)


@pytest.mark.parametrize("detail", ["line", "workers"])
def test_explain_fits_a_terminal(cli: Cli, detail: str) -> None:
    """However long the options of an engine are, no line of the short details is longer than 120 characters."""
    stages = "+".join(["1"] * 40)
    run = cli("explain", "granite-4.0-h-tiny", "--src", f"tp=3,stages={stages}", "--detail", detail)
    assert run.status == 0
    assert max(map(len, run.out.splitlines())) <= WIDTH == 120


def test_explain_as_json(cli: Cli) -> None:
    """The document has each worker as its offer, and each row of each pair."""
    sources, destinations, mesh = engines_of_explain()
    document = json.loads(cli(*EXPLAIN, "--json").out)
    offers = {key: [decode(json.dumps(offer).encode()) for offer in found] for key, found in document["offers"].items()}
    assert (document["model"], document["src"], document["dst"]) == ("qwen3-0.6b", "tp=2,blocks=9", "tp=4,blocks=10")
    assert offers == {"src": list(sources), "dst": list(destinations)}
    assert [(plan["worker"], plan["operation"], plan["not_transferred"]) for plan in document["plans"]] == [
        (worker.label, "READ", []) for worker in destinations
    ]
    pairs = [pair for plan in document["plans"] for pair in plan["pairs"]]
    expected = [pair for plan in mesh.plans for pair in plan.pairs]
    assert [pair["remote"] for pair in pairs] == [f"{pair.remote[0]}/{pair.remote[1]}" for pair in expected]
    keys = ("address", "length", "device", "stride", "count")
    for found, pair in zip(pairs, expected, strict=True):
        for side, table in (("local", pair.local_table), ("remote", pair.remote_table)):
            assert [[row[key] for key in keys] for row in found["rows"][side]] == table.rows.tolist()
            assert [row["first_id"] for row in found["rows"][side]] == table.first.tolist()
    assert pairs[0]["rows"]["local"][1]["region"] == destinations[0].regions[1].name


# show


@pytest.mark.parametrize("columns", ["60", "100"])
def test_show_fits_the_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """Drawings are as wide as the terminal is, and no wider."""
    monkeypatch.setenv("COLUMNS", columns)
    rows = [line for line in cli(*SHOW).out.splitlines() if "│" in line]
    assert int(columns) - 20 < max(map(len, rows)) <= int(columns)


# JSON, colour and progress


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", [name for name in QUICK if name != "show"])
def test_every_command_prints_one_json_document(cli: Cli, name: str) -> None:
    """With --json each command but show writes one JSON object to stdout, and nothing to stderr."""
    run = cli(*QUICK[name], "--json")
    assert (run.status, run.err) == (0, "")
    assert isinstance(json.loads(run.out), dict)


class Terminal(io.StringIO):
    """Text that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stdout, out", [(io.StringIO, "head [0, 4)"), (Terminal, "\x1b[1mhead [0, 4)\x1b[0m")])
def test_headings_are_bold_on_a_terminal(stdout: type[io.StringIO], out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines without indent are bold there; in a pipe all lines are plain."""
    monkeypatch.setattr(sys, "stdout", terminal := stdout())
    print_lines(["head [0, 4)", "  row", ""])
    assert terminal.getvalue() == f"{out}\n  row\n\n"


@pytest.mark.parametrize(
    "stdout, no_color, is_coloured", [(Terminal, "", True), (Terminal, "1", False), (io.StringIO, "", False)]
)
def test_colour_is_for_terminals_without_no_color(
    stdout: type[io.StringIO], no_color: str, is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe gets no escape sequences; a terminal gets colour unless NO_COLOR is set."""
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stdout", terminal := stdout())
    assert main(TWO_ENGINES) == 0
    assert ("\x1b[32mverified" in terminal.getvalue()) is is_coloured
    assert is_coloured or "\x1b" not in terminal.getvalue()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["advise", "demo"])
def test_long_commands_have_a_progress_bar_on_a_terminal(cli: Cli, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If stderr is a terminal, a bar is drawn there; stdout has the document alone."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    run = cli(*QUICK[name], "--json")
    assert run.status == 0
    assert json.loads(run.out)
    assert "100%" in terminal.getvalue()
    assert name in terminal.getvalue()


def test_some_layers_move(cli: Cli) -> None:
    """With --layers, the title says how many of them; fewer than there are kinds, or more than all, are refused."""
    run = cli("verify", "granite-4.0-h-tiny", "--tokens", "40", "--layers", "3")
    assert run.out.startswith("granite-4.0-h-tiny, tp=1 -> tp=1, positions [0, 40), 3 of 40 layers\n")
    document = json.loads(cli("verify", "granite-4.0-h-tiny", "--tokens", "4", "--layers", "2", "--json").out)
    assert document["layers"] == {"moved": 2, "of": 40}
    for layers in ("1", "41", "x"):
        assert cli("verify", "granite-4.0-h-tiny", "--layers", layers).status == 2


def test_an_interrupt_of_the_imports_is_a_status(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half second of a command imports, and a ^C there prints no traceback."""

    class Interrupted:
        """A finder of modules that is interrupted at the command line's."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "kvplan.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvplan.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    run = cli("demo")
    assert (run.status, run.out, run.err) == (130, "", "")


def test_an_interrupt_of_the_first_import_is_a_status(tmp_path: Path) -> None:
    """What is installed as ``kvplan`` imports kvplan, and with it numpy, where a ^C prints no traceback either."""
    # a process in the background of a shell ignores the signal
    interrupt = "signal.signal(signal.SIGINT, signal.default_int_handler)\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "numpy.py").write_text(f"import os, signal\n{interrupt}")
    program = "import sys, kvplan_command; sys.exit(kvplan_command.main())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"kvplan": "kvplan_command:main"}
