"""Checks all small worlds, or some of them: ``python -m property_tests.exhaustive``.

Chunks of worlds have an order that spreads every part of a run over all grids. ``--limit`` does the first of them,
``--slice 2/5`` every fifth from the second on, for several machines. With ``--state`` a stopped run resumes. A wrong
world is printed with its number and its definition, and the exit status is 1; ``--world`` does one world by its number.
``--strategy`` moves requests in two steps instead.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import attrs

import kvplan
from property_tests.grids import Worlds
from property_tests.labelled import Tally, check
from property_tests.staged import CHECKS

CHUNK = 100
SAVED_EVERY_SECONDS = 10

Failure = tuple[int, str]
"""A world's number, and its fault."""


DIRECT = "direct"
MORE = 0, 1, 100, 1000, 10_000
"""How many more bytes than needed a staging buffer has, in turns."""
REQUESTS = 4
"""The most requests of a world that move in two steps, which takes longer."""


@attrs.frozen
class Job:
    """Check worlds directly, with certificates of one in ``certify_every``, or in two steps by a strategy."""

    strategy: str = DIRECT
    certify_every: int = 4

    def __str__(self) -> str:
        return f"certified 1/{self.certify_every}" if self.strategy == DIRECT else self.strategy


@cache
def all_worlds() -> Worlds:
    """The worlds, built once in each process."""
    return Worlds()


def do_world(number: int, job: Job, tally: Tally) -> str | None:
    """Check one world, with certificates if it is its turn. Return its fault, if any."""
    worlds = all_worlds()
    world, requests = worlds[number], worlds.requests(number)
    try:
        if job.strategy == DIRECT:
            check(world, requests, number // 7 % job.certify_every == 0, tally)
        else:
            some = requests[:: -(-len(requests) // REQUESTS)]
            CHECKS[job.strategy](world, some, MORE[number // 7 % len(MORE)], tally)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def worlds_of(chunk: int, total: int) -> range:
    """The numbers of a chunk's worlds."""
    return range(chunk * CHUNK, min((chunk + 1) * CHUNK, total))


def do_chunk(job: Job, chunk: int) -> tuple[int, Tally, list[Failure]]:
    """Check the worlds of a chunk."""
    tally = Tally()
    found = [(number, do_world(number, job, tally)) for number in worlds_of(chunk, len(all_worlds()))]
    return chunk, tally, [(number, why) for number, why in found if why is not None]


def chunks_of(total: int, part: tuple[int, int]) -> list[int]:
    """The chunks of one slice, in an order whose beginning covers all grids.

    >>> chunks_of(950, (1, 1)), chunks_of(950, (2, 3))
    ([0, 7, 4, 1, 8, 5, 2, 9, 6, 3], [7, 8, 9])
    """
    count = -(-total // CHUNK)
    step = next(step for step in itertools.count(count * 618 // 1000 + 1) if math.gcd(step, count) == 1)
    return [turn * step % count for turn in range(part[0] - 1, count, part[1])]


@attrs.define
class Run:
    """The results of a run. ``key`` identifies its worlds and the code."""

    key: str
    chunks: list[int] = attrs.Factory(list)
    seconds: float = 0.0
    tally: Tally = attrs.Factory(Tally)
    failures: list[Failure] = attrs.Factory(list)

    def save(self, path: Path | None) -> None:
        """Replace the file atomically."""
        if path:
            beside = path.with_name(f"{path.name}.new")
            beside.write_text(json.dumps(attrs.asdict(self)))
            beside.replace(path)

    @classmethod
    def load(cls, path: Path | None, key: str) -> Run:
        """The run in a file, or a new one."""
        if not path or not path.exists():
            return cls(key)
        found = json.loads(path.read_text())
        if found["key"] != key:
            raise SystemExit(f"{path} is of another run: {found['key']}; this one: {key}")
        return cls(**{**found, "tally": Tally(**found["tally"]), "failures": [tuple(one) for one in found["failures"]]})

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {name.replace('num_', '')}" for name, count in attrs.asdict(self.tally).items())
        rate = self.tally.worlds / max(self.seconds, 1e-9)
        return f"{counts}; {len(self.failures)} wrong; {self.seconds:,.0f} s, {rate:,.0f} worlds/s"


def code() -> str:
    """A hash of kvplan's source files."""
    sources = sorted(Path(kvplan.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


@contextlib.contextmanager
def results(job: Job, chunks: Sequence[int], processes: int) -> Iterator[Iterable[tuple[int, Tally, list[Failure]]]]:
    """The results of chunks, in any order, from several processes or from this one."""
    do = partial(do_chunk, job)
    if processes == 1:
        yield map(do, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield pool.imap_unordered(do, chunks)


@contextlib.contextmanager
def progress(done: int, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, where rich is installed. Yields the function that advances it."""
    try:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield lambda more: None
        return
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("worlds", total=total, completed=done)
        yield lambda more: bar.advance(task, more)


def go(run: Run, chunks: Sequence[int], job: Job, processes: int, state: Path | None) -> None:
    """Check the chunks that a run has not checked, and add the results to it."""
    total = len(all_worlds())
    known = set(run.chunks)
    left = [chunk for chunk in chunks if chunk not in known]
    before, saved = run.seconds - time.monotonic(), time.monotonic()
    size = sum(len(worlds_of(chunk, total)) for chunk in chunks)
    with results(job, left, processes) as found, progress(run.tally.worlds, size) as advance:
        for chunk, tally, failures in found:
            run.chunks.append(chunk)
            run.tally.add(tally)
            run.failures += failures
            for number, why in failures:
                print(describe(number, why))
            advance(tally.worlds)
            run.seconds = before + time.monotonic()
            if time.monotonic() - saved > SAVED_EVERY_SECONDS:
                run.save(state)
                saved = time.monotonic()


def describe(number: int, why: str | None) -> str:
    """A world and its fault."""
    return f"world {number}: {all_worlds()[number]!r}\n  {why or 'right'}"


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError(text)
    return int(number), int(count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line. Returns the exit status."""
    parser = argparse.ArgumentParser("python -m property_tests.exhaustive", description="Check all small worlds.")
    parser.add_argument("--slice", type=_part, default=(1, 1), metavar="I/N", help="the Ith of N parts")
    parser.add_argument("--limit", type=int, metavar="WORLDS", help=f"about so many, in chunks of {CHUNK}")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--certify-every", type=int, default=4, metavar="N", help="certify the plans of one world in N")
    parser.add_argument("--strategy", choices=(DIRECT, *CHECKS), default=DIRECT)
    parser.add_argument("--state", type=Path, metavar="FILE", help="resume from this file, and save to it")
    parser.add_argument("--world", type=int, metavar="NUMBER", help="only this one")
    given = parser.parse_args(arguments)
    if given.world is not None:
        why = do_world(given.world, Job(given.strategy, 1), Tally())
        print(describe(given.world, why))
        return int(why is not None)
    total = len(all_worlds())
    chunks = chunks_of(total, given.slice)
    if given.limit is not None:
        chunks = chunks[: -(-given.limit // CHUNK)]
    part, job = "/".join(map(str, given.slice)), Job(given.strategy, given.certify_every)
    run = Run.load(given.state, f"slice {part} of {total} worlds, {job}, code {code()}")
    stopped = False
    try:
        go(run, chunks, job, given.processes, given.state)
    except KeyboardInterrupt:
        stopped = True
    run.save(given.state)
    print(run, "(stopped)" if stopped else f"(of {total:,} worlds)")
    return 130 if stopped else int(bool(run.failures))


if __name__ == "__main__":
    sys.exit(main())
