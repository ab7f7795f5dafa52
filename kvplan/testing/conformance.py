"""A conformance kit: does a connector copy the right bytes between engines that differ?

Subclass :class:`ConnectorContract` in your connector's own tests, and return in ``copies`` what it
copies for a :class:`PairCase`: two engines in real memory, whose parallel sizes, block sizes and
layouts differ as the field's bug reports say. Each case is right, wrong or refused, by
:func:`kvplan.verify`, which follows every byte by the meaning that its worker gives it. pytest
collects a subclass whose name begins with ``Test``. The kit needs numpy and Hypothesis.

>>> class OneToOne(ConnectorContract):
...     '''A connector for equal engines, which pairs blocks by their indices in two lists.'''
...     order = "LBHNKD"
...     def copies(self, case, source, destination):
...         if source.side != destination.side:
...             raise RefusedError("unequal engines")
...         for read, written in zip(source.ranks, destination.ranks):
...             for here, there in zip(read.caches, written.caches):
...                 size = here.memory[0].nbytes
...                 for block, other in zip(source.block_ids, destination.block_ids):
...                     yield here.address + block * size, there.address + other * size, size
>>> verdicts = OneToOne().verdicts()
>>> print(verdicts["equal engines"], verdicts["decode has more ranks"], sep="; ")
right; refused: unequal engines
>>> print(verdicts["prefix hit"])  # doctest: +ELLIPSIS
wrong: VALUE: at destination/0-1: 1024 bytes wrong: everywhere: position p holds position p-8
  ...

:meth:`ConnectorContract.connector` may return the connector for a simulated fleet too
(:mod:`kvplan.testing.simulation`), with aborts, expired leases, dead peers, replayed requests and
wrong prompts.

What no case has: pipeline stages, windows, states, and requests that end inside a block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final
from unittest import SkipTest

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan.describe import Blocks, Context, Group, Region, View, Worker, view_of
from kvplan.describe.blocks import Range
from kvplan.describe.worker import Key
from kvplan.plan import plan_mesh
from kvplan.testing.simulation import Connector, Scenario, Simulation, Site, shrink
from kvplan.verification import Report, verify

if find_spec("hypothesis") is None:
    raise ImportError("kvplan.testing.conformance needs hypothesis: pip install hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

__all__ = [
    "ConnectorContract",
    "EngineMemory",
    "PairCase",
    "RefusedError",
    "Rows",
    "Side",
    "Verdict",
    "cases",
]

NAMES: Final = MappingProxyType({"B": "block", "K": "kv", "H": "head", "N": "token", "D": "dim"})
LAYERS: Final = 2
DIM: Final = 4


class RefusedError(Exception):
    """A connector refuses engines or a request, which is no fault."""


@attrs.frozen
class Side:
    """One engine of a pair: its cache's order, and its sizes. An element is one byte.

    ``order`` names the dimensions of its cache from the slowest to the fastest: L layer, B block, K
    before V, H head, N token in the block, D dim. With L or K at the front, each layer, or K and V,
    has an array. A cache without H is of latents, whole on each rank. ``dcp`` of the ``tp`` ranks
    share the positions, ``interleave`` of them in turn, and so do ``pcp`` such groups of ranks.
    """

    order: str
    heads: int = 1
    tp: int = 1
    tokens: int = 4
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1

    def __str__(self) -> str:
        sizes = attrs.asdict(self, filter=lambda field, value: value not in (self.order, 1))
        return " ".join([self.order, *(f"{name}={value}" for name, value in sizes.items())])

    @property
    def contexts(self) -> int:
        """How many workers share the positions."""
        return self.dcp * self.pcp

    @property
    def has_heads(self) -> bool:
        return "H" in self.order

    @property
    def possible(self) -> bool:
        """Whether engines start so: all ranks have as many heads, or all heads as many ranks."""
        shared = self.heads % self.tp == 0 or self.tp % self.heads == 0
        copies = max(1, self.tp // self.heads) if self.has_heads else self.tp
        return (shared or not self.has_heads) and copies % self.dcp == 0

    @property
    def ranks(self) -> range:
        """The workers by number: the ``tp`` ranks of the first pcp rank, then those of the next."""
        return range(self.tp * self.pcp)

    def held(self, rank: int) -> tuple[int, int]:
        """The heads of a worker, ``[start, stop)``."""
        if not self.has_heads:
            return 0, 1
        rank %= self.tp
        if self.tp > self.heads:
            head = rank // (self.tp // self.heads)
            return head, head + 1
        num_heads = self.heads // self.tp
        return rank * num_heads, (rank + 1) * num_heads

    def context(self, rank: int) -> int:
        """The context rank of a worker among those that share the positions."""
        return rank // self.tp * self.dcp + rank % self.tp % self.dcp


@attrs.frozen(eq=False)
class CacheArray:
    """One array of a worker, and the letters of its dimensions."""

    letters: str
    memory: Any

    @property
    def address(self) -> int:
        return int(self.memory.__array_interface__["data"][0])

    def layer(self, number: int) -> Any:
        """The array of one layer, without the dimension of layers."""
        at = self.letters.find("L")
        return self.memory if at < 0 else self.memory[(slice(None),) * at + (number,)]


@attrs.frozen(eq=False)
class Rank:
    """One worker: for kvplan, and as arrays, one for each layer, or for K and V of each layer."""

    worker: Worker
    caches: tuple[CacheArray, ...]


@attrs.frozen(eq=False)
class EngineMemory:
    """All workers of one side, whose model has ``layers`` layers and heads of ``dim`` bytes.

    ``table`` has the blocks of its one request.
    """

    side: Side
    ranks: tuple[Rank, ...]
    table: Blocks
    layers: int = LAYERS
    dim: int = DIM

    @property
    def block_ids(self) -> list[int]:
        """The request's blocks, in the order of its tokens: those after a cached prefix."""
        ids: list[int] = self.table.ids.tolist()
        return ids


