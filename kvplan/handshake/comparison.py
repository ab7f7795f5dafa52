"""compare: every difference between two workers, and whether it prevents a transfer.

Plans handle most differences: shards, block sizes, strides, contexts. No plan can handle a
tensor that means something else on the other side (rule plan.M3 of :mod:`kvplan.plan.match`). A
tensor that only the source has is not moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import attrs

from kvplan._checks import wrong_type
from kvplan._text import FEW, brief_repr, count, fold
from kvplan.describe.axes import Axis
from kvplan.describe.model import differing
from kvplan.describe.views import TOKEN, Geometry
from kvplan.describe.worker import Worker, checked_names

REFUSED: Final = "refused"
NOT_MOVED: Final = "not moved"
PLANNED: Final = "planned"

EFFECTS: Final = (REFUSED, NOT_MOVED, PLANNED)
"""The effects of differences, the most serious first."""

REFUSALS: Final = MappingProxyType(
    {"group kind": "GROUP", "dtype": "DTYPE", "axes": "AXES", "size": "SIZE", "model": "MODEL"}
)
"""The first words of the fields that must be equal, with the codes that planning raises."""


class _StoredView(NamedTuple):
    """The geometry of a view, and the memory kind and device of its region."""

    geometry: Geometry
    memory: str


StoredViews = tuple[_StoredView, ...]
"""The views of a tensor on a worker; none if it does not have the tensor."""


@attrs.frozen
class Difference:
    """One field in which two workers differ.

    ``where`` are the tensors, layers folded, or ``worker`` for all. ``effect`` is ``refused``:
    planning raises ``code``, or the code of another refused difference; ``not moved``: only the
    source has these tensors, and they stay there; or ``planned``: a plan handles it.
    """

    field: str
    where: str
    local: str
    remote: str
    effect: str
    code: str = ""

    __repr__ = brief_repr


@attrs.frozen
class Comparison:
    """All differences between two workers, in the order of :data:`EFFECTS`. ``str()`` is a table.

    ``not_moved`` names the tensors that only the source has.
    """

    local: str
    remote: str
    differences: tuple[Difference, ...]
    not_moved: tuple[str, ...] = ()

    __repr__ = brief_repr

    @property
    def ok(self) -> bool:
        """No difference is refused."""
        return not self._num_refused

    @property
    def _num_refused(self) -> int:
        return sum(difference.effect == REFUSED for difference in self.differences)

    def __str__(self) -> str:
        title = f"{self.local} and {self.remote}: {count(len(self.differences), 'difference')}"
        title += f", {self._num_refused or 'none'} refused"
        if self.not_moved:
            title += f", {count(len(self.not_moved), 'tensor')} not moved"
        if not self.differences:
            return title
        rows = [("field", self.local, self.remote, "effect", "where")]
        for difference in self.differences:
            effect = f"{difference.effect} {difference.code}".strip()
            local_and_remote = (difference.local, difference.remote)
            rows.append((difference.field, *local_and_remote, effect, difference.where))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
        return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def compare(local: Worker, remote: Worker, not_transferred: Collection[str] = ()) -> Comparison:
    """Return all differences between a destination and a source, field by field.

    Those of ``not_transferred`` tensors are left out. A tensor that only the destination has is
    refused, as :func:`kvplan.plan_reads` refuses it if no other source has it. One that only the
    source has is not moved, which is right for layers of other pipeline stages and wrong for a
    misspelt name. A shard that is not at this source is planned: another source may have it.
    Addresses, ranks and names of regions always differ and are not listed. Raises ``TYPE`` for
    anything but workers, and ``NAME`` for a name in ``not_transferred`` that neither of them has.

    >>> from kvplan import Axis, Group, Region, View, Worker, compare
    >>> def worker(engine, num_heads, slots, dtype):
    ...     axes = [Axis("head", 0, num_heads, 8, slots * 256), Axis("token", 0, slots, slots, 256)]
    ...     size = num_heads * slots * 256
    ...     views = [View(f"layers.{i}", "attn", "kv", dtype, axes, 10, 8 * size, i * size)
    ...              for i in range(8)]
    ...     return Worker(engine, 0, [Region("kv", 0, 80 * size)], [Group("attn", slots)], views)
    >>> print(compare(worker("decode", 4, 64, "bfloat16"), worker("prefill", 2, 16, "float16")))
    decode/0 and prefill/0: 6 differences, 1 refused
      field             decode/0               prefill/0             effect         where
      dtype             bfloat16               float16               refused DTYPE  layers.0-7
      shard of head     [0, 4) of 8            [0, 2) of 8           planned        layers.0-7
      tokens per block  64                     16                    planned        layers.0-7
      block stride      524288                 65536                 planned        layers.0-7
      strides           head 16384, token 256  head 4096, token 256  planned        layers.0-7
      regions           1 of 5242880 bytes     1 of 655360 bytes     planned        worker
    """
    for worker in (local, remote):
        if not isinstance(worker, Worker):
            raise wrong_type("a side of a comparison", "a Worker", worker)
    not_transferred = checked_names(not_transferred, local, remote)
    tensors_of: dict[Difference, list[str]] = {}
    # layers are often equal on both sides, and are compared once then
    differences_of: dict[tuple[StoredViews, StoredViews], list[Difference]] = {}
    for tensor in dict.fromkeys((*local.tensors, *remote.tensors)):
        if tensor in not_transferred:
            continue
        sides = (_stored_views(local, tensor), _stored_views(remote, tensor))
        if sides not in differences_of:
            differences_of[sides] = list(_differences(*sides))
        for difference in differences_of[sides]:
            tensors_of.setdefault(difference, []).append(tensor)
    differences = [
        attrs.evolve(difference, where=fold(tensors)) for difference, tensors in tensors_of.items()
    ]
    differences += _worker_differences(local, remote)
    differences.sort(key=lambda difference: EFFECTS.index(difference.effect))
    skipped = {*local.tensors, *not_transferred}
    not_moved = tuple(tensor for tensor in remote.tensors if tensor not in skipped)
    return Comparison(local.label, remote.label, tuple(differences), not_moved)


def _worker_differences(local: Worker, remote: Worker) -> Iterator[Difference]:
    if local.model != remote.model and local.model and remote.model:
        yield from _model_differences(local.model, remote.model)
    local_regions = _regions(local)
    remote_regions = _regions(remote)
    if local_regions != remote_regions:
        yield _difference("regions", local_regions, remote_regions, where="worker")


def _model_differences(local: str, remote: str) -> Iterator[Difference]:
    """Yield the facts in which two models differ, or the texts of models that have no facts."""
    facts = differing(local, remote)
    if not facts:
        yield _difference("model", local, remote, where="worker")
        return
    # one row for each of the first facts, and one that counts the others
    for fact, values in list(facts.items())[:FEW]:
        yield Difference(f"model: {fact}", "worker", *values, REFUSED, REFUSALS["model"])
    if len(facts) > FEW:
        others = count(len(facts) - FEW, "more fact")
        yield Difference(f"model: {others}", "worker", "", "", REFUSED, REFUSALS["model"])


def _difference(field: str, local: str, remote: str, where: str = "") -> Difference:
    """Return the difference of a field, which is refused if the field must be equal."""
    code = REFUSALS.get(field.split(" of ")[0], "")
    return Difference(field, where, local, remote, REFUSED if code else PLANNED, code)


def _stored_views(worker: Worker, tensor: str) -> StoredViews:
    stored = list[_StoredView]()
    for view in worker.tensors.get(tensor, ()):
        region_index, _ = worker.region_offsets[view]
        region = worker.regions[region_index]
        geometry = worker.geometries[worker.geometry_of[view]]
        stored.append(_StoredView(geometry, f"{region.memory} {region.device_id}"))
    return tuple(stored)


def _differences(local: StoredViews, remote: StoredViews) -> Iterator[Difference]:
    """Yield the differences of a tensor, ``where`` left open."""
    if not remote:
        yield Difference("tensor", "", "present", "missing", REFUSED, "TENSOR")
    elif not local:
        yield Difference("tensor", "", "missing", "present", NOT_MOVED)
    else:
        local_facts = _facts(local)
        remote_facts = _facts(remote)
        for field, local_values in local_facts.items():
            if field not in remote_facts:
                continue
            remote_values = remote_facts[field]
            # views of a tensor that differ from each other are refused, too
            difference = _difference(field, " and ".join(local_values), " and ".join(remote_values))
            if local_values != remote_values or (difference.code and len(local_values) > 1):
                yield difference


def _facts(stored: StoredViews) -> dict[str, list[str]]:
    """Return the views of a tensor in words: the different values of each field."""
    facts: dict[str, set[str]] = {}
    for geometry, memory in stored:
        for field, value in (*_facts_of(geometry), ("memory", memory)):
            facts.setdefault(field, set()).add(value)
    return {field: sorted(values) for field, values in facts.items()}


def _facts_of(geometry: Geometry) -> Iterator[tuple[str, str]]:
    """Yield the fields of a geometry and their values in words."""
    group = geometry.group
    sizes = geometry.content_sizes
    values = "tokens" if group.tokens_per_slot == 1 else f"{group.tokens_per_slot} tokens a slot"
    yield "group kind", "states" if group.is_state else values
    yield "dtype", geometry.dtype
    yield "axes", " ".join(sorted(geometry.sizes.keys() - {TOKEN})) or "none"
    for axis_name, size in sizes.items():
        yield f"size of {axis_name}", f"{size}"
    for axis_name in sizes:
        digits = [digit for digit in geometry.axes if digit.name == axis_name]
        yield f"shard of {axis_name}", _shard(digits)
    yield "group", group.name
    if not group.is_state:
        context = group.context
        yield "tokens per block", f"{group.tokens_per_block}"
        rank = f"rank {context.rank} of {context.size}"
        yield "context", f"{rank}, interleave {context.interleave_tokens}"
    yield "blocks", f"{geometry.num_blocks}"
    yield "block stride", f"{geometry.block_stride_bytes}"
    # the axis of the longest strides first
    steps = [(axis.stride_bytes, axis.name) for axis in geometry.axes if axis.extent > 1]
    steps.sort(reverse=True)
    yield "strides", ", ".join(f"{axis_name} {stride}" for stride, axis_name in steps) or "none"


def _shard(digits: Sequence[Axis]) -> str:
    if all(digit.extent == digit.size for digit in digits):
        return "all"
    return " x ".join(f"[{digit.start}, {digit.stop}) of {digit.size}" for digit in digits)


def _regions(worker: Worker) -> str:
    sizes = [region.size_bytes for region in worker.regions] or [0]
    smallest = min(sizes)
    largest = max(sizes)
    size = f"{smallest}" if smallest == largest else f"{smallest} to {largest}"
    return f"{len(worker.regions)} of {size} bytes"
