"""Engines' shapes, and what follows from them: workers, offers and plans, which are made once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Final

import attrs

from kvplan.budget import Budget
from kvplan.describe import Region, Worker
from kvplan.errors import KVPlanError
from kvplan.handshake import encode
from kvplan.models import Model
from kvplan.plan import TransferPlan, plan_reads

SIZES: Final = MappingProxyType(
    {
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "torch_dtype": "bfloat16",
        "vocab_size": 50_000,
    }
)

DRAFT: Final = "draft"
"""The group of layers that draft tokens."""

_ATTENTION: Final = Model.from_config({"model_type": "llama", "num_hidden_layers": 2, **SIZES})
_WINDOWS: Final = Model.from_config(
    {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 10,
        **SIZES,
    }
)
_STATES: Final = Model.from_config(
    {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "*M*M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 2,
        "n_groups": 4,
        "ssm_state_size": 2,
        "conv_kernel": 2,
        **SIZES,
    }
)
_DRAFTING: Final = attrs.evolve(
    _ATTENTION, layers=(tuple(attrs.evolve(each, group=DRAFT) for each in _ATTENTION.layers[0]),)
)

MODELS: Final = MappingProxyType(
    {
        "attention": _ATTENTION,
        "windows": _WINDOWS,
        "states": _STATES,
        "hybrid": attrs.evolve(
            _STATES, name="hybrid", layers=(*_STATES.layers[:2], _WINDOWS.layers[1]) * 2
        ),
        "drafts": _ATTENTION.with_draft(_DRAFTING),
    }
)
"""Models of fleets: with full attention, with a window beside it, with a recurrent state, with both
of these, and with a layer that drafts tokens.

They are small, since bytes differ by their labels and not by their number. Each of two pipeline
stages has layers of all kinds, but for drafts, which engines with stages refuse."""

STATE_WINDOW: Final = 2
"""A token needs the state after the token before it."""

MAX_TOKENS: Final = 248
"""Positions for which an engine has memory. It may use fewer blocks than there are."""

STAGING: Final = "staging"
"""The staging region of each worker, which a connector may use."""

STAGING_BYTES: Final = 1 << 11
"""The length of a staging region: a request takes several chunks."""

STAGING_ADDRESS: Final = 1 << 50


NULL_BLOCK: Final = 0
"""The block that stands where a request has none, as in vLLM."""


@attrs.frozen
class GroupShape:
    """A group of a cache: the positions of a block, and how many of them a token needs.

    These are the last ones of a ``window``, the token's own among them. Of a recurrent state, a
    token needs what it was after the token before: a window of two. A block has the state after
    the last position that it has passed. The group may be that of one pipeline ``stage``. What
    drafts cache at a position is also of the next ``num_ahead`` tokens.
    """

    name: str
    tokens_per_block: int
    window: int | None = None
    is_state: bool = False
    stage: int = 0
    num_ahead: int = 0

    def first_needed(self, num_computed: int) -> int:
        """Return the first position that is needed to go on after so many."""
        return 0 if self.window is None else max(0, num_computed - self.window + 1)

    def first_written(self, start: int, stop: int) -> int:
        """Return the first of some positions that stay when the last one is computed."""
        return stop - 1 if self.is_state else start


@attrs.frozen
class Stages:
    """The pipeline stages of an engine, which may have block tables of their own, as SGLang's do.

    Then each has cache groups of its own, whose names end with the stage.
    """

    number: int = 1
    has_own_tables: bool = False

    def group_name(self, name: str, stage: int) -> str:
        """Return the name of a model's group in a stage."""
        return f"{name}.pp{stage}" if self.has_own_tables else name


NO_STAGES: Final = Stages()