def make(name: str, side: Side, table: Blocks, num_blocks: int) -> EngineMemory:
    """Return an engine in real memory, with pools of ``num_blocks``."""
    ranks = tuple(Rank(*_rank(name, side, rank, num_blocks)) for rank in side.ranks)
    return EngineMemory(side, ranks, table)


def _rank(
    name: str, side: Side, rank: int, num_blocks: int
) -> tuple[Worker, tuple[CacheArray, ...]]:
    start, stop = side.held(rank)
    sizes = {"L": LAYERS, "B": num_blocks, "K": 2, "H": stop - start, "N": side.tokens, "D": DIM}
    outer = "".join(itertools.takewhile("KL".__contains__, side.order))
    inner = side.order[len(outer) :]
    caches = list[CacheArray]()
    regions = list[Region]()
    views = list[View]()
    for coordinates in itertools.product(*(range(sizes[letter]) for letter in outer)):
        at = dict(zip(outer, coordinates, strict=True))
        cache = CacheArray(inner, np.zeros([sizes[letter] for letter in inner], np.uint8))
        label = "".join(f"{letter}{number}" for letter, number in at.items()) or "pool"
        region = Region(label, cache.address, cache.memory.nbytes)
        for layer in [at["L"]] if "L" in at else range(LAYERS):
            views.append(_view(cache, layer, at.get("K"), region, (start, stop, side.heads)))
        caches.append(cache)
        regions.append(region)
    group = Group("attn", side.tokens, Context(side.context(rank), side.contexts, side.interleave))
    return Worker(name, rank, regions, (group,), views), tuple(caches)


def _view(
    cache: CacheArray, layer: int, kv: int | None, region: Region, heads: tuple[int, int, int]
) -> View:
    array = cache.layer(layer)
    letters = cache.letters.replace("L", "")
    shards = {"head": heads} if "H" in letters else {}
    if kv is not None:
        array, letters = array[None], "K" + letters
        shards["kv"] = (kv, kv + 1, 2)
    pattern = " ".join(NAMES[letter] for letter in letters)
    name = f"layers.{layer}.attn"
    return view_of(array, pattern, name=name, group="attn", region=region, shards=shards)


def sides(**choices: Any) -> Iterator[Side]:
    """Yield all possible sides of the product of choices, each a sequence by a field's name."""
    for values in itertools.product(*choices.values()):
        side = Side(**dict(zip(choices, values, strict=True)))
        if side.possible:
            yield side


@attrs.frozen
class PairCase:
    """Two engines and a request: its positions ``[start, stop)``, whole blocks of both sides.

    The destination has the positions before ``start`` already. ``bug`` is a public report of the
    fault that the case would show.
    """

    source: Side
    destination: Side
    stop: int
    start: int = 0
    bug: str = ""

    def __str__(self) -> str:
        return f"{self.source} -> {self.destination}, positions [{self.start}, {self.stop})"

    def engines(self) -> tuple[EngineMemory, EngineMemory]:
        """Return both engines, with the request in scattered blocks."""
        source = _engine("source", self.source, 0, self.stop)
        return source, _engine("destination", self.destination, self.start, self.stop)


