"""compare: every difference between two workers, and whether it keeps them from exchanging what they keep.

Most differences are what plans are for: parts of axes, block sizes, strides, contexts. What no plan can bridge is a
tensor that means something else on the other side, rule M3 of :mod:`kvplan.plan.match`. What the source alone keeps is
not moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from kvplan._checks import wrong_type
from kvplan._text import count, fold
from kvplan.describe.axes import Axis
from kvplan.describe.views import TOKEN, Geometry
from kvplan.describe.worker import Worker

REFUSED: Final = "refused"
NOT_MOVED: Final = "not moved"
PLANNED: Final = "planned"

EFFECTS: Final = (REFUSED, NOT_MOVED, PLANNED)
"""What differences lead to, those that matter most first."""

Kept = tuple[tuple[Geometry, str], ...]
"""The views of a tensor: what each is, and in which memory."""

Row = tuple[str, str, str, str, str]
"""Field, local and remote value, the effect, and the code where that is a refusal."""

REFUSALS: Final = MappingProxyType({"group kind": "GROUP", "dtype": "DTYPE", "axes": "AXES", "size": "SIZE"})
"""The first words of the fields that must not differ, with the codes that planning refuses them with."""


@attrs.frozen
class Difference:
    """One field in which two workers differ, for some tensors: ``where``, layers folded, or ``worker`` for it all.

    ``effect`` is ``refused``, then planning raises ``code``, or that of another difference that is refused; ``not
    moved``, then the source alone keeps these tensors, and they stay there; or ``planned``, then a plan bridges it.
    """

    field: str
    where: str
    local: str
    remote: str
    effect: str
    code: str = ""


@attrs.frozen
class Comparison:
    """All differences between two workers, in the order of :data:`EFFECTS`. ``str()`` is a table.

    ``not_moved`` names the tensors that the source alone keeps.
    """

    local: str
    remote: str
    differences: tuple[Difference, ...]
    not_moved: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no difference is refused."""
        return all(difference.effect != REFUSED for difference in self.differences)

    def __str__(self) -> str:
        refused = sum(difference.effect == REFUSED for difference in self.differences)
        number = count(len(self.differences), "difference")
        head = ("field", self.local, self.remote, "effect", "where")
        rows = [
            head,
            *((d.field, d.local, d.remote, f"{d.effect} {d.code}".strip(), d.where) for d in self.differences),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        title = f"{self.local} and {self.remote}: {number}, {refused or 'none'} refused"
        title += f", {count(len(self.not_moved), 'tensor')} not moved" if self.not_moved else ""
        return "\n".join([title, *(f"  {line}" for line in lines if self.differences)])


def compare(local: Worker, remote: Worker, not_transferred: Collection[str] = ()) -> Comparison:
    """Every difference between a destination and a source, field by field, ``not_transferred`` tensors left out.

    A tensor that only the destination has is refused, as :func:`kvplan.plan_reads` does where no other source offers
    it. One that only the source has is not moved, which is right for layers of other stages and wrong for a name with
    a slip in it. A part that the source lacks is planned: another source may hold it. Addresses, ranks and names of
    regions always differ, and are not told. Raises ``TYPE`` for what is no worker.

    >>> from kvplan import Axis, Group, Region, View, Worker, compare
    >>> def worker(engine, heads, tokens, dtype):
    ...     axes = (Axis("head", *heads, 8, tokens * 256), Axis("token", 0, tokens, tokens, 256),
    ...             Axis("dim", 0, 128, 128, 2))
    ...     size = (heads[1] - heads[0]) * tokens * 256
    ...     return Worker(engine, 0, [Region("kv", 1 << 40, 80 * size)], [Group("attn", tokens)],
    ...                   [View(f"layers.{i}", "attn", "kv", dtype, axes, 10, 8 * size, i * size) for i in range(8)])
    >>> print(compare(worker("decode", (0, 4), 64, "bfloat16"), worker("prefill", (0, 2), 16, "float16")))
    decode/0 and prefill/0: 6 differences, 1 refused
      field             decode/0                       prefill/0                     effect         where
      dtype             bfloat16                       float16                       refused DTYPE  layers.0-7
      part of head      [0, 4) of 8                    [0, 2) of 8                   planned        layers.0-7
      tokens per block  64                             16                            planned        layers.0-7
      block stride      524288                         65536                         planned        layers.0-7
      strides           head 16384, token 256, dim 2   head 4096, token 256, dim 2   planned        layers.0-7
      regions           1 of 5242880 bytes             1 of 655360 bytes             planned        worker
    """
    for worker in (local, remote):
        if not isinstance(worker, Worker):
            raise wrong_type("a side of a comparison", "a Worker", worker)
    found: dict[Row, list[str]] = {}
    known: dict[tuple[Kept, Kept], list[Row]] = {}
    for name in dict.fromkeys((*local.tensors, *remote.tensors)):
        if name not in not_transferred:
            ours, theirs = _kept(local, name), _kept(remote, name)
            if (ours, theirs) not in known:
                known[ours, theirs] = list(_differences(ours, theirs))
            for difference in known[ours, theirs]:
                found.setdefault(difference, []).append(name)
    made = [
        Difference(field, fold(names), mine, other, effect, code)
        for (field, mine, other, effect, code), names in found.items()
    ]
    mine, other = _regions(local), _regions(remote)
    if mine != other:
        made.append(Difference("regions", "worker", mine, other, PLANNED))
    made.sort(key=lambda difference: EFFECTS.index(difference.effect))
    stays = tuple(name for name in remote.tensors if name not in local.tensors and name not in not_transferred)
    return Comparison(local.label, remote.label, tuple(made), stays)


def _kept(worker: Worker, tensor: str) -> Kept:
    views = worker.tensors.get(tensor, ())
    regions = [worker.regions[int(worker.places[i, 0])] for i in views]
    geometries = [worker.geometries[worker.geometry_of[i]] for i in views]
    memories = [f"{region.memory} {region.device_id}" for region in regions]
    return tuple(zip(geometries, memories, strict=True))


def _differences(ours: Kept, theirs: Kept) -> Iterator[Row]:
    if not (ours and theirs):
        missing = ("tensor", "kept", "not kept", REFUSED, "TENSOR")
        yield missing if ours else ("tensor", "not kept", "kept", NOT_MOVED, "")
        return
    local, remote = _facts(ours), _facts(theirs)
    for field in [field for field in local if field in remote]:
        code = REFUSALS.get(field.split(" of ")[0], "")
        if local[field] != remote[field] or (code and len(local[field]) > 1):
            yield field, " and ".join(local[field]), " and ".join(remote[field]), REFUSED if code else PLANNED, code


def _facts(kept: Kept) -> dict[str, list[str]]:
    """What a tensor's views are, by field, each different value once."""
    facts: dict[str, set[str]] = {}
    for geometry, memory in kept:
        for field, value in (*_facts_of(geometry), ("memory", memory)):
            facts.setdefault(field, set()).add(value)
    return {field: sorted(values) for field, values in facts.items()}


def _facts_of(geometry: Geometry) -> Iterator[tuple[str, str]]:
    group, context = geometry.group, geometry.group.context
    sizes = {axis: size for axis, size in geometry.sizes.items() if axis != TOKEN}
    yield "group kind", "states" if group.tokens_per_block is None else "tokens"
    yield "dtype", geometry.dtype
    yield "axes", " ".join(sorted(sizes)) or "none"
    yield from ((f"size of {axis}", f"{size}") for axis, size in sizes.items())
    for axis in sizes:
        yield f"part of {axis}", _part([digit for digit in geometry.axes if digit.name == axis])
    yield "group", group.name
    if group.tokens_per_block is not None:
        yield "tokens per block", f"{group.tokens_per_block}"
        yield "context", f"rank {context.rank} of {context.size}, {context.interleave_tokens} in turn"
    yield "blocks", f"{geometry.num_blocks}"
    yield "block stride", f"{geometry.block_stride_bytes}"
    yield "strides", _strides(geometry.axes)


def _part(digits: Sequence[Axis]) -> str:
    if all(digit.extent == digit.size for digit in digits):
        return "all"
    return " x ".join(f"[{digit.start}, {digit.stop}) of {digit.size}" for digit in digits)


def _strides(axes: Sequence[Axis]) -> str:
    steps = [(axis.stride_bytes, axis.name) for axis in axes if axis.extent > 1]
    return ", ".join(f"{name} {stride}" for stride, name in sorted(steps, reverse=True)) or "none"


def _regions(worker: Worker) -> str:
    sizes = sorted({region.size_bytes for region in worker.regions}) or [0]
    return f"{len(worker.regions)} of {' to '.join(f'{size}' for size in dict.fromkeys((sizes[0], sizes[-1])))} bytes"
