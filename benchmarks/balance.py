"""Balance: the bytes that the busiest source worker sends, over the mean, and the lowest possible figure.

    python -m benchmarks.balance

All destination workers read each request. By default a plan reads from few peers, and reads a part that several sources
hold from one of them. "lowest" beside it is the lowest possible figure with as many peers for each destination and
undivided parts. The right half is for plans that divide parts among replicas; "lowest" there is the lowest figure of
all.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction

from benchmarks.flow import Holders, Needs, lowest, needs
from kvplan import MeshPlan, Model, Worker, plan_mesh

CASES = (
    ("deepseek-v3", 16, 8, "MLA"),
    ("deepseek-v3", 8, 16, "MLA"),
    ("qwen3-235b-a22b", 16, 4, "K=4"),
    ("llama-3.1-8b", 32, 8, "K=8"),
    ("llama-3.1-8b", 16, 4, "K=8"),
    ("nemotron-h-8b", 16, 4, "hybrid, K=8"),
    ("nemotron-h-8b", 12, 8, "hybrid, K=8"),
    ("nemotron-h-8b", 8, 16, "hybrid, K=8"),
    ("nemotron-3-nano-30b-a3b", 8, 2, "hybrid, K=2"),
    ("qwen3-next-80b", 16, 4, "hybrid, K=2"),
)
TOKENS = (1024, 16384)
"""Lengths for hybrids, whose states have the same size at any length. Others are equally balanced at any length."""


def loads(mesh: MeshPlan, sources: Sequence[Worker], tokens: int) -> tuple[Fraction, Counter[str]]:
    """The busiest source's bytes over the mean, and how many peers each destination has."""
    sent, peers = Counter[int](), Counter[str]()
    for pair in mesh.cost(tokens).pairs:
        sent[pair.remote[1]] += pair.num_bytes
        peers[f"{pair.local[0]}/{pair.local[1]}"] += bool(pair.lengths)
    return Fraction(max(sent.values()) * len(sources), sum(sent.values())), peers


def lowest_whole(needed: Needs, peers: Sequence[int]) -> Fraction:
    """A floor for undivided parts and ``peers`` for each destination: the best of each destination alone."""
    found = Fraction(0)
    for index, allowed in enumerate(peers):
        own = {key: number for key, number in needed.items() if key[0] == index}
        best = sum(own.values(), Fraction(0))
        for owners in itertools.product(*(sorted(holders) for _, _, holders in own)):
            if len(set(owners)) <= allowed:
                load: dict[int, Fraction] = defaultdict(Fraction)
                for owner, number in zip(owners, own.values(), strict=True):
                    load[owner] += number
                best = min(best, max(load.values()))
        found = max(found, best)
    return found


def lines(name: str, src: int, dst: int, what: str) -> list[str]:
    """A line of the table for each length of a request."""
    model = Model.shipped(name)
    sources, destinations = (model.engine(side, tp=tp, num_blocks=8) for side, tp in (("src", src), ("dst", dst)))
    replicas = max(src // dst, 2)
    meshes = [plan_mesh(destinations, sources, replicas=number) for number in (1, replicas)]
    made = []
    for tokens in TOKENS if "state" in model.groups else TOKENS[:1]:
        needed = needs(destinations, sources, tokens)
        by_holders: dict[Holders, int | Fraction] = defaultdict(Fraction)
        for (_, _, holders), number in needed.items():
            by_holders[holders] += number
        mean = sum(needed.values(), Fraction(0)) / src
        (alone, few), (shared, more) = (loads(mesh, sources, tokens) for mesh in meshes)
        best = lowest(by_holders)
        floor = max(lowest_whole(needed, list(few.values())), best)
        made.append(
            f"{name:24}{what:13}{src:3} ->{dst:3}{tokens:7}"
            f"{float(alone):9.3f}{float(floor / mean):9.3f}{max(few.values()):7}"
            f"{replicas:12}{float(shared):9.3f}{float(best / mean):9.3f}{max(more.values()):7}"
        )
    return made


def main() -> None:
    """Print the table."""
    print(f"{'':50}{'one of each':^25}{'':8}{'shared by replicas':^29}")
    print(
        f"{'model':37}{'TP':^9}{'tokens':>7}{'ours':>8}{'lowest':>9}{'peers':>7}{'replicas':>12}{'ours':>9}"
        f"{'lowest':>9}{'peers':>7}"
    )
    for case in CASES:
        print("\n".join(lines(*case)), flush=True)


if __name__ == "__main__":
    main()
