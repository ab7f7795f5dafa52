"""The doctor's probes, with NIXL."""

from __future__ import annotations

import json
import socket

import pytest

from kvplan_nixl import doctor
from kvplan_nixl.doctor import State
from kvplan_nixl.probe import listen

HOST = "127.0.0.1"
KEY = "a secret of all engines"


def test_what_nixl_does_here_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX starts and lists its transports, the address answers, and bytes move between two processes."""
    monkeypatch.setenv("KVPLAN_KEY", KEY)
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    lines = {finding.subject: finding for finding in doctor.findings(HOST, port)}
    assert [line for line in lines.values() if line.state is State.WRONG] == []
    assert {"NIXL backends", "TCP", "CMA", "RDMA"} <= lines.keys()
    assert "UCX start" in lines["NIXL backends"].text
    assert "lo" in lines["TCP"].text.split()
    assert "every byte right" in lines["transfer"].text
    assert " by cma/memory, " in lines["transfer"].text


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe tells what an engine would say."""
    monkeypatch.delenv("KVPLAN_KEY", raising=False)
    with socket.create_server((HOST, 0)) as server:
        listen(HOST, str(server.getsockname()[1]))
    told = json.loads(capsys.readouterr().out)
    assert "Address already in use" in told["error"]
    assert (told["hint"], told["has_key"]) == ("", False)
