"""The ``matrix`` command: which differences between two engines a model's cache can move across.

Each line is one mismatch between a source and a destination. A trial decides it: the bytes that
move are verified, or planning refuses the pair with a reason. Wrong bytes are a defect of the
planner. Only a few of the model's layers move, some of each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs
import click

from kvplan.cli.caches import cache_lines
from kvplan.cli.console import echo_json, progress_bar
from kvplan.cli.engines import reasons_of, running_engines
from kvplan.cli.model_files import load, quantize_model
from kvplan.cli.options import EngineOptions, assumed_lines, json_option, model_argument
from kvplan.cli.trials import PlacedRequest, Trial, described, lengths_of, sampled
from kvplan.describe.views import TOKEN
from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.models.layouts import KV

MATRIX_TOKENS: Final = (5, 150)
"""The positions that move: they start and stop inside blocks."""

LAYERS_PER_KIND: Final = 2
MIN_LAYERS: Final = 4
"""The layers that are left of a longer model, so that three pipeline stages are uneven."""

STEP: Final = "step"
GROUPS: Final = "groups"
HYBRID: Final = "hybrid"
"""A mismatch can need an axis (``TOKEN``, ``KV``, ``STEP``) of a model's tensors, several groups,
or attention beside recurrent states."""


@attrs.frozen
class Mismatch:
    """The options of two engines, and what they differ in.

    ``{rest}`` in ``src`` is the number of layers minus one. ``needs`` is what a model must have.
    ``bits``, if given, quantizes K and V.
    """

    differs: str
    src: str
    dst: str
    needs: str | None = None
    bits: int | None = None

    def to_json(self) -> dict[str, str]:
        """Return plain data."""
        differs = self.differs if self.bits is None else f"{self.differs}, {self.bits} bits"
        return {"differs": differs, "src": self.src, "dst": self.dst}


def _mismatches_in(
    differs: str,
    *pairs: str,
    needs: str | None = None,
    bits: int | None = None,
) -> list[Mismatch]:
    """Return a mismatch for each pair such as ``tp=1 -> tp=2``."""
    options = [pair.split(" -> ") for pair in pairs]
    return [Mismatch(differs, src, dst, needs, bits) for src, dst in options]


MISMATCHES: Final = (
    *_mismatches_in("TP", "tp=1 -> tp=2", "tp=2 -> tp=1", "tp=2 -> tp=4", "tp=4 -> tp=2"),
    *_mismatches_in("TP", "tp=2 -> tp=3", "tp=3 -> tp=2", "tp=8 -> tp=2", "tp=16 -> tp=4"),
    *_mismatches_in("PP", "pp=2 -> pp=1", "pp=1 -> pp=3", "pp=2 -> pp=3"),
    *_mismatches_in("PP", "stages=1+{rest} -> pp=2,tp=2"),
    *_mismatches_in("context", "tp=16,dcp=1 -> tp=16,dcp=2", needs=TOKEN),
    *_mismatches_in("context", "tp=16,dcp=2 -> tp=16,dcp=4", needs=TOKEN),
    *_mismatches_in("context", "pcp=2 -> tp=2", "pcp=2,dcp=2 -> tp=2", needs=TOKEN),
    *_mismatches_in("context", "pcp=2,dcp=2,interleave=16 -> pcp=3,dcp=3", needs=TOKEN),
    *_mismatches_in("context", "tp=16,pcp=2,dcp=2,spread=1 -> tp=16,pcp=2,dcp=4", needs=TOKEN),
    *_mismatches_in("block", "block=16 -> block=64", "block=64 -> block=16", needs=TOKEN),
    *_mismatches_in("block", "block=48 -> block=32", needs=TOKEN),
    *_mismatches_in("kernel blocks", "block=64,kernel=16 -> block=64", needs=TOKEN),
    *_mismatches_in(
        "kernel blocks",
        "block=auto,kv=split,shared=1 -> tp=2,block=auto,kv=split,shared=1",
        needs=HYBRID,
    ),
    *_mismatches_in("pools", "shared=1 -> shared=0", needs=GROUPS),
    *_mismatches_in("pools", "tp=2,shared=1 -> tp=4,shared=1,layout=BLHNC", needs=GROUPS),
    *_mismatches_in("layout", "layout=LBNHC -> layout=LBHNC", "layout=LBHNC -> layout=BLHNC"),
    *_mismatches_in("layout", "layout=BHLNC -> layout=LHBNC"),
    *_mismatches_in("K and V", "kv=content -> kv=split", "kv=axis -> kv=content", needs=KV),
    *_mismatches_in("scales", "scales=inline -> scales=page", needs=KV, bits=8),
    *_mismatches_in("scales", "tp=2,scales=region -> tp=4,scales=inline", needs=KV, bits=8),
    *_mismatches_in("scales", "tp=4,scales=page -> tp=2,scales=region", needs=KV, bits=4),
    *_mismatches_in("convolution", "conv=SD -> conv=DS", needs=STEP),
    *_mismatches_in("padding", "pad=0 -> pad=4096"),
)


@attrs.frozen(eq=False)
class Result:
    """A mismatch with its verdict: ``verified`` or ``wrong`` in a trial, or ``refused``.

    ``reason`` is one line. ``not_run_because`` has the reasons why an engine does not run ``src``
    or ``dst``, if it has its own defaults for the keys that these leave out.
    """

    mismatch: Mismatch
    verdict: str
    reason: str | None = None
    trial: Trial | None = None
    not_run_because: Mapping[str, Mapping[str, list[str]]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, model: Model, mismatch: Mismatch) -> Result:
        """Move a request across the mismatch."""
        sides: dict[str, dict[str, list[str]]] = {"src": {}, "dst": {}}
        # a refusal is a verdict, too
        try:
            src = EngineOptions.parse(mismatch.src, "the source")
            dst = EngineOptions.parse(mismatch.dst, "the destination")
            # quantized tensors have scales, whose place the sides differ in
            if mismatch.bits is not None:
                model = quantize_model(model, mismatch.bits)
            sides = {"src": reasons_of(model, mismatch.src), "dst": reasons_of(model, mismatch.dst)}
            trial = Trial.of(PlacedRequest.of(model, src, dst, MATRIX_TOKENS))
        except KVPlanError as error:
            return cls(mismatch, "refused", str(error), None, sides)
        if trial.report.ok:
            return cls(mismatch, "verified", None, trial, sides)
        # the table has one line for each result
        failure = ": ".join(trial.report.failures[0])
        return cls(mismatch, "wrong", " ".join(failure.splitlines()), trial, sides)

    def __str__(self) -> str:
        if self.reason is None and self.trial is not None:
            return f"{self.verdict}: {described(self.trial.pairs)}"
        return f"{self.verdict}, {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data.

        ``lengths`` are those of the shortest and the longest descriptor, in bytes.
        """
        document: dict[str, Any] = {
            **self.mismatch.to_json(),
            "verdict": self.verdict,
            "reason": self.reason,
            "not_run_because": self.not_run_because,
        }
        if self.trial is not None:
            # the lengths between the shortest and the longest say nothing new
            lengths = lengths_of(self.trial.pairs)
            document["bytes"] = self.trial.report.num_bytes
            document["descriptors"] = self.trial.report.num_descriptors
            document["lengths"] = lengths[:1] + lengths[-1:]
        return document


