"""The ``advise`` command: settings of two engines with which a request moves in fewer descriptors.

Every setting is tried: the request moves in fake memory, and each byte is checked. Wrong bytes are
a defect of the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import click

from kvplan.cli.caches import cache_lines
from kvplan.cli.console import echo_json, progress
from kvplan.cli.options import (
    EngineCommand,
    Engines,
    assumed_lines,
    engine_options,
    json_option,
)
from kvplan.cli.trials import PlacedRequest, Trial, described, lengths_of
from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.models.engines import reasons
from kvplan.models.layouts import CONV_ORDERS, KV, KV_FORMS, ORDERS, STEP
from kvplan.models.options import EngineOptions

TOKENS: Final = (5, 150)
"""The positions that move: they start and stop inside blocks."""

BLOCK_SIZES: Final = (16, 32, 64, 128)
"""The block sizes that are tried, and that of the opposite engine."""

NO_CHANGE: Final = "no change"


@attrs.frozen(eq=False)
class Result:
    """What a change of one engine or of both moves.

    ``unsupported`` has the reasons why engines do not support ``src`` or ``dst``.
    """

    change: str
    src: EngineOptions
    dst: EngineOptions
    trial: Trial
    unsupported: Mapping[str, Mapping[str, list[str]]]

    @classmethod
    def of(cls, model: Model, change: str, src: EngineOptions, dst: EngineOptions) -> Result:
        """Move a request. Raises the refusal of the pair."""
        trial = Trial.of(PlacedRequest.of(model, src, dst, TOKENS))
        unsupported = {"src": reasons(model, src), "dst": reasons(model, dst)}
        return cls(change, src, dst, trial, unsupported)

    def __str__(self) -> str:
        if self.trial.report.ok:
            return f"verified: {described(self.trial.pairs)}"
        # the table has one line for each result
        failure = ": ".join(self.trial.report.failures[0])
        return f"wrong, {' '.join(failure.splitlines())}"

    @property
    def num_descriptors(self) -> int:
        """The descriptors of the request."""
        return self.trial.report.num_descriptors

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the lengths of the shortest and the longest descriptor."""
        lengths = lengths_of(self.trial.pairs)
        return {
            "differs": self.change,
            "src": str(self.src),
            "dst": str(self.dst),
            "unsupported": self.unsupported,
            "verified": self.trial.report.ok,
            "bytes": self.trial.report.num_bytes,
            "descriptors": self.num_descriptors,
            "lengths": lengths[:1] + lengths[-1:],
        }


def changed_options(
    model: Model, options: EngineOptions, opposite: EngineOptions, engine: str | None = None
) -> dict[str, EngineOptions]:
    """Return the options with each change that makes sense for a model, by the change.

    A named ``engine`` must support it as well as it supports the options without the change.

    >>> deepseek = Model.shipped("deepseek-v3")
    >>> [*changed_options(deepseek, EngineOptions(), EngineOptions(block=48))][4:]
    ['layout=BHLNC', 'block=32', 'block=64', 'block=128', 'block=48']
    """
    # only changes of axes that the tensors have make sense
    axes = {axis for tensor in model.tensors for axis, _ in tensor.axes}
    values: dict[str, Sequence[Any]] = {"layout": ORDERS}
    if KV in axes:
        values["kv"] = KV_FORMS
    if STEP in axes:
        values["conv"] = CONV_ORDERS
    if any(tensor.paged for tensor in model.tensors):
        values["block"] = list(dict.fromkeys((*BLOCK_SIZES, opposite.block)))
    now = reasons(model, options)
    changed = {}
    for key, alternatives in values.items():
        for value in alternatives:
            evolved = attrs.evolve(options, **{key: value})
            same = value == getattr(options, key)
            if same or (engine and {*reasons(model, evolved)[engine]} - {*now[engine]}):
                continue
            changed[f"{key}={'auto' if value is None else value}"] = evolved
    return changed


