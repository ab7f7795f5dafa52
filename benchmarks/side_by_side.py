"""Side by side: from a request's block tables to descriptors, by kvplan, by its peers' own planners, and by numpy.

    python -m benchmarks.peers.environment     # once: vLLM and SGLang as released, in .second_opinion
    python -m benchmarks.side_by_side          # ten minutes; one with --blocks 512

All functions take turns in one process of that environment. Peers' functions run as released, with recording agents in
place of NIXL and Mooncake. All start from lists of block ids of both sides. Their results differ:

- kvplan's ``bind`` and SGLang's NIXL manager make int32 ids of both sides, vLLM's NIXL connector int64 ids.
- Connectors for Mooncake make addresses and lengths, as lists of int. kvplan's ``descriptors`` are arrays of them.
- ``bind`` checks the tables and the range, and is exact to the position. Peers copy whole blocks and check less.
- kvplan and vLLM's NIXL connector plan what a decode worker reads. The others plan what prefill workers write, here
  one after the other.

Before timing, each function's result is expanded to addresses and compared: it must copy the same bytes from and to
the same addresses as kvplan. No peer may need fewer ids or ranges than kvplan.
Without the environment the table has the rows of kvplan and of two additions alone.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.peers import environment, kvplan_rows, table
from benchmarks.peers.cases import CASES, Case, Request, World, moves
from benchmarks.peers.rows import Figure, Refusal, Row, Section, measure

BLOCKS: Final = (8, 64, 512, 4096)
ABSENT: Final = (
    "no peers here, so their rows are missing: `python -m benchmarks.peers.environment` makes their environment"
)

Peers = Callable[[World], Callable[[Request], Iterator[Row | Refusal]]]


def main(arguments: Sequence[str]) -> int:
    """Measure, here or in the environment, and print."""
    options = _parser().parse_args(arguments)
    with_peers = environment.is_there()
    if not with_peers:
        print(ABSENT, file=sys.stderr)
    elif not environment.PYTHON.parent.parent.samefile(sys.prefix):
        command = [str(environment.PYTHON), "-m", "benchmarks.side_by_side", *arguments]
        return subprocess.run(command, cwd=environment.ROOT).returncode
    print(table.markdown(list(run(options, with_peers)), caption(with_peers)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side", description="kvplan beside its peers")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, metavar="N", help="sizes of the request")
    parser.add_argument("--case", nargs="+", default=[""], metavar="WORDS", help="cases with these words in their name")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case and size; five rounds at least")
    return parser


def run(options: argparse.Namespace, with_peers: bool = False) -> Iterator[Section]:
    """Measure the sections that the options select."""
    cases = [case for case in CASES if any(words in case.name for words in options.case)]
    peers = _peers() if with_peers else {}
    for case in cases:
        world = World.of(case)
        peer_rows = peers[case.peers](world) if peers else _no_rows
        for blocks in options.blocks:
            print(f"{case.name}, {blocks} blocks", file=sys.stderr)
            request = Request.of(case, blocks)
            yield section(world, request, [*kvplan_rows.rows(world, request), *peer_rows(request)], options.seconds)


def _no_rows(request: Request) -> Iterator[Row | Refusal]:
    return iter(())


def _peers() -> dict[str, Peers]:
    from benchmarks.peers import sglang_rows, vllm_rows

    vllm_rows.load()
    return {"vLLM": vllm_rows.rows, "SGLang": sglang_rows.rows}


def section(world: World, request: Request, rows: Sequence[Row | Refusal], seconds: float) -> Section:
    """Measure one case at one size. Raises RuntimeError if a peer needs fewer ids or ranges than kvplan."""
    specs = kvplan_rows.bound(world.plan, request)
    num_descriptors = sum(spec.num_descriptors for spec in specs)
    num_bytes = sum(spec.num_bytes for spec in specs)
    num_ids = sum(spec.local_ids.size for spec in specs)
    expected = moves(kvplan_rows.copies(specs))
    del specs  # which frees their cached descriptors
    least = {"ids": num_ids, "ranges": num_descriptors}
    timed_rows = [row for row in rows if isinstance(row, Row)]
    counts = [checked(row, expected) for row in timed_rows]
    for row, count in zip(timed_rows, counts, strict=True):
        if count < least.get(row.output, 0):
            raise RuntimeError(f"{row.name} makes {count} {row.output}, fewer than kvplan for the same bytes")
    figures = list[Figure]()
    for row, count, times in zip(timed_rows, counts, measure(timed_rows, seconds), strict=True):
        figures.append(Figure(row.name, row.output, count, *times, row.note))
    refusals = tuple(row for row in rows if isinstance(row, Refusal))
    case: Case = world.case
    return Section(case.name, case.peers, len(request.source), num_bytes, num_descriptors, tuple(figures), refusals)


def checked(row: Row, expected: tuple[Any, ...]) -> int:
    """Count the ids or ranges that a function makes for one side.

    Raises RuntimeError unless it makes the expected copies.
    """
    output = row.call()
    if row.moves is not None:
        copies = moves(row.moves(output))
        if not all(np.array_equal(*columns) for columns in zip(copies, expected, strict=True)):
            raise RuntimeError(f"{row.name} moves other bytes")
    return row.count(output)


def caption(with_peers: bool) -> str:
    """Return the date, the machine and the versions."""
    names = ("numpy", "torch") if with_peers else ("numpy",)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    versions += [f"{name} {version}" for name, version in environment.PEERS.items()] if with_peers else []
    return (
        f"{datetime.date.today()}: Python {platform.python_version()}, {', '.join(versions)}, "
        f"{os.cpu_count()} CPUs of {_processor()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
