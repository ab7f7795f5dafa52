"""The ``matrix`` command: what a model's cache can move across, and what would need fewer copies.

Each line is a pair of engines. A trial decides it: the bytes that move are verified, or planning
refuses the pair with a reason. Wrong bytes are a defect of the planner. Without ``--src`` and
``--dst`` the pairs have one mismatch each, and a few of the model's layers move, some of each kind.
With them, the pairs are those engines as they are and with one change that their engines support.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import click

from kvplan.cli.caches import cache_lines
from kvplan.cli.console import echo_json, progress_bar
from kvplan.cli.model_files import quantize_model
from kvplan.cli.options import (
    EngineCommand,
    Engines,
    assumed_lines,
    engine_options,
    json_option,
)
from kvplan.cli.trials import (
    PlacedRequest,
    Trial,
    described,
    destination_drafts,
    lengths_of,
    sampled,
)
from kvplan.describe.views import TOKEN
from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.models.engines import reasons, reasons_of
from kvplan.models.layouts import CONV_ORDERS, KV, KV_FORMS, ORDERS, STEP
from kvplan.models.options import EngineOptions
from kvplan.plan import plan_mesh

MATRIX_TOKENS: Final = (5, 150)
"""The positions that move: they start and stop inside blocks."""

LAYERS_PER_KIND: Final = 2
MIN_LAYERS: Final = 4
"""The layers that are left of a longer model, so that three pipeline stages are uneven."""

BLOCK_SIZES: Final = (16, 32, 64, 128)
"""The block sizes that are tried, and that of the opposite engine."""

GROUPS: Final = "groups"
HYBRID: Final = "hybrid"
"""A mismatch can need an axis (``TOKEN``, ``KV``, ``STEP``) of a model's tensors, several groups,
or attention and recurrent states."""


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

    ``reason`` is one line. ``unsupported`` has the reasons why an engine does not support ``src``
    or ``dst``, if it has its own defaults for the keys that these leave out.
    """

    mismatch: Mismatch
    verdict: str
    reason: str | None = None
    trial: Trial | None = None
    unsupported: Mapping[str, Mapping[str, list[str]]] = attrs.field(factory=dict)

    @classmethod
    def of(
        cls,
        model: Model,
        mismatch: Mismatch,
        sides: Sequence[EngineOptions] = (),
    ) -> Result:
        """Move a request across the mismatch; ``sides`` are its engines if they are no defaults."""
        unsupported: dict[str, dict[str, list[str]]] = {"src": {}, "dst": {}}
        texts = {"src": mismatch.src, "dst": mismatch.dst}
        # a refusal is a verdict, too
        try:
            src, dst = sides or [EngineOptions.parse(text, key) for key, text in texts.items()]
            # the sides differ in where the scales of quantized tensors are
            if mismatch.bits is not None:
                model = quantize_model(model, mismatch.bits)
            unsupported = {key: reasons_of(model, text) for key, text in texts.items()}
            if sides:
                unsupported = {"src": reasons(model, src), "dst": reasons(model, dst)}
            trial = Trial.of(PlacedRequest.of(model, src, dst, MATRIX_TOKENS))
        except KVPlanError as error:
            return cls(mismatch, "refused", str(error), None, unsupported)
        if trial.report.ok:
            return cls(mismatch, "verified", None, trial, unsupported)
        # the table has one line for each result
        failure = ": ".join(trial.report.failures[0])
        return cls(mismatch, "wrong", " ".join(failure.splitlines()), trial, unsupported)

    def __str__(self) -> str:
        if self.reason is None and self.trial is not None:
            return f"{self.verdict}: {described(self.trial.pairs)}"
        return f"{self.verdict}, {self.reason}"

    @property
    def num_descriptors(self) -> int:
        """The descriptors of a request that moved."""
        return self.trial.report.num_descriptors if self.trial is not None else 0

    def to_json(self) -> dict[str, Any]:
        """Return plain data.

        ``lengths`` are those of the shortest and the longest descriptor, in bytes.
        """
        document: dict[str, Any] = {
            **self.mismatch.to_json(),
            "verdict": self.verdict,
            "reason": self.reason,
            "unsupported": self.unsupported,
        }
        if self.trial is not None:
            # the lengths between the shortest and the longest say nothing new
            lengths = lengths_of(self.trial.pairs)
            document["bytes"] = self.trial.report.num_bytes
            document["descriptors"] = self.num_descriptors
            document["lengths"] = lengths[:1] + lengths[-1:]
        return document


def shortened(model: Model) -> Model:
    """Return the model with few of its layers: some of each kind, enough for uneven stages."""
    # a few layers of each kind, or more where the model has only one or two kinds
    numbers = Counter(model.layers).values()
    num_layers = sum(min(number, LAYERS_PER_KIND) for number in numbers)
    return sampled(model, min(max(num_layers, MIN_LAYERS), len(model.layers)))


def _axes(model: Model) -> set[str]:
    return {axis for tensor in model.tensors for axis, _ in tensor.axes}