def _engine(name: str, side: Side, start: int, stop: int) -> EngineMemory:
    num_blocks = {"source": 27, "destination": 32}[name]
    span = side.tokens * side.contexts
    first, last = start // span, -(-stop // span)
    assert last <= num_blocks, f"{last} blocks of a pool of {num_blocks}"
    ids = np.random.default_rng([len(name), stop]).permutation(num_blocks)[: last - first]
    return make(name, side, Blocks(ids, first), num_blocks)


def cases(order: str, latents: str = "LBND") -> dict[str, PairCase]:
    """Return the cases by name, for an engine whose cache has an order, and one for latents."""

    def pair(
        here: tuple[int, int], there: tuple[int, int], heads: int = 4, **more: Any
    ) -> PairCase:
        """Return engines of (tp, tokens per block)."""
        source, destination = (Side(order, heads, tp, tokens) for tp, tokens in (here, there))
        return PairCase(source, destination, **{"stop": 24, **more})

    def latent(here: Mapping[str, int], there: Mapping[str, int], **more: Any) -> PairCase:
        return PairCase(Side(latents, **here), Side(latents, **there), **{"stop": 24, **more})

    # tokens outside heads, or heads outside tokens: whichever the engine has not
    other = order.translate(str.maketrans("HN", "NH"))
    turned = PairCase(Side(other, 4, 2), Side(order, 4, 4), 24, bug="vllm-project/vllm#35444")
    return {
        "equal engines": pair((2, 4), (2, 4)),
        "decode has more ranks": pair((2, 4), (4, 4), bug="sgl-project/sglang#9960"),
        "prefill has more ranks": pair((4, 4), (2, 4)),
        "ranks that do not divide": pair((2, 4), (3, 4), 6),
        "fewer heads than ranks of prefill": pair(
            (8, 4), (2, 4), 2, bug="sgl-project/sglang#19086"
        ),
        "fewer heads than ranks of decode": pair((2, 4), (8, 4), 2, bug="sgl-project/sglang#23746"),
        "fewer heads than ranks of both": pair((4, 4), (8, 4), 2, bug="vllm-project/vllm#52516"),
        "one head": pair((4, 4), (2, 4), 1, bug="vllm-project/vllm#19691"),
        "prefill has smaller blocks": pair((2, 2), (2, 4)),
        "decode has smaller blocks": pair((2, 4), (2, 2)),
        "blocks that do not divide": pair((2, 3), (2, 4)),
        "more ranks and larger blocks": pair((2, 2), (4, 4)),
        "fewer ranks and larger blocks": pair((4, 2), (2, 4)),
        "prefix hit": pair((2, 4), (2, 4), start=8, bug="vllm-project/vllm#48633"),
        "prefix hit and more ranks": pair((2, 4), (4, 4), start=8),
        "prefix hit and larger blocks": pair((2, 2), (2, 4), start=8),
        "heads and tokens exchanged": turned,
        "latents": latent({"tp": 2}, {"tp": 4}),
        "latents and larger blocks": latent({"tp": 2, "tokens": 2}, {"tp": 4}),
        "latents, tokens in turn": latent({}, {"tp": 2, "dcp": 2}),
        "latents, blocks in turn": latent(
            {}, {"tp": 2, "dcp": 2, "interleave": 4}, bug="vllm-project/vllm#38433"
        ),
        "latents, blocks in turn on both": latent(
            {"tp": 2, "dcp": 2, "interleave": 4}, {"tp": 4, "dcp": 4, "interleave": 4}, stop=32
        ),
        "latents, larger blocks in turn": latent(
            {"tokens": 2}, {"tp": 2, "dcp": 2, "interleave": 4}, stop=16
        ),
    }


Rows = Iterable[tuple[int, int, int]]
"""What a connector copies: address read, address written, and how many bytes."""


@attrs.frozen
class Verdict:
    """Whether a connector copies a case right: ``right``, ``wrong`` or ``refused``, and why."""

    word: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


def verified(source: EngineMemory, destination: EngineMemory, tokens: Range, rows: Rows) -> Report:
    """Return the report of :func:`kvplan.verify` for what a connector copies of a request."""
    destinations, sources = ([rank.worker for rank in one.ranks] for one in (destination, source))
    copies: dict[Any, tuple[list[Any], list[Any]]] = {}
    reads, writes, lengths = np.array([*rows], np.int64).reshape(-1, 3).T
    pairs = zip(_owners(destinations, writes), _owners(sources, reads), strict=True)
    for pair, read, write, length in zip(pairs, reads, writes, lengths, strict=True):
        local, remote = copies.setdefault(pair, ([], []))
        local.append((write, length, 0))
        remote.append((read, length, 0))
    return verify(
        plan_mesh(destinations, sources),
        local={"attn": destination.table},
        remote={"attn": source.table},
        tokens=tokens,
        copies=copies,
    )


