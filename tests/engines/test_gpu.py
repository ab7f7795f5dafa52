"""What the script for GPUs gives vLLM, as far as a CPU can tell."""

from __future__ import annotations

import json
import math
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from vllm import EngineArgs
from vllm.config import CUDAGraphMode

from tests.engines import gpu
from tests.engines.gpu import LLAMA_8B, all_right, judged, speed_settings, steps_settings


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's time began when it was imported, long before some test."""
    monkeypatch.setattr(gpu, "LIMIT_S", [math.inf])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_vllm_takes_the_settings(folder: Path) -> None:
    """Those of a GPU, which its stand-in on a CPU does not use."""
    speed = EngineArgs(**speed_settings(folder, 16, 32768, stand_in=False))
    steps = EngineArgs(**steps_settings(folder, ((64, 1024), (16, 8192)), stand_in=False))
    for settings in (speed, steps):
        model = settings.create_model_config()
        assert model.get_total_num_kv_heads() == LLAMA_8B["num_key_value_heads"]
        assert settings.max_model_len is not None
        assert settings.max_model_len <= LLAMA_8B["max_position_embeddings"]
    assert steps.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert steps.compilation_config.cudagraph_capture_sizes == [16, 64]


def test_prompts_fit_the_caches(folder: Path) -> None:
    """Prompts of *steps* stay cached, and those of *speed* that are in flight all have blocks."""
    token = 2 * LLAMA_8B["num_hidden_layers"] * LLAMA_8B["num_key_value_heads"] * LLAMA_8B["head_dim"] * 2
    sizes = ((64, 1024), (16, 8192))
    steps = steps_settings(folder, sizes, stand_in=False)
    assert steps["kv_cache_memory_bytes"] >= token * sum(number * (length + 72 + 16) for number, length in sizes)
    for block in (16, 64):
        speed = speed_settings(folder, block, 32768, stand_in=False)
        assert speed["kv_cache_memory_bytes"] >= token * block * speed["num_gpu_blocks_override"]
        assert speed["num_gpu_blocks_override"] * block >= 2 * 32 * (1024 + 64)


def test_a_part_that_fails_does_not_stop_others(capsys: pytest.CaptureFixture[str]) -> None:
    """What is left of the time is spent on them, and the end says that not all was right."""
    ran = []

    def run(part: str) -> bool:
        ran.append(part)
        if part == "kernel":
            raise RuntimeError("an illegal memory access")
        return True

    assert not all_right(gpu.PARTS, run)
    assert ran == [*gpu.PARTS]
    assert "an illegal memory access" in capsys.readouterr().out
    assert all_right(gpu.PARTS[1:], run)


def test_nothing_begins_when_time_is_over(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What has begun is waited for only a little longer, so that a hung engine does not take all of a lent machine."""
    assert gpu.left_s(150.0) == 150.0
    monkeypatch.setattr(gpu, "BEGAN", time.monotonic() - 530)
    monkeypatch.setattr(gpu, "LIMIT_S", [540.0])
    assert 0 < gpu.left_s(150.0) <= 10 + gpu.GRACE_S
    assert not gpu.is_over()
    monkeypatch.setattr(gpu, "BEGAN", time.monotonic() - 600)
    assert gpu.left_s(150.0) == 0.0

    def run(part: str) -> bool:
        raise AssertionError(part)

    assert not all_right(["kernel", "rows"], run)
    said = capsys.readouterr().out
    assert "no time was left for: kernel rows" in said
    assert "nothing was judged" in said
    assert "right" not in said


def test_what_did_not_run_is_not_right(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A part whose table has no row is not counted, and one that failed counts, also where others are right."""
    results = {"kernel": True, "speed": None, "rows": False}
    assert all_right(["kernel", "speed"], results.get)
    said = capsys.readouterr().out
    assert "no time was left for: speed" in said
    assert "what ran are right" in said
    assert not all_right(["speed"], results.get)
    assert not all_right([*results], results.get)
    assert "WRONG, or it failed: rows" in capsys.readouterr().out


def test_rows_of_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that fails is wrong and does not stop those after it; rows that had no time are neither."""

    def fails() -> tuple[str, bool]:
        raise RuntimeError("an illegal memory access")

    assert judged({"first": fails, "second": lambda: ("| second | 7 |", True)}) is False
    assert "| first | failed: an illegal memory access |\n| second | 7 |" in capsys.readouterr().out
    assert judged({"second": lambda: ("| second | 7 |", True)}) is True
    monkeypatch.setattr(gpu, "is_over", lambda: True)
    assert judged({"first": fails}) is None
    assert "| first | not begun: time is over |" in capsys.readouterr().out


def test_a_source_that_is_late_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of one row that comes in the time of the next one is not read, and the row after is right again."""
    pools = [(1 << 16, 512), (1 << 16, 1024), (1 << 16, 2048)]
    channel, theirs = multiprocessing.Pipe()
    source = threading.Thread(target=gpu.own_memory, args=(theirs, pools, "cpu"))
    monkeypatch.setattr(gpu, "READ_S", [0.0])
    with pytest.raises(AssertionError, match="the source does not start"):
        gpu.kernel_row(channel, 512, 1 << 14, 1 << 16, "cpu")
    source.start()
    monkeypatch.setattr(gpu, "READ_S", [60.0])
    with pytest.raises(AssertionError, match="the source is behind"):
        gpu.kernel_row(channel, 1024, 1 << 14, 1 << 16, "cpu")
    _, is_right = gpu.kernel_row(channel, 1024, 1 << 14, 1 << 16, "cpu")
    assert is_right
    channel.close()
    source.join()


@pytest.mark.parametrize("part", ["speed", "steps", "ways"])
def test_engines_that_fail_are_not_right(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of times alone too: what was timed has to have moved, and to have started."""

    def failing(*args: Any, **options: Any) -> list[str]:
        raise RuntimeError("decode computed the prompt")

    monkeypatch.setattr(gpu, "speed_of", failing)
    monkeypatch.setattr(gpu, "steps_of", failing)
    assert gpu.part_of(part, (), stand_in=True) is False
