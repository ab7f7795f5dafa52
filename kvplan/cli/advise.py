"""The ``advise`` command: which layout, kv form or block size needs fewer descriptors.

It plans each change of one engine, and each change that both engines can make together. The figures
are the costs of these plans.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import click

from kvplan._text import size
from kvplan.cli.console import echo_json, print_lines, progress_bar
from kvplan.cli.defaults import AUTO
from kvplan.cli.engines import lines, reasons, reasons_by_side
from kvplan.cli.model_files import MAX_TOKENS, model_only, read_decimal
from kvplan.cli.options import EngineCommand, EngineOptions, Engines, engine_options, json_option
from kvplan.cli.trials import destination_drafts
from kvplan.describe import Worker
from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.models.layouts import CONV_ORDERS, KV_FORMS, ORDERS
from kvplan.plan import Cost, plan_mesh

BLOCK_SIZES: Final = (16, 32, 64, 128)
"""The block sizes that are tried, beside that of the opposite engine."""

MAX_SINGLE_CHANGES: Final = 9
"""At most this many changes of one engine are printed."""

BY_COST: Final = operator.attrgetter("descriptors", "rows")

Changes = dict[str, str]
"""At most one change of each engine, such as ``{"src": "layout=BLHNC"}``."""


@attrs.frozen
class Suggestion:
    """The cost of a request with some changes; others of that engine have the ``same_cost``.

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
        """Return the suggestion of changes with a known cost."""
        lengths = cost.lengths
        # of lengths that move equally many bytes, the longest counts
        usual = max(lengths, key=lambda length: (length * lengths[length], length), default=0)
        return cls(changes, (), cost.num_descriptors, cost.num_ids, cost.num_rows, usual, lengths)

    def __str__(self) -> str:
        # the values of each key, by engine: "src layout=BLHNC/LBHNC or block=64"
        values_by_engine: dict[str, dict[str, list[str]]] = {}
        for changes in (self.changes, *self.same_cost):
            for engine_id, change in changes.items():
                key, _, value = change.partition("=")
                values_by_key = values_by_engine.setdefault(engine_id, {})
                values_by_key.setdefault(key, []).append(value)
        texts = list[str]()
        for engine_id, values_by_key in values_by_engine.items():
            alternatives = [f"{key}={'/'.join(values)}" for key, values in values_by_key.items()]
            texts.append(f"{engine_id} {' or '.join(alternatives)}")
        return " and ".join(texts) or "no change"


@attrs.frozen
class Advice:
    """The cost of a request of ``bytes`` as it is ``now`` and with changes, cheapest first.

    ``refused`` has the ``changes`` that the model or another option rules out, each with the
    ``reason``. ``not_run`` has the changes of a side with which no known engine runs it.
    """

    bytes: int
    now: Suggestion
    options: tuple[Suggestion, ...]
    refused: tuple[Mapping[str, Any], ...]
    not_run: tuple[str, ...]

    @property
    def helpful(self) -> tuple[Suggestion, ...]:
        """The changes that need fewer descriptors than now."""
        descriptors = self.now.descriptors
        return tuple(option for option in self.options if option.descriptors < descriptors)

    def __str__(self) -> str:
        # changes of both engines are few, and always printed
        single = [option for option in self.helpful if len(option.changes) == 1]
        left_out = single[MAX_SINGLE_CHANGES:]
        printed = [option for option in self.helpful if option not in left_out]
        table = [f"{'descriptors':>12}{'fewer':>9}{'size':>13}{'rows':>8}  change"]
        # the engines as they are come last, to compare with
        for option in (*printed, self.now):
            fewer = f"{self.now.descriptors / max(option.descriptors, 1):,.4g}x"
            usual = size(option.usual_bytes)
            figures = f"{option.descriptors:>12,}{fewer:>9}{usual:>13}{option.rows:>8,}"
            table.append(f"{figures}  {option}")
        if not printed:
            table.append(f"No change helps ({len(self.options)} tried).")
        return "\n".join(table)


