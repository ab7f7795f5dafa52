"""Benchmarks: pytest collects them only if this folder is named, and prints one line for each comparison.

    python -m pytest benchmarks

No benchmark asserts a time, because times depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Medians = dict[str, tuple[float, int]]
Benchmark = Callable[..., object]

MEDIANS = pytest.StashKey[Medians]()
COMPARED = (
    ("bind", "floor"),
    ("bind", "floor into reused buffers"),
    ("plan LBHNC", "describe LBHNC"),
    ("plan LBNHC", "describe LBNHC"),
)
"""Ratios to print: a figure, and the figure to divide it by."""


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect ``bench_*.py``, which pytest ignores."""
    named = parent.session.isinitpath(file_path)  # pytest collects a named file by itself
    return pytest.Module.from_parent(parent, path=file_path) if file_path.match("bench_*.py") and not named else None


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, Benchmark], None]:
    """Stores a finished benchmark's median under a name, for the summary."""

    def keep(key: str, benchmark: Benchmark) -> None:
        if benchmark.stats is not None:  # type: ignore[attr-defined]  # None under --benchmark-disable
            stats = benchmark.stats.stats  # type: ignore[attr-defined]
            request.config.stash.setdefault(MEDIANS, {})[key] = (stats.median, stats.rounds)

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each median, and one for each ratio."""
    medians = terminalreporter.config.stash.get(MEDIANS, {})
    if not medians:
        return
    terminalreporter.section("medians")
    for key, (median, rounds) in medians.items():
        terminalreporter.write_line(f"{key}: {median * 1e3:.3f} ms ({rounds} rounds)")
    for measured, against in COMPARED:
        if measured in medians and against in medians:
            ratio = medians[measured][0] / medians[against][0]
            terminalreporter.write_line(f"{measured} / {against} = {ratio:.2f}x")
