"""Runs peers and kvplan on the same pairs, and counts how they compare."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable

import attrs

from benchmarks.peers.loading import RefusedError
from kvplan import KVPlanError
from kvplan.testing.conformance import PairCase
from tests.second_opinion.copies import first_failure, judge, same, verified
from tests.second_opinion.explanations import Explanation, explain
from tests.second_opinion.peers import Peer, ours


@attrs.define
class Row:
    """How many pairs have one result, the first of them, and the first wrong byte there."""

    count: int = 0
    example: str = ""
    first: str = ""

    def add(self, example: str) -> None:
        """Count one more."""
        self.count += 1
        self.example = self.example or example


@attrs.define
class Tally:
    """The comparison with one peer."""

    peer: Peer
    pairs: int = 0
    compared: int = 0
    same: int = 0
    replica: int = 0
    we_are_wrong: int = 0
    posted: tuple[int, int] = (0, 0)
    refused: dict[str, Row] = attrs.Factory(dict)
    refused_by_us: dict[str, Row] = attrs.Factory(dict)
    differ: dict[Explanation | None, Row] = attrs.Factory(dict)

    @property
    def num_different(self) -> int:
        """The number of pairs whose copies are wrong, or more than needed."""
        return sum(row.count for row in self.differ.values())

    @property
    def is_settled(self) -> bool:
        """Whether every difference is explained, and none is kvplan's fault."""
        return None not in self.differ and not self.we_are_wrong and not self.refused_by_us

    def take(self, pair: PairCase) -> None:
        """Plan one pair with the peer and with kvplan, and compare."""
        self.pairs += 1
        source, destination = pair.engines()
        span = (pair.start, pair.stop)
        try:
            theirs = self.peer.plan(pair, source, destination)
        except RefusedError as error:
            self.refused.setdefault(_kind(error), Row()).add(f"{pair}: {error}")
            theirs = None
        try:
            here = ours(pair, source, destination)
        except KVPlanError as error:
            self.refused_by_us.setdefault(error.code, Row()).add(f"{pair}: {error}")
            return
        if not judge(here, source, destination, span).is_right:
            self.we_are_wrong += 1
        if theirs is None:
            return
        self.compared += 1
        finding = judge(theirs, source, destination, span)
        if not finding.is_right:
            row = self.differ.setdefault(explain(self.peer.name, pair, finding), Row())
            row.add(f"{pair}: {finding}")
            row.first = row.first or first_failure(verified(theirs, source, destination, span))
            return
        self.posted = (self.posted[0] + theirs.posted, self.posted[1] + here.posted)
        if same(here, theirs):
            self.same += 1
        else:
            self.replica += 1


def _kind(error: RefusedError) -> str:
    """A refusal without the numbers of its pair."""
    return re.sub(r"\b(L|B)[LBHNC]{4}\b", "*", re.sub(r"\d+", "#", str(error)))


def compare(peers: Iterable[Peer], every: int = 1) -> list[Tally]:
    """Compare all pairs of all peers, or one in ``every``. Progress goes to stderr."""
    tallies = []
    for peer in peers:
        tallies.append(Tally(peer))
        pairs, began = list(peer.pairs())[::every], time.monotonic()
        for number, pair in enumerate(pairs, 1):
            tallies[-1].take(pair)
            if number % 100 == 0 or number == len(pairs):
                print(f"{peer.name}: {number} of {len(pairs)}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return tallies