def advise(model: Model, src: EngineOptions, dst: EngineOptions, tokens: int) -> Advice:
    """Return the advice for a request of ``tokens`` positions.

    Raises what planning without a change raises.

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
        tracked = bar.track(search.changes(), description="advise")
        suggestions = [Suggestion.of(changes, search.cost(changes)) for changes in tracked]
    single = [suggestion for suggestion in suggestions if len(suggestion.changes) == 1]
    of_both = [suggestion for suggestion in suggestions if len(suggestion.changes) == 2]
    options = sorted(_merged(single), key=BY_COST)
    # of the changes of both engines, only the best counts, and only if it is the best of all
    best = min(of_both, key=BY_COST, default=None)
    if best is not None and best.descriptors < options[0].descriptors:
        options.insert(0, best)
    # all of them are compared with the engines as they are
    now = Suggestion.of({}, cost)
    return Advice(cost.num_bytes, now, tuple(options), tuple(search.refused), tuple(search.not_run))


def _merged(suggestions: Iterable[Suggestion]) -> Iterator[Suggestion]:
    """Yield one suggestion for all changes of one engine that cost the same."""
    equal: dict[Any, list[Suggestion]] = {}
    for suggestion in suggestions:
        figures = (*suggestion.changes, suggestion.rows, *suggestion.lengths.items())
        equal.setdefault(figures, []).append(suggestion)
    for first, *rest in equal.values():
        yield attrs.evolve(first, same_cost=tuple(suggestion.changes for suggestion in rest))


class _Search:
    """Both engines, as they are and with each change, and what a request costs between them."""

    def __init__(self, model: Model, src: EngineOptions, dst: EngineOptions, tokens: int) -> None:
        self.model = model
        self.tokens = tokens
        self.refused: list[Mapping[str, Any]] = []
        self.not_run: list[str] = []
        # by engine, the workers with each change, "" for none
        self.engines = {
            "src": self._engines("src", src, dst),
            "dst": self._engines("dst", dst, src),
        }

    def _engines(
        self,
        engine_id: str,
        options: EngineOptions,
        opposite: EngineOptions,
    ) -> dict[str, tuple[Worker, ...]]:
        """Return the workers of an engine by its change, and note what is refused or not run."""
        engines = {"": options.engine(self.model, engine_id)}
        for change, changed in changed_options(self.model, options, opposite).items():
            try:
                workers = changed.engine(self.model, engine_id)
            except KVPlanError as error:
                self.refused.append({"changes": {engine_id: change}, "reason": str(error)})
                continue
            # a change without effect, or the effect of another one, is tried once
            if workers in engines.values():
                continue
            engines[change] = workers
            if all(reasons(self.model, changed).values()):
                self.not_run.append(f"{engine_id} {change}")
        return engines

    def changes(self) -> list[Changes]:
        """Return each change of one engine, then each change that both engines can make."""
        changes = list[Changes]()
        for engine_id, engines in self.engines.items():
            changes += [{engine_id: change} for change in engines if change]
        src, dst = self.engines.values()
        changes += [{"src": change, "dst": change} for change in src if change and change in dst]
        return changes

    def cost(self, changes: Changes) -> Cost:
        """Return the cost with some changes."""
        sources = self.engines["src"][changes.get("src", "")]
        destinations = self.engines["dst"][changes.get("dst", "")]
        drafts = destination_drafts(destinations, sources)
        return plan_mesh(destinations, sources, not_transferred=drafts).cost(self.tokens)


def changed_options(
    model: Model,
    options: EngineOptions,
    opposite: EngineOptions,
) -> dict[str, EngineOptions]:
    """Return the options with each change that makes sense for a model, by the change.

    >>> deepseek = Model.shipped("deepseek-v3")
    >>> [*changed_options(deepseek, EngineOptions(), EngineOptions(block=48))][4:]
    ['layout=BHLNC', 'block=32', 'block=64', 'block=128', 'block=48']
    """
    # only changes of axes that the tensors have make sense
    axes = set[str]()
    for tensor in model.tensors:
        axes.update(axis for axis, _ in tensor.axes)
    values: dict[str, Sequence[Any]] = {"layout": ORDERS}
    if "kv" in axes:
        values["kv"] = KV_FORMS
    if "step" in axes:
        values["conv"] = CONV_ORDERS
    if any(tensor.paged for tensor in model.tensors):
        values["block"] = list(dict.fromkeys((*BLOCK_SIZES, opposite.block)))
    changed = {}
    for key, alternatives in values.items():
        for value in alternatives:
            if value != getattr(options, key):
                change = f"{key}={AUTO if value is None else value}"
                changed[change] = attrs.evolve(options, **{key: value})
    return changed


@click.command("advise", cls=EngineCommand)
@engine_options
@click.option(
    "--tokens",
    default="1000",
    show_default=True,
    callback=lambda context, option, text: read_decimal(text, "--tokens", 1, MAX_TOKENS + 1),
    help="How many positions the request has.",
)
@json_option
def advise_command(engines: Engines, tokens: int, as_json: bool) -> int:
    """Find changes that move a request in fewer descriptors.

    Plans other layouts, kv forms, block sizes and convolution orders, first on one engine, then the
    same one on both. Blocks are assumed to be scattered. A line has the descriptors of all workers,
    how many times fewer they are than without the change, the size of those that move most of the
    bytes, and the rows that are registered.

    \b
    kvplan advise llama-3.1-8b --src tp=4,layout=LBNHC --dst tp=2,block=64
    """
    model = model_only(engines.model, engines.name)
    advice = advise(model, engines.src, engines.dst, tokens)
    sides = reasons_by_side(engines)
    if as_json:
        figures = {"tokens": tokens, **attrs.asdict(advice), "not_run_because": sides}
        echo_json(engines.to_json() | figures)
        return 0
    print_lines(engines.assumed_lines())
    click.echo(f"{engines}, {tokens} tokens in scattered blocks")
    print_lines(engines.cache_lines())
    click.echo(advice)
    printed = [*lines(sides)]
    # printed suggestions that no engine runs have a line of their own
    helpful = set[str]()
    for option in advice.helpful:
        helpful.update(f"{engine_id} {change}" for engine_id, change in option.changes.items())
    unknown = [change for change in advice.not_run if change in helpful]
    if unknown:
        printed.append(f"no engine here runs {', '.join(unknown)}")
    print_lines(printed)
    return 0
