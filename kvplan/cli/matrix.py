"""The matrix: which differences between two engines a model's cache moves across, each decided by verifying it.

A cell is a pair of engines that differ in one thing. It is verified, with every byte checked; or refused, with the
reason; or wrong, which is a defect of the planner. Engines run a few of the model's layers, of every distinct kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import attrs

from kvplan.cli.sides import Side, in_bits
from kvplan.cli.trials import Request, Trial, lengths_of
from kvplan.describe.views import TOKEN
from kvplan.errors import KVPlanError
from kvplan.models.layouts import KV, STEP
from kvplan.models.model import Model
from kvplan.models.tensors import Layer
from kvplan.verification.progress import Progress, told, untold

TOKENS: Final = (5, 150)
"""The positions that move: they begin and end inside blocks."""

OF_EACH: Final = 2
"""How many layers of each kind are kept, where there are so many."""

AT_LEAST: Final = 4
"""How many layers are kept at least, where there are so many: three stages of them are uneven."""


GROUPS: Final = "groups"
"""Layers of several kinds."""

HYBRID: Final = "hybrid"
"""Layers that attend, and layers that keep a state."""


@attrs.frozen
class Case:
    """What two engines differ in, and both in the words of :class:`Side`.

    ``needs`` is what a model has if the case means something to it: an axis, :data:`GROUPS` or :data:`HYBRID`. Where
    ``bits`` are given, its K and V are quantized to them. ``{rest}`` stands for all layers but one.
    """

    differs: str
    src: str
    dst: str
    needs: str | None = None
    bits: int | None = None


CASES: Final = (
    Case("TP", "tp=1", "tp=2"),
    Case("TP", "tp=2", "tp=1"),
    Case("TP", "tp=2", "tp=4"),
    Case("TP", "tp=4", "tp=2"),
    Case("TP", "tp=2", "tp=3"),
    Case("TP", "tp=3", "tp=2"),
    Case("TP", "tp=8", "tp=2"),
    Case("TP", "tp=16", "tp=4"),
    Case("PP", "pp=2", "pp=1"),
    Case("PP", "pp=1", "pp=3"),
    Case("PP", "pp=2", "pp=3"),
    Case("PP", "stages=1+{rest}", "pp=2,tp=2"),
    Case("context", "tp=16,dcp=1", "tp=16,dcp=2", TOKEN),
    Case("context", "tp=16,dcp=2", "tp=16,dcp=4", TOKEN),
    Case("context", "pcp=2", "tp=2", TOKEN),
    Case("context", "pcp=2,dcp=2", "tp=2", TOKEN),
    Case("context", "pcp=2,dcp=2,interleave=16", "pcp=3,dcp=3", TOKEN),
    Case("context", "tp=16,pcp=2,dcp=2,spread=1", "tp=16,pcp=2,dcp=4", TOKEN),
    Case("block", "block=16", "block=64", TOKEN),
    Case("block", "block=64", "block=16", TOKEN),
    Case("block", "block=48", "block=32", TOKEN),
    Case("kernel blocks", "block=64,kernel=16", "block=64", TOKEN),
    Case("kernel blocks", "block=auto,kv=split,shared=1", "tp=2,block=auto,kv=split,shared=1", HYBRID),
    Case("pools", "shared=1", "shared=0", GROUPS),
    Case("pools", "tp=2,shared=1", "tp=4,shared=1,layout=BLHNC", GROUPS),
    Case("layout", "layout=LBNHC", "layout=LBHNC"),
    Case("layout", "layout=LBHNC", "layout=BLHNC"),
    Case("layout", "layout=BHLNC", "layout=LHBNC"),
    Case("K and V", "kv=content", "kv=split", KV),
    Case("K and V", "kv=axis", "kv=content", KV),
    Case("scales", "scales=inline", "scales=page", KV, bits=8),
    Case("scales", "tp=2,scales=region", "tp=4,scales=inline", KV, bits=8),
    Case("scales", "tp=4,scales=page", "tp=2,scales=region", KV, bits=4),
    Case("convolution", "conv=SD", "conv=DS", STEP),
    Case("padding", "pad=0", "pad=4096"),
)


@attrs.frozen(eq=False)
class Cell:
    """A case decided for a model: its ``trial``, or its ``refusal``."""

    case: Case
    trial: Trial | None = None
    refusal: KVPlanError | None = None

    @property
    def verdict(self) -> str:
        """``verified``, ``refused`` or ``wrong``."""
        if self.trial is None:
            return "refused"
        return "verified" if self.trial.report.ok else "wrong"

    @property
    def reason(self) -> str | None:
        """Why the case was refused, or what is wrong; one line."""
        if self.trial is None:
            text = str(self.refusal)
        elif self.trial.report.ok:
            return None
        else:
            text = ": ".join(self.trial.report.failures[0])
        return " ".join(text.splitlines())

    def __str__(self) -> str:
        if self.trial is None or self.reason:
            return f"{self.verdict}, {self.reason}"
        return f"verified: {self.trial.report.num_descriptors:,} descriptors of {lengths_of(self.trial.pairs)}"

    def to_json(self) -> dict[str, Any]:
        """As plain data; ``lengths`` are the shortest and the longest descriptor, in bytes."""
        told: dict[str, Any] = {**_words(self.case), "verdict": self.verdict, "reason": self.reason}
        if self.trial is not None:
            lengths = [length for pair in self.trial.pairs for length in pair.lengths]
            report = self.trial.report
            told |= {"bytes": report.num_bytes, "descriptors": report.num_descriptors}
            told["lengths"] = [min(lengths), max(lengths)] if lengths else []
        return told


def _words(case: Case) -> dict[str, str]:
    differs = case.differs if case.bits is None else f"{case.differs}, {case.bits} bits"
    return {"differs": differs, "src": case.src, "dst": case.dst}


def shortened(model: Model) -> Model:
    """The model with few layers, in their order: some of each kind, and enough for uneven stages.

    >>> print(shortened(Model.shipped("granite-4.0-h-tiny")))
    granite-4.0-h-tiny: 4 layers, bfloat16, groups state, attn
    """
    of_kind: dict[Layer, list[int]] = {}
    for i, layer in enumerate(model.layers):
        of_kind.setdefault(layer, []).append(i)
    kept = {i for found in of_kind.values() for i in found[:OF_EACH]}
    others = [i for i in range(len(model.layers)) if i not in kept]
    kept.update(others[: max(AT_LEAST - len(kept), 0)])
    return attrs.evolve(model, layers=tuple(model.layers[i] for i in sorted(kept)))


def cases(model: Model) -> Iterator[Case]:
    """The cases that mean something to the model: no K and V for latents, no blocks of tokens for states alone.

    >>> [case.src for case in cases(Model.shipped("falcon-mamba-7b"))][-5:]
    ['layout=LBNHC', 'layout=LBHNC', 'layout=BHLNC', 'conv=SD', 'pad=0']
    """
    tensors = set(model.tensors)
    paged = {tensor.paged for tensor in tensors}
    there: set[str | None] = {axis for tensor in tensors for axis, _ in tensor.axes} | {None}
    there |= {TOKEN} if True in paged else set()
    there |= {GROUPS} if len(model.groups) > 1 else set()
    there |= {HYBRID} if len(paged) == 2 else set()
    rest = len(model.layers) - 1
    return (attrs.evolve(case, src=case.src.format(rest=rest)) for case in CASES if case.needs in there)


def cells(
    model: Model, check: Callable[[Request], None] = lambda request: None, progress: Progress = untold
) -> Iterator[Cell]:
    """Decide each case of the model as it stands, one after the other.

    ``check`` may refuse a request with a :class:`KVPlanError` before it is carried out.
    """
    for case in told(tuple(cases(model)), progress):
        src, dst = Side.parse(case.src, "the source"), Side.parse(case.dst, "the destination")
        try:
            request = Request.of(model if case.bits is None else in_bits(model, case.bits), src, dst, TOKENS)
            check(request)
            yield Cell(case, trial=Trial.of(request))
        except KVPlanError as error:
            yield Cell(case, refusal=error)


def markdown(decided: Iterable[Cell]) -> Iterator[str]:
    """The cells as the lines of a Markdown table.

    >>> refusal = KVPlanError("LAYOUT", "do it", expected="a|b", got="c")
    >>> print(*markdown([Cell(Case("TP", "tp=1", "tp=2"), refusal=refusal)]), sep="\\n")
    | differs in | source | destination | result |
    |---|---|---|---|
    | TP | tp=1 | tp=2 | refused, LAYOUT: cannot do it: expected a\\|b, got c |
    """
    yield "| differs in | source | destination | result |"
    yield "|---|---|---|---|"
    for cell in decided:
        result = str(cell).replace("|", "\\|")
        yield f"| {' | '.join(_words(cell.case).values())} | {result} |"