def _owners(workers: list[Worker], addresses: Ints) -> list[Key]:
    """Return the worker of each address: that of the last region that starts at or before it."""
    regions = sorted((region.address, one.key) for one in workers for region in one.regions)
    at = np.searchsorted([address for address, _ in regions], addresses, side="right") - 1
    return [regions[max(number, 0)][1] for number in at.tolist()]


class ConnectorContract:
    """The tests of a connector. Subclass it, and define :meth:`copies`."""

    order: str = "LBKNHD"
    """The order of the engine's cache, as :class:`Side` has it."""

    latents: str = "LBND"
    """The order of its cache of latents."""

    num_fleets: int = 20
    """How many simulated fleets :meth:`connector` runs in."""

    def copies(self, case: PairCase, source: EngineMemory, destination: EngineMemory) -> Rows:
        """Return what the connector copies from the source's ranks to the destination's.

        Raises :class:`RefusedError` where it would refuse the engines or the request.
        """
        raise NotImplementedError

    def connector(self, site: Site) -> Connector:
        """Return the connector of an engine in a simulated fleet. Optional."""
        raise SkipTest("no connector for simulated fleets")

    def cases(self) -> Mapping[str, PairCase]:
        """Return the cases by name; a subclass may add its own."""
        return cases(self.order, self.latents)

    def verdict(self, case: PairCase) -> Verdict:
        """Return whether the connector copies a case right."""
        source, destination = case.engines()
        try:
            rows = [*self.copies(case, source, destination)]
        except RefusedError as error:
            return Verdict("refused", str(error))
        report = verified(source, destination, (case.start, case.stop), rows)
        if report:
            return Verdict("right")
        known = f" (as in {case.bug})" if case.bug else ""
        return Verdict("wrong", "\n".join(": ".join(pair) for pair in report.failures) + known)

    def verdicts(self) -> dict[str, Verdict]:
        """Return the verdict of each case."""
        return {name: self.verdict(case) for name, case in self.cases().items()}

    def check(self) -> list[str]:
        """Run all tests without a test runner, and return the names of the cases that are right.

        Raises AssertionError at the first that is wrong.
        """
        names = list[str]()
        for name in self.cases():
            with suppress(SkipTest):
                self.test_case(name)
                names.append(name)
        for test in (self.test_random_cases, self.test_fleets):
            with suppress(SkipTest):
                test()
        return names

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make a test of each case: pytest calls this."""
        if "case_name" in metafunc.fixturenames:
            metafunc.parametrize("case_name", [*self.cases()])

    def test_case(self, case_name: str) -> None:
        """A case is right, or it is refused."""
        self._check(self.cases()[case_name])

    def _check(self, case: PairCase) -> None:
        verdict = self.verdict(case)
        if verdict.word == "refused":
            raise SkipTest(str(verdict))
        if verdict.word == "wrong":
            raise AssertionError(f"{case}\n{verdict.why}")

    def test_random_cases(self) -> None:
        """Other sizes, blocks and prefixes, which Hypothesis draws."""

        @st.composite
        def drawn(draw: st.DrawFn) -> PairCase:
            heads = draw(st.sampled_from([1, 2, 4, 6]))
            each = st.sampled_from([*sides(order=[self.order], heads=[heads], tp=range(1, 9))])
            source, destination = (
                attrs.evolve(draw(each), tokens=draw(st.sampled_from([1, 2, 3, 4])))
                for _ in range(2)
            )
            # whole blocks of both sides
            span = math.lcm(source.tokens, destination.tokens)
            start = draw(st.integers(0, 1))
            return PairCase(source, destination, (start + 1) * span, start * span)

        @settings(max_examples=60, deadline=None, database=None)
        @given(drawn())
        def check(case: PairCase) -> None:
            with suppress(SkipTest):
                self._check(case)

        check()

    def test_fleets(self) -> None:
        """No simulated fleet breaks a rule."""
        simulation = Simulation(self.connector)
        for seed in range(self.num_fleets):
            outcome = simulation.run(Scenario.of(seed))
            if outcome.error:
                trace = shrink(simulation, outcome).trace[-12:]
                raise AssertionError("\n".join([str(outcome), *trace]))
