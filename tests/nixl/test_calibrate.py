"""Calibration, on memory that is small enough for a test."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvplan import region_of
from kvplan_nixl import calibrate as module
from kvplan_nixl.__main__ import main
from kvplan_nixl.rearrange import TorchCopier
from kvplan_nixl.settings import read_rates

SMALLEST = module.MANY * module.SMALL


def test_rates_are_measured_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rate is printed and written to a file."""
    monkeypatch.setattr(module, "calibrate", partial(module.calibrate, size=SMALLEST))
    assert main(["calibrate", "--save", str(tmp_path / "rates.json")]) == 0
    rates = read_rates(str(tmp_path / "rates.json"))
    assert re.match(r"UCX of NIXL [\d.]+ between two processes, READ of cpu memory, ", rates.measured)
    printed = capsys.readouterr().out
    assert f"descriptor_s    {rates.descriptor_s:.3g}\n" in printed


def test_a_gpu_is_the_present_device_before_there_is_an_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX leaves out CUDA IPC otherwise. A stand-in for a machine with two GPUs."""
    seen: list[object] = []
    on_gpu = SimpleNamespace(to=lambda device: SimpleNamespace(is_cuda=True, device=device))
    monkeypatch.setattr(torch, "from_numpy", lambda _: on_gpu)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    module.allocated("cuda:1", 8)
    assert seen == ["cuda:1"]


def test_rates_explain_the_times_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of a machine of known rates give these rates."""
    blocks = SMALLEST // module.LAYERS // module.BLOCK
    moves = [(1, module.SMALL), *((SMALLEST // length, SMALLEST) for length in module.LENGTHS)]
    copies = [(module.LAYERS, module.LAYERS * number * module.BLOCK) for number in (1, blocks)]
    took = [0.01 + descriptors * 3e-6 + size * 2e-10 for descriptors, size in moves]
    took += [number * 4e-5 + size * 5e-10 for number, size in copies]
    monkeypatch.setattr(module, "medians", lambda each: took if len(each) == 9 else [])
    rates = module.calibrate(size=SMALLEST)
    found = rates.transfer_s, rates.descriptor_s, rates.byte_s, rates.copy_s, rates.copied_byte_s
    assert found == pytest.approx((0.01, 3e-6, 2e-10, 4e-5, 5e-10))


def test_copies_are_from_token_major_to_head_major_blocks() -> None:
    """The copies that are timed move each head of each token of each layer to its place."""
    shape = (module.LAYERS, 4, module.HEADS, module.TOKENS, module.SMALL)
    staging, cache = torch.randint(256, (np.prod(shape),), dtype=torch.uint8), torch.zeros(shape, dtype=torch.uint8)
    copy = module.block_copy(region_of(cache, "cache"), region_of(staging, "staging"), 4)
    TorchCopier({"cache": cache, "staging": staging}).begin([copy])
    blocks = np.random.default_rng(1).permutation(4)
    heads = staging.view(module.LAYERS, 4, module.TOKENS, module.HEADS, module.SMALL).transpose(2, 3)
    assert torch.equal(cache[:, blocks], heads)