def changes(engines: Engines) -> dict[str, tuple[EngineOptions, EngineOptions]]:
    """Return the engines as they are, with each change of one, and with each change of both."""
    model, src, dst = engines.model, engines.src, engines.dst
    of_src = changed_options(model, src, dst, engines.named.get("src"))
    of_dst = changed_options(model, dst, src, engines.named.get("dst"))
    pairs = {NO_CHANGE: (src, dst)}
    pairs |= {f"src {change}": (options, dst) for change, options in of_src.items()}
    pairs |= {f"dst {change}": (src, options) for change, options in of_dst.items()}
    for change in of_src.keys() & of_dst.keys():
        pairs[f"both {change}"] = (of_src[change], of_dst[change])
    return pairs


def advice(engines: Engines) -> list[Result]:
    """Return what needs fewer descriptors, fewest first, and at the end the engines as they are.

    Raises the refusal of the engines as they are; changes that are refused are left out.
    """
    results = []
    for change, sides in progress(changes(engines).items(), "advise"):
        try:
            results.append(Result.of(engines.model, change, *sides))
        except KVPlanError:
            if change == NO_CHANGE:
                raise
    now, *others = results
    # of verified changes with the same figures, that of one engine or the first says enough
    fewer: dict[tuple[bool, int, tuple[int, ...]], Result] = {}
    for each in sorted(
        others, key=lambda each: (each.change.startswith("both"), each.num_descriptors, each.change)
    ):
        ok = each.trial.report.ok
        if not ok or each.num_descriptors < now.num_descriptors:
            figures = ok, each.num_descriptors, (*lengths_of(each.trial.pairs),)
            fewer.setdefault(figures, each)
    return [*sorted(fewer.values(), key=lambda each: each.num_descriptors), now]


def markdown(results: Iterable[Result]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| differs in | source | destination | supported by | result |"
    yield "|---|---|---|---|---|"
    for each in results:
        # engines that support both sides are named once
        supported = " -> ".join(dict.fromkeys(map(supporting, each.unsupported.values())))
        text = str(each).replace("|", "\\|")
        yield f"| {each.change} | {each.src} | {each.dst} | {supported} | {text} |"


def supporting(by_engine: Mapping[str, list[str]]) -> str:
    """Return the engines that support a side, from the reasons against it.

    >>> options = EngineOptions(layout="LBNHC", kv="split")
    >>> supporting(reasons(Model.shipped("llama-3.1-8b"), options))
    'SGLang 0.5.23'
    """
    return ", ".join(engine for engine, found in by_engine.items() if not found) or "none"


@click.command("advise", cls=EngineCommand)
@engine_options
@json_option
def advise_command(engines: Engines, as_json: bool) -> int:
    """Find settings that move a cache in fewer descriptors.

    Other layouts, block sizes, kv forms and convolution orders of one engine or of both, as far as
    the engines that are named support them. All layers move, and every byte is checked. The table
    is Markdown, with the fewest descriptors first, and the engines as they are at the end.

    \b
    kvplan advise llama-3.1-8b --src vllm,tp=4 --dst sglang,tp=2

    Exit status: 0 every line verified, 1 bytes differ, 2 refused.
    """
    results = advice(engines)
    if as_json:
        cells = [result.to_json() for result in results]
        echo_json({"model": engines.name, "tokens": list(TOKENS), "cells": cells})
    else:
        start, stop = TOKENS
        read = [*assumed_lines(engines.name, engines.model, engines.like), *engines.read_lines()]
        # blank lines and dashes make the heading Markdown, too
        for line in (
            *(text for text in read for text in (text, "")),
            f"{engines.name}, positions [{start}, {stop}):",
            "",
            *(f"- {line.strip()}" for line in cache_lines(engines.model)),
            "",
            *markdown(results),
        ):
            click.echo(line)
        if len(results) == 1:
            click.echo("\nNo change of layout, kv, conv or block needs fewer descriptors.")
    return 0 if all(result.trial.report.ok for result in results) else 1
