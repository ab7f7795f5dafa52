"""The doctor's probes, with NIXL."""

from __future__ import annotations

import json
import socket
import weakref
from typing import Any

import pytest
import torch

from kvplan import Region
from kvplan_nixl import calibrate, doctor
from kvplan_nixl.doctor import State
from kvplan_nixl.probe import listen, map_memory, move

HOST = "127.0.0.1"
KEY = "a secret of all engines"


def test_what_nixl_does_here_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX starts and lists its transports, the address answers, and bytes move between two processes."""
    monkeypatch.setenv("KVPLAN_KEY", KEY)
    lines = {finding.subject: finding for finding in doctor.findings(HOST, 0)}
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


def test_memory_lives_while_cuda_is_asked_about_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache of torch's, memory that nothing refers to is unknown to CUDA."""
    allocated: list[weakref.ref[torch.Tensor]] = []
    allocate = calibrate.allocated

    def noted(*where: Any) -> torch.Tensor:
        tensor = allocate(*where)
        allocated.append(weakref.ref(tensor))
        return tensor

    class Mapper:
        def why_not(self, region: Region) -> str:
            (tensor,) = (each() for each in allocated)
            return "no memory" if tensor is None or tensor.data_ptr() != region.address else ""

    monkeypatch.setattr("kvplan_nixl.calibrate.allocated", noted)
    monkeypatch.setattr("kvplan_nixl.probe.CudaMapper", Mapper)
    map_memory("cpu")
    told = json.loads(capsys.readouterr().out)
    assert (told["error"], told["reason"]) == ("", "")


def test_bytes_that_have_not_moved_are_not_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory to read into has other bytes than the source before."""
    monkeypatch.setattr("kvplan_nixl.calibrate.move_blocks", lambda *_: 1)
    monkeypatch.setattr("kvplan_nixl.probe.TRANSFER_S", 0.01)
    move()
    told = json.loads(capsys.readouterr().out)
    assert (told["error"], told["is_right"]) == ("", False)
