"""Scenarios: the engines of a fleet, the requests that come, and what goes wrong, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cached_property
from typing import Final

import attrs

from kvplan.describe import Worker
from kvplan.models import Model
from kvplan.testing.simulation.fabric import Trouble
from kvplan.testing.simulation.memory import LabelledMemory, Numbers
from kvplan.testing.simulation.network import Disturbance

MODEL: Final = Model.from_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "torch_dtype": "bfloat16",
        "vocab_size": 50_000,
    }
)
"""The model of all engines: small, since bytes differ by their labels and not by their number."""

HEALED_S: Final = 60.0
"""Seconds after which nothing goes wrong any more."""

MAX_TOKENS: Final = 40
"""Tokens of a prompt."""

MAX_ANSWER: Final = 8
"""Tokens of an answer."""


@attrs.frozen
class Shape:
    """The shape of an engine: how it divides and stores the cache, and how fast its clock runs."""

    name: str
    tp: int = 1
    tokens_per_block: int = 4
    layout: str = "LBHNC"
    num_blocks: int = 40
    rate: float = 1.0

    def workers(self) -> tuple[Worker, ...]:
        """Return the workers of an engine of this shape."""
        return MODEL.engine(
            self.name,
            tp=self.tp,
            tokens_per_block=self.tokens_per_block,
            layout=self.layout,
            num_blocks=self.num_blocks,
        )


@attrs.frozen
class Visit:
    """A computed request at an engine that reads it, ``delay_s`` after prefill has answered.

    Its client aborts it ``patience_s`` after that.
    """

    engine: str
    delay_s: float = 0.01
    patience_s: float | None = None


@attrs.frozen
class Arrival:
    """A request that comes to a prefill engine, and then to those that read it.

    Its client aborts prefill after ``patience_s``.
    """

    at: float
    name: str
    tokens: tuple[int, ...]
    num_answer: int
    prefill: str
    visits: tuple[Visit, ...]
    patience_s: float | None = None


@attrs.frozen
class Death:
    """An engine dies with its memory; another start of it begins, if at all, after a while."""

    at: float
    engine: str
    restarts_at: float | None


@attrs.frozen
class Freeze:
    """A host does nothing between two times. Its memory can be read."""

    at: float
    engine: str
    ends_at: float


Incident = Arrival | Death | Freeze | Disturbance | Trouble
"""Something that a scenario may do without: a failure is shrunk by leaving incidents out."""


@attrs.frozen
class Scenario:
    """The engines of a fleet and all that happens to them. The seed decides when, and in which order."""

    seed: int
    shapes: tuple[Shape, ...]
    incidents: tuple[Incident, ...]

    @classmethod
    def of(cls, seed: int) -> Scenario:
        """Draw a scenario."""
        return _Draw(seed).scenario()

    def __str__(self) -> str:
        lines = [f"seed {self.seed}", *map(str, self.shapes)]
        lines += map(str, sorted(self.incidents, key=_begin_of))
        return "\n".join(lines)


def _begin_of(incident: Incident) -> float:
    if isinstance(incident, Disturbance | Trouble):
        return incident.begins_at
    return incident.at


class _Draw:
    """Draws the parts of a scenario."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(f"{seed} scenario")

    def scenario(self) -> Scenario:
        """Draw engines, requests and incidents."""
        draw = self._random
        prefills = [self._shape(f"prefill-{number}") for number in range(draw.choice((1, 1, 2)))]
        decodes = [self._shape(f"decode-{number}") for number in range(draw.choice((1, 1, 2, 3)))]
        shapes = (*prefills, *decodes)
        incidents = list[Incident]()
        families = [self._tokens(MAX_TOKENS) for _ in range(3)]
        for number in range(draw.randint(3, 10)):
            incidents.append(self._arrival(number, families, prefills, decodes))
        names = [shape.name for shape in shapes]
        for _ in range(draw.choice((0, 1, 1, 2, 3, 5))):
            kind = draw.choice((self._death, self._freeze, self._disturbance, self._trouble))
            incidents.append(kind(names))
        return Scenario(self._seed, shapes, tuple(incidents))

    def _shape(self, name: str) -> Shape:
        draw = self._random
        size = draw.choice((2, 3, 4, 6, 8))
        # at least one request has room, and seldom many
        num_tokens = MAX_TOKENS + MAX_ANSWER + size + draw.choice((0, 20, 60, 200))
        return Shape(
            name,
            tp=draw.choice((1, 1, 2, 4)),
            tokens_per_block=size,
            layout=draw.choice(("LBHNC", "LBNHC", "BLHNC")),
            num_blocks=1 + -(-num_tokens // size),
            rate=draw.choice((1.0, 1.0, 0.97, 1.03, 0.5, 2.0)),
        )

    def _tokens(self, number: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(50_000) for _ in range(number))

    def _time(self) -> float:
        """Draw a time at which something happens, often soon."""
        return (HEALED_S - 1) * self._random.random() ** 2

    def _arrival(
        self,
        number: int,
        families: list[tuple[int, ...]],
        prefills: list[Shape],
        decodes: list[Shape],
    ) -> Arrival:
        draw = self._random
        family = draw.choice(families)
        shared = family[: draw.randint(0, len(family))]
        num_own = draw.randint(2 if len(shared) < 2 else 0, MAX_TOKENS - len(shared))
        visits = []
        for _ in range(draw.choice((0, 1, 1, 1, 1, 1, 2, 3))):
            delay_s = draw.choice((0.01, 0.01, 0.01, 0.5, 29.9, 40.0)) * draw.random()
            patience_s = draw.choice((None, None, None, 0.05, 2.0, 20.0))
            patience_s = patience_s and patience_s * draw.random()
            visits.append(Visit(draw.choice(decodes).name, delay_s, patience_s))
        return Arrival(
            self._time(),
            f"request-{number}",
            (*shared, *self._tokens(num_own)),
            draw.randint(1, MAX_ANSWER),
            draw.choice(prefills).name,
            tuple(visits),
            draw.choice((None, None, None, None, 0.01)),
        )

    def _death(self, names: list[str]) -> Death:
        draw = self._random
        at = self._time()
        restarts_at = draw.choice((None, at + 0.1, at + 20 * draw.random()))
        if restarts_at is not None and restarts_at >= HEALED_S:
            restarts_at = None
        return Death(at, draw.choice(names), restarts_at)

    def _freeze(self, names: list[str]) -> Freeze:
        at = self._time()
        return Freeze(at, self._random.choice(names), self._end_after(at))

    def _end_after(self, begins_at: float) -> float:
        """Draw an end: after a moment, a while, or long."""
        scale_s = self._random.choice((0.2, 5.0, 50.0))
        return min(begins_at + scale_s * self._random.random(), HEALED_S)

    def _disturbance(self, names: list[str]) -> Disturbance:
        draw = self._random
        begins_at = self._time()
        ends_at = self._end_after(begins_at)
        source = draw.choice((*names, "*"))
        target = draw.choice((*names, "*"))
        kinds = ("loss", "cut", "duplication", "reset", "delay")
        kind = draw.choice(kinds)
        return Disturbance(
            begins_at,
            ends_at,
            source,
            target,
            loss=1.0 if kind == "cut" else 0.3 * (kind == "loss"),
            duplication=0.5 * (kind == "duplication"),
            reset=0.3 * (kind == "reset"),
            delay_s=draw.choice((0.1, 2.0, 40.0)) if kind in ("delay", "duplication") else 0.0,
        )

    def _trouble(self, names: list[str]) -> Trouble:
        draw = self._random
        begins_at = self._time()
        return Trouble(
            begins_at,
            self._end_after(begins_at),
            draw.choice((*names, "*")),
            chance=draw.choice((0.3, 1.0)),
            delay_s=draw.choice((0.0, 1.0, 20.0, 60.0)),
            breaks=draw.random() < 0.5,
        )