def shortened(model: Model) -> Model:
    """Return the model with few of its layers: some of each kind, enough for uneven stages."""
    # a few layers of each kind, or more where the model has only one or two kinds
    numbers = Counter(model.layers).values()
    num_layers = sum(min(number, LAYERS_PER_KIND) for number in numbers)
    return sampled(model, min(max(num_layers, MIN_LAYERS), len(model.layers)))


def mismatches(model: Model) -> list[Mismatch]:
    """Return the mismatches that make sense for a model.

    A latent has no K and V, recurrent states have no token blocks.

    >>> mamba = mismatches(Model.shipped("falcon-mamba-7b"))
    >>> [mismatch.src for mismatch in mamba][-5:]
    ['layout=LBNHC', 'layout=LBHNC', 'layout=BHLNC', 'conv=SD', 'pad=0']
    """
    # all that a mismatch can need, and None, which needs nothing
    features: set[str | None] = {None}
    for tensor in model.tensors:
        features.update(axis for axis, _ in tensor.axes)
    is_paged = {tensor.paged for tensor in model.tensors}
    if True in is_paged:
        features.add(TOKEN)
    if len(is_paged) == 2:
        features.add(HYBRID)
    if len(model.groups) > 1:
        features.add(GROUPS)
    # the first stage may have a single layer, and the second the rest
    rest = len(model.layers) - 1
    possible = [mismatch for mismatch in MISMATCHES if mismatch.needs in features]
    return [attrs.evolve(mismatch, src=mismatch.src.format(rest=rest)) for mismatch in possible]


def markdown(results: Iterable[Result]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| differs in | source | destination | runs in | result |"
    yield "|---|---|---|---|---|"
    for result in results:
        sides = result.not_run_because.values()
        # the engines that run both sides stand once
        runs_in = " -> ".join(dict.fromkeys(map(running_engines, sides)))
        text = str(result).replace("|", "\\|")
        yield f"| {' | '.join(result.mismatch.to_json().values())} | {runs_in} | {text} |"


@click.command("matrix")
@model_argument
@json_option
def matrix_command(model: str, like: str | None, as_json: bool) -> int:
    """Try which differences between engines a cache moves across.

    MODEL is a shipped name such as llama-3.1-8b, the path of a config.json or of its directory, or
    sizes such as layers=40,kv_heads=10,head_dim=128. A few of its layers of each kind move between
    engines that differ in one thing, and every byte is checked. The table is Markdown; it names the
    engines that run each side, with their own words for the keys that a line leaves out.

    \b
    kvplan matrix granite-4.0-h-tiny

    Exit status: 0 every line verified or refused with a reason, 1 bytes differ, 2 refused.
    """
    whole = load(model, like=like)
    short = shortened(whole)
    with progress_bar() as bar:
        possible = bar.track(mismatches(short), description="matrix")
        results = [Result.of(short, mismatch) for mismatch in possible]
    if as_json:
        layers = {"moved": len(short.layers), "of": len(whole.layers)}
        cells = [result.to_json() for result in results]
        echo_json({"model": model, "layers": layers, "tokens": list(MATRIX_TOKENS), "cells": cells})
    else:
        layers_moved = f"{len(short.layers)} of {len(whole.layers)} layers"
        for line in assumed_lines(model, whole, like):
            click.echo(f"{line}\n")
        click.echo(
            f"{model}, {layers_moved}, positions [{MATRIX_TOKENS[0]}, {MATRIX_TOKENS[1]}):\n"
        )
        for line in cache_lines(whole):
            click.echo(f"- {line.strip()}")
        click.echo()
        click.echo("\n".join(markdown(results)))
    return 1 if any(result.verdict == "wrong" for result in results) else 0
