"""What a process holds: its memory, files and threads, and how fast its memory grows."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

NUM_MEANS: Final = 30
"""Neighbours are averaged first: what a process held 5 s ago says much of what it holds now."""

SETTLED_S: Final = 300.0
"""The beginning of a run, in which buffers and heaps reach their sizes, is left out."""


LONG_S: Final = 1200.0
"""How long a run goes on after that before growth is told."""


@attrs.frozen
class Held:
    """What a process holds at a moment."""

    mib: float
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int | str = "self") -> Held:
        """Of this process, or of another one. Raises OSError if it has ended."""
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        return cls(pages * 4096 / (1 << 20), len(os.listdir(process / "fd")), len(os.listdir(process / "task")))


PF_EXITING: Final = 0x4
"""The flag of a thread that ends."""


def running_threads(pid: int | str = "self") -> set[int]:
    """The threads of a process. One that was joined is listed for a moment more, and is left out."""
    running = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            # the flags are the seventh field after the name, which is in brackets
            flags = int(path.read_text().rpartition(")")[2].split()[6])
            if not flags & PF_EXITING:
                running.add(int(path.parent.name))
    return running


def tell_blocks(path: Path, every_s: float = 1.0) -> None:
    """Go on writing into a file how many blocks of memory this process has from Python.

    The memory of a process also grows by holes that its heap leaves between objects. The number of blocks does not, so
    a process whose memory grows while its blocks do not keeps no objects.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def tell() -> None:
        while True:
            # of one width and in one call, so that a reader never sees a part of it
            os.pwrite(file, f"{sys.getallocatedblocks():20}".encode(), 0)
            time.sleep(every_s)

    threading.Thread(target=tell, daemon=True).start()


@attrs.frozen
class Growth:
    """The slope of a line through measurements, per hour, with its standard error."""

    per_hour: float
    error: float

    def __str__(self) -> str:
        return f"{self.per_hour:+.2f} ± {self.error:.2f} an hour"

    def exceeds(self, per_hour: float) -> bool:
        """It is larger than that, by more than three times its error."""
        return self.per_hour - 3 * self.error > per_hour


def growth(seconds: npt.ArrayLike, values: npt.ArrayLike, settled_s: float = SETTLED_S) -> Growth:
    """Fit a line by least squares to the means of up to 30 groups of neighbours, after the first 300 s or others.

    >>> growth(range(3000), [3 + 2 * number / 3600 for number in range(3000)])
    Growth(per_hour=2.0, error=0.0)
    >>> str(growth(range(100), range(100)))
    '+0.00 ± inf an hour'
    """
    times = np.asarray(seconds)
    kept = np.flatnonzero(times >= settled_s)
    # a step of a heap looks like a slope in less
    if not kept.size or times[-1] < settled_s + LONG_S:
        return Growth(0.0, float("inf"))
    groups = [group for group in np.array_split(kept, NUM_MEANS) if group.size]
    hours = np.array([np.take(seconds, group).mean() for group in groups]) / 3600
    means = np.array([np.take(values, group).mean() for group in groups])
    hours -= hours.mean()
    spread = hours @ hours
    per_hour = float(hours @ means / spread)
    rest = means - means.mean() - per_hour * hours
    error = float(np.sqrt(rest @ rest / (len(groups) - 2) / spread))
    return Growth(round(per_hour, 3), round(error, 3))
