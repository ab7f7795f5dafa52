"""What kvplan's own check says of copies that others made: the report of `assert_copies`, by coordinates.

It takes nothing but what a peer posts. Which workers a copy is between follows from its addresses, as all engines of a
pair are arrays of one process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvplan import Blocks, Report, plan_mesh, verify
from kvplan.describe.worker import Key, Worker
from tests.second_opinion.copies import Copies
from tests.second_opinion.engines import Engine, Ints
from tests.second_opinion.peers import Pair


def check(pair: Pair, copies: Copies, source: Engine, destination: Engine) -> Report:
    """What is wrong with the copies of a pair, promise by promise."""
    sources, destinations = ([rank.worker for rank in engine.ranks] for engine in (source, destination))
    found: dict[tuple[Key, Key], tuple[list[Any], list[Any]]] = {}
    columns = copies.writes, copies.reads, copies.lengths
    owners = _owners(destinations, copies.writes), _owners(sources, copies.reads)
    for key, write, read, length in zip(zip(*owners, strict=True), *(c.tolist() for c in columns), strict=True):
        ours, theirs = found.setdefault(key, ([], []))
        ours.append((write, length, 0))
        theirs.append((read, length, 0))
    return verify(
        plan_mesh(destinations, sources),
        local={"attn": Blocks(destination.ids, first=destination.first)},
        remote={"attn": Blocks(source.ids)},
        tokens=(pair.start, pair.stop),
        copies=found,
    )


def first_failure(report: Report) -> str:
    """What a report says first, without the addresses, which are others in every process."""
    code, text = report.failures[0]
    return re.sub(r"(, address| at) 0x\w+", "", f"{code}: {text}")


def _owners(workers: Iterable[Worker], addresses: Ints) -> list[Key]:
    """The worker whose region starts last before each address."""
    regions = sorted((region.address, worker.key) for worker in workers for region in worker.regions)
    at = np.searchsorted([address for address, _ in regions], addresses, side="right") - 1
    return [regions[max(i, 0)][1] for i in at.tolist()]
