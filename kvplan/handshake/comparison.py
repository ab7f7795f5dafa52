"""compare: every difference between two workers, and whether it prevents a transfer.

Most differences are what plans handle: parts of axes, block sizes, strides, contexts. No plan can handle a tensor that
means something else on the other side (rule M3 of :mod:`kvplan.plan.match`). A tensor that only the source has is not
moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from kvplan._checks import members, wrong_type
from kvplan._text import count, fold
from kvplan.describe.axes import Axis, global_sizes
from kvplan.describe.views import TOKEN, Geometry
from kvplan.describe.worker import Worker

REFUSED: Final = "refused"
NOT_MOVED: Final = "not moved"
PLANNED: Final = "planned"

EFFECTS: Final = (REFUSED, NOT_MOVED, PLANNED)
"""What differences lead to, the most serious first."""

REFUSALS: Final = MappingProxyType(
    {"group kind": "GROUP", "dtype": "DTYPE", "axes": "AXES", "size": "SIZE", "model": "MODEL"}
)
"""The first words of the fields that must be equal, with the codes that planning raises for them."""

Stored = tuple[tuple[Geometry, str], ...]
"""The views of one tensor on one worker: the geometry and the memory of each."""


@attrs.frozen
class Difference:
    """One field in which two workers differ. ``where`` are the tensors, layers folded, or ``worker`` for all.

    ``effect`` is ``refused``: planning raises ``code``, or the code of another refused difference; ``not moved``: only
    the source has these tensors, and they stay there; or ``planned``: a plan handles it.
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

    ``not_moved`` names the tensors that only the source has.
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
        title = f"{self.local} and {self.remote}: {count(len(self.differences), 'difference')}"
        title += f", {refused or 'none'} refused"
        title += f", {count(len(self.not_moved), 'tensor')} not moved" if self.not_moved else ""
        if not self.differences:
            return title
        rows = [("field", self.local, self.remote, "effect", "where")]
        rows += [
            (d.field, d.local, d.remote, f"{d.effect} {d.code}".strip(), d.where)
            for d in self.differences
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = [
            [cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows
        ]
        return "\n".join([title, *(f"  {'  '.join(row)}".rstrip() for row in cells)])


def compare(local: Worker, remote: Worker, not_transferred: Collection[str] = ()) -> Comparison:
    """Every difference between a destination and a source, field by field, except for ``not_transferred`` tensors.

    A tensor that only the destination has is refused, as :func:`kvplan.plan_reads` refuses it if no other source has
    it. One that only the source has is not moved, which is right for layers of other pipeline stages and wrong for a
    misspelt name. A part of an axis that the source lacks is planned: another source may have it. Addresses, ranks and
    names of regions always differ and are not listed. Raises ``TYPE`` for anything but workers.

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
    not_transferred = members(str, not_transferred, "not_transferred")
    found: dict[Difference, list[str]] = {}
    known: dict[
        tuple[Stored, Stored], list[Difference]
    ] = {}  # layers are often equal on both sides
    for name in dict.fromkeys((*local.tensors, *remote.tensors)):
        if name not in not_transferred:
            pair = _stored(local, name), _stored(remote, name)
            if pair not in known:
                known[pair] = list(_differences(*pair))
            for difference in known[pair]:
                found.setdefault(difference, []).append(name)
    made = [attrs.evolve(difference, where=fold(names)) for difference, names in found.items()]
    if local.model != remote.model and local.model and remote.model:
        made.append(
            Difference("model", "worker", local.model, remote.model, REFUSED, REFUSALS["model"])
        )
    mine, other = _regions(local), _regions(remote)
    if mine != other:
        made.append(Difference("regions", "worker", mine, other, PLANNED))
    made.sort(key=lambda difference: EFFECTS.index(difference.effect))
    stays = tuple(
        name for name in remote.tensors if name not in local.tensors and name not in not_transferred
    )
    return Comparison(local.label, remote.label, tuple(made), stays)


def _stored(worker: Worker, tensor: str) -> Stored:
    views = worker.tensors.get(tensor, ())
    regions = [worker.regions[int(worker.places[i, 0])] for i in views]
    geometries = [worker.geometries[worker.geometry_of[i]] for i in views]
    memories = [f"{region.memory} {region.device_id}" for region in regions]
    return tuple(zip(geometries, memories, strict=True))


def _differences(ours: Stored, theirs: Stored) -> Iterator[Difference]:
    """The differences of a tensor, ``where`` left open."""
    if not (ours and theirs):
        missing = Difference("tensor", "", "present", "missing", REFUSED, "TENSOR")
        yield missing if ours else Difference("tensor", "", "missing", "present", NOT_MOVED)
        return
    local, remote = _facts(ours), _facts(theirs)
    for field in [field for field in local if field in remote]:
        code = REFUSALS.get(field.split(" of ")[0], "")
        if local[field] != remote[field] or (code and len(local[field]) > 1):
            mine, other = " and ".join(local[field]), " and ".join(remote[field])
            yield Difference(field, "", mine, other, REFUSED if code else PLANNED, code)


def _facts(stored: Stored) -> dict[str, list[str]]:
    """A tensor's views in words: the different values of each field."""
    facts: dict[str, set[str]] = {}
    for geometry, memory in stored:
        for field, value in (*_facts_of(geometry), ("memory", memory)):
            facts.setdefault(field, set()).add(value)
    return {field: sorted(values) for field, values in facts.items()}


def _facts_of(geometry: Geometry) -> Iterator[tuple[str, str]]:
    group, context = geometry.group, geometry.group.context
    sizes = {axis: size for axis, size in global_sizes(geometry.axes).items() if axis != TOKEN}
    yield "group kind", "states" if group.tokens_per_block is None else "tokens"
    yield "dtype", geometry.dtype
    yield "axes", " ".join(sorted(geometry.sizes.keys() - {TOKEN})) or "none"
    yield from ((f"size of {axis}", f"{size}") for axis, size in sizes.items())
    for axis in sizes:
        yield f"part of {axis}", _part([digit for digit in geometry.axes if digit.name == axis])
    yield "group", group.name
    if group.tokens_per_block is not None:
        yield "tokens per block", f"{group.tokens_per_block}"
        yield (
            "context",
            f"rank {context.rank} of {context.size}, interleave {context.interleave_tokens}",
        )
    yield "blocks", f"{geometry.num_blocks}"
    yield "block stride", f"{geometry.block_stride_bytes}"
    steps = [(axis.stride_bytes, axis.name) for axis in geometry.axes if axis.extent > 1]
    yield (
        "strides",
        ", ".join(f"{name} {stride}" for stride, name in sorted(steps, reverse=True)) or "none",
    )


def _part(digits: Sequence[Axis]) -> str:
    if all(digit.extent == digit.size for digit in digits):
        return "all"
    return " x ".join(f"[{digit.start}, {digit.stop}) of {digit.size}" for digit in digits)


def _regions(worker: Worker) -> str:
    sizes = sorted({region.size_bytes for region in worker.regions}) or [0]
    return f"{len(worker.regions)} of {' to '.join(f'{size}' for size in dict.fromkeys((sizes[0], sizes[-1])))} bytes"