@attrs.frozen
class Shape:
    """How an engine divides and stores the cache of a model."""

    tp: int = 1
    tokens_per_block: int = 4
    layout: str = "LBHNC"
    stages: Stages = NO_STAGES
    model: Model = attrs.field(default=MODELS["attention"], repr=False)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in memory, the null block among them."""
        return 1 + MAX_TOKENS // self.tokens_per_block

    @property
    def groups(self) -> tuple[GroupShape, ...]:
        """Return the groups of the cache, whose blocks have equally many positions."""
        windows = self.model.windows
        num_tables = self.stages.number if self.stages.has_own_tables else 1
        groups = []
        for stage, key in product(range(num_tables), self.model.groups):
            name = self.stages.group_name(key, stage)
            is_state = key not in windows
            window = STATE_WINDOW if is_state else windows[key]
            shape = GroupShape(name, self.tokens_per_block, window, is_state, stage)
            groups.append(attrs.evolve(shape, num_ahead=int(key == DRAFT)))
        return tuple(groups)

    def workers(self, name: str) -> tuple[Worker, ...]:
        """Return the workers of an engine of this shape, each with a staging region."""
        workers = self.model.engine(
            name,
            tp=self.tp,
            pp=self.stages.number,
            tokens_per_block=self.tokens_per_block,
            layout=self.layout,
            num_blocks=self.num_blocks,
        )
        # ranks of tensor parallelism are consecutive
        ranks = product(range(self.stages.number), range(self.tp))
        return tuple(
            self._equip(worker, stage) for worker, (stage, _) in zip(workers, ranks, strict=True)
        )

    def _equip(self, worker: Worker, stage: int) -> Worker:
        """Return a worker with a staging region, and with its stage's groups."""
        staging = Region(STAGING, STAGING_ADDRESS, STAGING_BYTES)
        name_of = partial(self.stages.group_name, stage=stage)
        return attrs.evolve(
            worker,
            regions=(*worker.regions, staging),
            groups=[attrs.evolve(group, name=name_of(group.name)) for group in worker.groups],
            views=[attrs.evolve(view, group=name_of(view.group)) for view in worker.views],
        )


SHAPES: Final = (
    Shape(),
    Shape(tp=2, tokens_per_block=3, layout="LBNHC"),
    Shape(tokens_per_block=6, layout="BLHNC"),
    Shape(tp=4),
    Shape(tp=2, tokens_per_block=8, layout="LBNHC"),
    Shape(tokens_per_block=2),
    Shape(tp=4, tokens_per_block=3, layout="BLHNC"),
    Shape(tokens_per_block=8),
)
"""Unequal shapes: parallel sizes, block sizes and layouts."""


class Catalog:
    """The workers, offers and plans of engines that have been seen, of which most come again."""

    def __init__(self) -> None:
        self._workers: dict[tuple[str, Shape], tuple[Worker, ...]] = {}
        self._offers: dict[int, bytes] = {}
        self._by_offer: dict[bytes, Worker] = {}
        self._plans: dict[tuple[int, ...], TransferPlan] = {}

    def workers(self, name: str, shape: Shape) -> tuple[Worker, ...]:
        """Return the workers of an engine: the same objects for the same name and shape."""
        if (name, shape) not in self._workers:
            self._workers[name, shape] = shape.workers(name)
        return self._workers[name, shape]

    def offer(self, worker: Worker) -> bytes:
        """Return the offer of a worker that is in the catalog."""
        # a worker of the catalog stays, so its identity is a key
        if id(worker) not in self._offers:
            offer = encode(worker)
            self._offers[id(worker)] = offer
            self._by_offer[offer] = worker
        return self._offers[id(worker)]

    def open(self, offer: bytes) -> Worker:
        """Return the worker in an offer. Raises ``MESSAGE`` if the catalog has not made it."""
        if offer not in self._by_offer:
            expected, got = "that of a worker", "one that somebody has garbled"
            raise KVPlanError("MESSAGE", "read an offer", expected=expected, got=got)
        return self._by_offer[offer]

    def plan(
        self, local: Worker, remotes: Sequence[Worker], *, budget: Budget | None = None
    ) -> TransferPlan:
        """Return the plan by which a worker of the catalog reads from others."""
        key = (id(local), *map(id, remotes))
        if key not in self._plans:
            self._plans[key] = plan_reads(local, remotes, budget=budget)
        return self._plans[key]
