"""One read: what it moves of a request, how that is bound, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from kvplan._checks import check_fields, instance, name
from kvplan._text import brief_repr
from kvplan.describe.blocks import Blocks, Range, Request
from kvplan.errors import KVPlanError
from kvplan.plan import ReadSpec, TransferPlan
from kvplan.protocol.handoff import Source

MAX_TRANSFER_IDS: Final = 4096
"""The most ids of a transfer. UCX takes up to 16 us to begin a descriptor over TCP."""

MAX_TRANSFER_BYTES: Final = 1 << 26
"""The most bytes of a transfer. Between processes of one host UCX copies while it takes them."""


@attrs.frozen(kw_only=True)
class Read:
    """What a worker reads of a request: block tables of both sides and ranges, by group.

    Groups that the worker or the source lacks are ignored. The source keeps its blocks under
    ``lease``. With ``to_block_end`` the positions after the last one, up to where a block of either
    side ends, may get whatever the source holds there: a block that moves whole takes far fewer
    descriptors.
    """

    request: str
    source: Source
    lease: str
    local: Mapping[str, Blocks]
    remote: Mapping[str, Blocks]
    tokens: Mapping[str, Range]
    to_block_end: bool = False

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        instance(Source, self.source, "source of a read")
        instance(bool, self.to_block_end, "to_block_end of a read")
        for field in ("local", "remote", "tokens"):
            instance(Mapping, getattr(self, field), f"{field} of a read")
        check_fields(self, "a read", name, "request", "lease")


@attrs.frozen
class ReadResult:
    """The end of a read: its error, or the ``num_bytes`` that moved in ``seconds``.

    It took ``post_seconds`` until all transfers were handed over, ``transfer_seconds`` until all
    had ended, and ``seconds`` until the read was right. ``is_staged`` if bytes went through a
    pipeline. ``num_descriptors`` is 0 where the executor does not count them.
    """

    request: str
    error: KVPlanError | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    post_seconds: float = 0.0
    transfer_seconds: float = 0.0
    num_descriptors: int = 0
    is_staged: bool = False

    __repr__ = brief_repr


def cut(spec: ReadSpec, max_ids: int = MAX_TRANSFER_IDS) -> Iterator[ReadSpec]:
    """Cut what is read from a worker into transfers of a limited number of ids and of bytes."""
    if not spec.num_ids:
        return
    if not spec.lists_ids:
        yield spec
        return
    longest_bytes = int(spec.local_table.rows[:, 1].max())
    num_ids = min(MAX_TRANSFER_IDS, max_ids, max(1, MAX_TRANSFER_BYTES // longest_bytes))
    if spec.local_ids.size <= num_ids:
        yield spec
        return
    for start in range(0, spec.local_ids.size, num_ids):
        chunk = slice(start, start + num_ids)
        local_ids = spec.local_ids[chunk]
        yield attrs.evolve(spec, local_ids=local_ids, remote_ids=spec.remote_ids[chunk], shapes=())


def error_of(read: Read, error: KVPlanError) -> KVPlanError:
    """Return the error of a read, with what was to be read."""
    return error.with_details(request=read.request, read_from=read.source, lease=read.lease)


def request_of(read: Read, plan: TransferPlan, *, to_block_end: bool) -> Request:
    """Return the arguments of :meth:`TransferPlan.bind`: of groups that the plan's workers have.

    With ``to_block_end``, ranges end with a block.
    """
    local_groups = {group.name for group in plan.local.groups}
    remote_groups = set[str]()
    for remote in plan.remotes:
        remote_groups.update(group.name for group in remote.groups)
    tokens = dict[str, Range]()
    for group, span in read.tokens.items():
        if group in local_groups:
            tokens[group] = _extended(plan, group, *span) if to_block_end else span
    return {
        "local": {group: read.local[group] for group in read.local if group in local_groups},
        "remote": {group: read.remote[group] for group in read.remote if group in remote_groups},
        "tokens": tokens,
    }


def _extended(plan: TransferPlan, group: str, start: int, stop: int) -> Range:
    """Return a range of positions that ends with the first block of either side that ends."""
    if start == stop:
        return start, stop
    block_sizes = set[int]()
    for pair in plan.pairs:
        for group_pair in pair.group_pairs:
            if group_pair.groups[0].name == group:
                sizes = (side.tokens_per_block for side in group_pair.groups)
                block_sizes.update(size for size in sizes if size is not None)
    # the end of the block that has the last position, for each size
    block_ends = [-(-stop // size) * size for size in block_sizes]
    return start, min(block_ends, default=stop)
