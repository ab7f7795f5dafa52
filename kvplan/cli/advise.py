"""The ``advise`` command: which layout, kv form or block size, on either engine, needs fewer descriptors.

Each change of one engine is planned by itself; its figures are the cost of that plan. Then pairs of changes are tried,
one on each engine: pairs of the same key, such as two layouts, and pairs with the best single change. For speed, a pair
is weighed by one destination worker per pipeline stage; only the best pair is planned as a whole.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import click
from rich.progress import Progress

from kvplan._text import size
from kvplan.cli.engines import lines, reasons
from kvplan.cli.options import (
    AUTO,
    MAX_TOKENS,
    EngineCommand,
    EngineOptions,
    Engines,
    decimal,
    echo_json,
    engine_options,
    json_option,
    model_only,
    print_lines,
    progress_bar,
)
from kvplan.cli.trials import destination_drafts
from kvplan.describe import Worker
from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.models.layouts import CONV_ORDERS, KV_FORMS, ORDERS
from kvplan.plan import Cost, plan_mesh

BLOCK_SIZES: Final = (16, 32, 64, 128)
"""The block sizes that are tried, and that of the other engine."""

SHOWN: Final = 9
"""At most this many changes of one engine are printed."""

BY_COST: Final = operator.attrgetter("descriptors", "rows")

Changes = dict[str, str]
"""At most one change of each engine, such as ``{"src": "layout=BLHNC"}``."""


@attrs.frozen
class Suggestion:
    """The cost of a request with some changes; ``same_cost`` has other changes of that engine that cost as much.

    ``lengths`` counts descriptors by their length. Those of ``usual_bytes`` move most of the bytes.
    """

    changes: Changes
    same_cost: tuple[Changes, ...]
    descriptors: int
    ids: int
    rows: int
    usual_bytes: int
    lengths: Mapping[int, int]

    @classmethod
    def of(cls, changes: Changes, cost: Cost) -> Suggestion:
        """The suggestion of changes with a known cost."""
        lengths = cost.lengths
        usual = max(lengths, key=lambda length: (length * lengths[length], length), default=0)
        return cls(changes, (), cost.num_descriptors, cost.num_ids, cost.num_rows, usual, lengths)

    def __str__(self) -> str:
        by_engine: dict[str, dict[str, list[str]]] = {}
        for name, change in (
            item for changes in (self.changes, *self.same_cost) for item in changes.items()
        ):
            key, _, value = change.partition("=")
            by_engine.setdefault(name, {}).setdefault(key, []).append(value)
        texts = [
            f"{name} " + " or ".join(f"{key}={'/'.join(values)}" for key, values in keys.items())
            for name, keys in by_engine.items()
        ]
        return " and ".join(texts) or "no change"


@attrs.frozen
class Advice:
    """The cost of a request of ``bytes`` as it is ``now`` and with each change, fewest descriptors first.

    ``refused`` has the ``changes`` that the model or another option rules out, each with the ``reason``.
    ``not_run`` has the changes of a side with which no known engine runs it.
    """

    bytes: int
    now: Suggestion
    options: tuple[Suggestion, ...]
    refused: tuple[Mapping[str, Any], ...]
    not_run: tuple[str, ...]

    @property
    def helpful(self) -> tuple[Suggestion, ...]:
        """The changes that need fewer descriptors than now."""
        return tuple(each for each in self.options if each.descriptors < self.now.descriptors)

    def __str__(self) -> str:
        single = [each for each in self.helpful if len(each.changes) == 1]
        table = [f"{'descriptors':>12}{'fewer':>9}{'size':>13}{'rows':>8}  change"]
        for each in (*(each for each in self.helpful if each not in single[SHOWN:]), self.now):
            fewer = f"{self.now.descriptors / max(each.descriptors, 1):,.4g}x"
            table.append(
                f"{each.descriptors:>12,}{fewer:>9}{size(each.usual_bytes):>13}{each.rows:>8,}  {each}"
            )
        return "\n".join(
            table if self.helpful else [*table, f"No change helps ({len(self.options)} tried)."]
        )


def advise(model: Model, src: EngineOptions, dst: EngineOptions, tokens: int) -> Advice:
    """The advice for a request of ``tokens`` positions. Raises what planning without a change raises.

    >>> src, dst = EngineOptions(layout="BLNHC"), EngineOptions(layout="BLHNC")
    >>> print(advise(Model.shipped("llama-3.2-1b"), src, dst, 1000))
     descriptors    fewer         size    rows  change
              78   1,629x      512 KiB       4  dst layout=BLNHC
             190   668.8x      512 KiB       4  src layout=BLHNC
           1,008   126.1x       32 KiB      34  dst layout=LBNHC
           1,120   113.5x       32 KiB      34  src layout=LBHNC
           8,064   15.76x   4096 bytes       4  src layout=BHLNC
           8,064   15.76x   4096 bytes      34  src layout=LHBNC
         127,070       1x    256 bytes       2  no change
    """
    search = _Search(model, src, dst, tokens)
    cost = search.cost({})
    with progress_bar() as bar:
        options = sorted(search.single(bar), key=BY_COST)
        pair = search.best_pair(options[0], bar) if options else None
    if pair is not None and pair.descriptors < options[0].descriptors:
        options.insert(0, pair)
    now = Suggestion.of({}, cost)
    return Advice(cost.num_bytes, now, tuple(options), tuple(search.refused), tuple(search.not_run))


class _Search:
    """Both engines, as they are and with each change, and what a request costs between them."""

    def __init__(self, model: Model, src: EngineOptions, dst: EngineOptions, tokens: int) -> None:
        self.tokens = tokens
        self.refused: list[Mapping[str, Any]] = []
        self.not_run: list[str] = []
        self.engines: dict[str, dict[str, tuple[Worker, ...]]] = {}
        for name, options, other in (("src", src, dst), ("dst", dst, src)):
            found = self.engines[name] = {"": options.engine(model, name)}
            for change, changed in changes(model, options, other):
                try:
                    engine = changed.engine(model, name)
                except KVPlanError as error:
                    self.refused.append({"changes": {name: change}, "reason": str(error)})
                else:
                    if engine not in found.values():
                        found[change] = engine
                        self.not_run += (
                            [f"{name} {change}"] if all(reasons(model, changed).values()) else []
                        )

    def cost(self, changed: Changes, sampled: bool = False) -> Cost:
        """The cost with some changes; ``sampled`` counts one destination worker of each pipeline stage."""
        src, dst = (self.engines[name][changed.get(name, "")] for name in ("src", "dst"))
        destinations = (
            tuple({tuple(worker.tensors): worker for worker in dst}.values()) if sampled else dst
        )
        return plan_mesh(destinations, src, not_transferred=destination_drafts(dst, src)).cost(
            self.tokens
        )

    def single(self, bar: Progress) -> Iterator[Suggestion]:
        """One suggestion for all changes of one engine that cost the same."""
        every = [
            {name: change} for name, engines in self.engines.items() for change in engines if change
        ]
        same_cost: dict[Any, list[Suggestion]] = {}
        for changed in bar.track(every, description="advise"):
            found = Suggestion.of(changed, self.cost(changed))
            same_cost.setdefault((*changed, found.rows, *found.lengths.items()), []).append(found)
        for first, *others in same_cost.values():
            yield attrs.evolve(first, same_cost=tuple(other.changes for other in others))

    def best_pair(self, single: Suggestion, bar: Progress) -> Suggestion | None:
        """The pair of changes that costs least, if there is any; ``single`` is the best change of one engine."""
        every = []
        for src, dst in itertools.product(
            *(filter(None, engines) for engines in self.engines.values())
        ):
            changed = {"src": src, "dst": dst}
            same_key = src.partition("=")[0] == dst.partition("=")[0]
            if same_key or single.changes.items() <= changed.items():
                every.append(changed)
        sampled = [
            Suggestion.of(each, self.cost(each, sampled=True))
            for each in bar.track(every, description="pairs")
        ]
        best = min(sampled, key=BY_COST, default=None)
        return best and Suggestion.of(best.changes, self.cost(best.changes))


def changes(
    model: Model, options: EngineOptions, other: EngineOptions
) -> Iterator[tuple[str, EngineOptions]]:
    """The changes that make sense for a model, and the options with each.

    >>> found = changes(Model.shipped("deepseek-v3"), EngineOptions(), EngineOptions(block=48))
    >>> [change for change, _ in found][4:]
    ['layout=BHLNC', 'block=32', 'block=64', 'block=128', 'block=48']
    """
    tensors = model.tensors
    axes = {axis for tensor in tensors for axis, _ in tensor.axes}
    values: dict[str, Sequence[Any]] = {
        "layout": ORDERS,
        "kv": KV_FORMS if "kv" in axes else (),
        "conv": CONV_ORDERS if "step" in axes else (),
        "block": [*dict.fromkeys((*BLOCK_SIZES, other.block))]
        if any(tensor.paged for tensor in tensors)
        else [],
    }
    for key, value in ((key, value) for key, several in values.items() for value in several):
        if value != getattr(options, key):
            yield f"{key}={AUTO if value is None else value}", attrs.evolve(options, **{key: value})


@click.command("advise", cls=EngineCommand)
@engine_options
@click.option(
    "--tokens",
    default="1000",
    show_default=True,
    callback=lambda context, option, text: decimal(text, "--tokens", 1, MAX_TOKENS + 1),
    help="How many positions the request has.",
)
@json_option
def advise_command(given: Engines, tokens: int, as_json: bool) -> int:
    """Find changes that move a request in fewer descriptors.

    Plans other layouts, kv forms, block sizes and convolution orders, first on one engine, then on both. Blocks are
    assumed to be scattered. A line has the descriptors of all workers, how many times fewer they are than without the
    change, the size of those that move most of the bytes, and the rows that are registered.

    \b
    kvplan advise llama-3.1-8b --src tp=4,layout=LBNHC --dst tp=2,block=64
    """
    model, src, dst = model_only(given.model, given.name), given.src, given.dst
    advice, sides = (
        advise(model, src, dst, tokens),
        {"src": reasons(model, src), "dst": reasons(model, dst)},
    )
    if as_json:
        echo_json(
            given.to_json() | {"tokens": tokens, **attrs.asdict(advice), "not_run_because": sides}
        )
    else:
        click.echo(f"{given}, {tokens} tokens in scattered blocks")
        click.echo(advice)
        helpful = {
            f"{name} {change}" for each in advice.helpful for name, change in each.changes.items()
        }
        unknown = [change for change in advice.not_run if change in helpful]
        print_lines(
            [*lines(sides), *([f"no engine here runs {', '.join(unknown)}"] if unknown else [])]
        )
    return 0