def mismatches(model: Model) -> list[Mismatch]:
    """Return the mismatches that make sense for a model.

    A latent has no K and V, recurrent states have no token blocks.

    >>> mamba = mismatches(Model.shipped("falcon-mamba-7b"))
    >>> [mismatch.src for mismatch in mamba][-5:]
    ['layout=LBNHC', 'layout=LBHNC', 'layout=BHLNC', 'conv=SD', 'pad=0']
    """
    # all that a mismatch can need, and None, which needs nothing
    features: set[str | None] = {None, *_axes(model)}
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
    axes = _axes(model)
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


def changes(engines: Engines, model: Model) -> dict[str, tuple[EngineOptions, EngineOptions]]:
    """Return the engines as they are, with each change of one, and with each change of both."""
    src, dst = engines.src, engines.dst
    named = engines.named
    of_src = changed_options(model, src, dst, named.get("src"))
    of_dst = changed_options(model, dst, src, named.get("dst"))
    pairs = {"no change": (src, dst)}
    pairs |= {f"src {change}": (options, dst) for change, options in of_src.items()}
    pairs |= {f"dst {change}": (src, options) for change, options in of_dst.items()}
    for change in of_src.keys() & of_dst.keys():
        pairs[f"both {change}"] = (of_src[change], of_dst[change])
    return pairs


def _tried_changes(engines: Engines, model: Model) -> list[Result]:
    """Return the pair as it is last, and before it what needs fewer descriptors."""
    destinations, sources = engines.workers()[::-1]
    # engines that cannot be paired are an error, and no line
    plan_mesh(destinations, sources, not_transferred=destination_drafts(destinations, sources))
    results = []
    with progress_bar() as bar:
        pairs = bar.track([*changes(engines, model).items()], description="matrix")
        for change, sides in pairs:
            src, dst = map(str, sides)
            results.append(Result.of(model, Mismatch(change, src, dst), sides))
    now, *others = results
    tried = sorted(others, key=lambda each: (each.num_descriptors, each.mismatch.differs))
    tried = [each for each in tried if each.verdict != "refused"]
    # of changes with the same figures, that of one engine or the first says enough
    fewer: dict[tuple[int, tuple[int, ...]], Result] = {}
    for each in sorted(tried, key=lambda each: each.mismatch.differs.startswith("both")):
        if each.verdict == "wrong" or each.num_descriptors < now.num_descriptors:
            lengths = lengths_of(each.trial.pairs) if each.trial else []
            fewer.setdefault((each.num_descriptors, (*lengths,)), each)
    return [*sorted(fewer.values(), key=lambda each: each.num_descriptors), now]


def markdown(results: Iterable[Result]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| differs in | source | destination | supported by | result |"
    yield "|---|---|---|---|---|"
    for result in results:
        sides = result.unsupported.values()
        # engines that support both sides are named once
        supported = " -> ".join(dict.fromkeys(map(supporting, sides)))
        text = str(result).replace("|", "\\|")
        yield f"| {' | '.join(result.mismatch.to_json().values())} | {supported} | {text} |"


def supporting(by_engine: Mapping[str, list[str]]) -> str:
    """Return the engines that support a side, from the reasons against it.

    >>> supporting(reasons(Model.shipped("llama-3.1-8b"), EngineOptions(kv="split")))
    'SGLang 0.5.23'
    """
    return ", ".join(engine for engine, found in by_engine.items() if not found) or "none"


@click.command("matrix", cls=EngineCommand)
@engine_options
@json_option
def matrix_command(engines: Engines, as_json: bool) -> int:
    """Try which differences between engines a cache moves across.

    A few layers of each kind move between engines that differ in one thing, and every byte is
    checked. The table is Markdown; it names the engines that support each side, with their own
    defaults for the keys that a line leaves out. With --src or --dst, it has those engines and the
    changes that move the request in fewer descriptors, of all layers, with the fewest first.

    \b
    kvplan matrix granite-4.0-h-tiny
    kvplan matrix llama-3.1-8b --src vllm,tp=4 --dst sglang,tp=2

    Exit status: 0 every line verified or refused with a reason, 1 bytes differ, 2 refused.
    """
    whole = engines.model
    is_pair = any(side.keys or side.engine for side in engines.sides.values())
    model = whole if is_pair else shortened(whole)
    if is_pair:
        results = _tried_changes(engines, whole)
    else:
        with progress_bar() as bar:
            possible = bar.track(mismatches(model), description="matrix")
            results = [Result.of(model, mismatch) for mismatch in possible]
    moved = len(model.layers)
    if as_json:
        layers = {"moved": moved, "of": len(whole.layers)}
        cells = [result.to_json() for result in results]
        document = {"model": engines.name, "layers": layers, "tokens": list(MATRIX_TOKENS)}
        echo_json(document | {"cells": cells})
    else:
        layers_moved = f"{moved} of {len(whole.layers)} layers"
        start, stop = MATRIX_TOKENS
        lines = [f"{engines.name}, {layers_moved}, positions [{start}, {stop}):", ""]
        lines += [f"- {line.strip()}" for line in cache_lines(whole)]
        read = [*assumed_lines(engines.name, whole, engines.like), *engines.read_lines()]
        # blank lines and dashes make the heading Markdown, too
        for line in (
            *(text for text in read for text in (text, "")),
            *lines,
            "",
            *markdown(results),
        ):
            click.echo(line)
        if is_pair and len(results) == 1:
            click.echo("\nNo change of layout, kv, conv or block needs fewer descriptors.")
    return 1 if any(result.verdict == "wrong" for result in results) else 0
