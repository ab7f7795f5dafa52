"""The error table: every kind of malformed description, pair and request, with its exact message."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import (
    Axis,
    Blocks,
    Context,
    Group,
    KVPlanError,
    Region,
    View,
    Worker,
    certify,
    plan_mesh,
    plan_reads,
    plan_writes,
    view_of,
)
from kvplan._text import shown
from kvplan.describe.axes import MAX_SEGMENTS
from kvplan.errors import CODES
from tests.small import engine
from tests.stand_in import StandIn

NOT_CORE = {"LAYOUT", "CONFIG", "MEMORY", "BACKEND", "PEER", "TRANSFER", "MESSAGE", "VERSION", "KEY"}
"""Codes of the modules that make layouts, read configurations or messages and move bytes: they have their own tests."""

PIECES = MAX_SEGMENTS + 1
TOKEN, DIM = Axis("token", 0, 4, 4, 16), Axis("dim", 0, 8, 8, 2)


def region(**changes: Any) -> Region:
    return Region(**{"name": "kv", "address": 4096, "size_bytes": 640, **changes})


def axis(**changes: Any) -> Axis:
    return Axis(**{"name": "head", "start": 0, "stop": 4, "size": 8, "stride_bytes": 256, **changes})


def view(**changes: Any) -> View:
    fields = {"name": "layers.0", "group": "attn", "region": "kv", "dtype": "bfloat16", "axes": (TOKEN, DIM)}
    return View(**{**fields, "num_blocks": 10, "block_stride_bytes": 64, **changes})


def worker(**changes: Any) -> Worker:
    fields = {"engine_id": "p", "rank": 0, "regions": [region()], "groups": [Group("attn", 4)], "views": [view()]}
    return Worker(**{**fields, **changes})


def read_view(tensor: Any = None, pattern: Any = "block token dim", **changes: Any) -> View:
    whole = StandIn((10, 4, 8)) if tensor is None else tensor
    return view_of(whole, pattern, **{"name": "layers.0", "group": "attn", "region": region(), **changes})


def pair(**changes: Any) -> object:
    """A plan for a worker like the source, but for these fields of its view."""
    return plan_reads(worker(engine_id="d", views=[view(**changes)]), [worker()])


def head_pair(ours: Axis, theirs: Sequence[Axis]) -> object:
    """A plan where each worker's view holds a part of the head axis."""

    def holder(engine_id: str, rank: int, part: Axis) -> Worker:
        held = view(axes=(part, TOKEN, DIM), block_stride_bytes=4096)
        return worker(engine_id=engine_id, rank=rank, regions=[region(size_bytes=40960)], views=[held])

    return plan_reads(holder("d", 0, ours), [holder("p", rank, part) for rank, part in enumerate(theirs)])


def group_pair(ours: Group, theirs: Group, *digits: Axis) -> object:
    """A plan between two groups."""

    def holder(engine_id: str, group: Group) -> Worker:
        axes = (DIM,) if group.tokens_per_block is None else (*(digits or [TOKEN]), DIM)
        return worker(
            engine_id=engine_id,
            groups=[group],
            regions=[region(size_bytes=1 << 40)],
            views=[view(axes=axes, num_blocks=1)],
        )

    return plan_reads(holder("d", ours), [holder("p", theirs)])


def bind(local: Any = None, remote: Any = None, tokens: Any = (0, 12)) -> object:
    (mine,), (other,) = engine("d"), engine("p")
    tables = [{"attn": Blocks([3, 1, 2])} if table is None else table for table in (local, remote)]
    return plan_reads(mine, [other]).bind(local=tables[0], remote=tables[1], tokens=tokens)


def bind_writes(local: Blocks, remote: Blocks) -> object:
    (mine,), (other,) = engine("p"), engine("d")
    return plan_writes(mine, [other]).bind(local={"attn": local}, remote={"attn": remote}, tokens=(0, 12))


def bind_large() -> object:
    (mine,), (other,) = engine("d", blocks=1 << 30, layers=1), engine("p", blocks=1 << 30, layers=1)
    last = {"attn": Blocks([(1 << 30) - 1])}
    return plan_reads(mine, [other]).bind(local=last, remote=last, tokens=(0, 3))


@attrs.frozen
class Row:
    """A call that is refused, and the message."""

    message: str
    call: Callable[[], object]

    @property
    def code(self) -> str:
        """The message's code."""
        return self.message.split(":")[0]


def certify_nothing() -> object:
    """The certificate of a plan whose only pair was emptied."""
    plan = plan_reads(worker(engine_id="d"), [worker()])
    return certify(attrs.evolve(plan, pairs=(attrs.evolve(plan.pairs[0], group_pairs=()),)))


REFUSALS: tuple[Row, ...] = (
    # regions
    Row(
        "TYPE: cannot read name of a region: expected a string, got None",
        lambda: region(name=None),
    ),
    Row(
        "NAME: cannot read name of a region: expected a non-empty string of printable characters, got ''",
        lambda: region(name=""),
    ),
    Row(
        "NAME: cannot read name of a region: expected a non-empty string of printable characters, got 'kv\\n0'",
        lambda: region(name="kv\n0"),
    ),
    Row(
        "RANGE: cannot read address of a region: expected an integer in [0, 18446744073709551616), got -1",
        lambda: region(address=-1),
    ),
    Row(
        "RANGE: cannot read address of a region: expected an integer in [0, 18446744073709551616), got "
        "18446744073709551616",
        lambda: region(address=1 << 64),
    ),
    Row(
        "TYPE: cannot read address of a region: expected an integer, got 4096.0",
        lambda: region(address=np.float64(4096)),
    ),
    Row(
        "RANGE: cannot read size_bytes of a region: expected an integer in [1, 9223372036854775808), got 0",
        lambda: region(size_bytes=0),
    ),
    Row(
        "BOUNDS: cannot describe region 'kv': expected address + size_bytes <= 2**64, got 0xfffffffffffffff8 + 9",
        lambda: region(address=(1 << 64) - 8, size_bytes=9),
    ),
    Row(
        "NAME: cannot describe region 'kv': expected memory in DRAM, VRAM, FILE, got 'HBM'",
        lambda: region(memory="HBM"),
    ),
    Row(
        "TYPE: cannot read memory of a region: expected a string, got 1",
        lambda: region(memory=1),
    ),
    Row(
        "TYPE: cannot read device_id of a region: expected an integer, got True",
        lambda: region(device_id=np.True_),
    ),
    # axes
    Row(
        "TYPE: cannot read name of an axis: expected a string, got a value of type bytes",
        lambda: axis(name=b"head"),
    ),
    Row(
        "TYPE: cannot read start of an axis: expected an integer, got None",
        lambda: axis(start=None),
    ),
    Row(
        "TYPE: cannot read start of an axis: expected an integer, got '0'",
        lambda: axis(start="0"),
    ),
    Row(
        "RANGE: cannot describe axis 'head': expected 0 <= start < stop <= size, got [4, 4) of 8",
        lambda: axis(start=4, stop=4),
    ),
    Row(
        "RANGE: cannot describe axis 'head': expected 0 <= start < stop <= size, got [0, 9) of 8",
        lambda: axis(stop=9),
    ),
    Row(
        "RANGE: cannot read stride_bytes of an axis: expected an integer in [0, 9223372036854775808), got -2",
        lambda: axis(stride_bytes=-2),
    ),
    Row(
        "RANGE: cannot read size of an axis: expected an integer in [0, 9223372036854775808), got an "
        "integer of 20001 bits",
        lambda: axis(size=1 << 20000),
    ),
    # contexts and groups
    Row(
        "RANGE: cannot describe a context: expected rank < size 2, got rank 2",
        lambda: Context(rank=2, size=2),
    ),
    Row(
        "RANGE: cannot read size of a context: expected an integer in [1, 9223372036854775808), got 0",
        lambda: Context(size=0),
    ),
    Row(
        "RANGE: cannot read interleave_tokens of a context: expected an integer in [1, 9223372036854775808), got 0",
        lambda: Context(0, 2, interleave_tokens=0),
    ),
    Row(
        "RANGE: cannot read tokens_per_block of a group: expected an integer in [1, 2147483648), got 0",
        lambda: Group("attn", 0),
    ),
    Row(
        "RANGE: cannot read tokens_per_block of a group: expected an integer in [1, 2147483648), got 2147483648",
        lambda: Group("attn", 1 << 31),
    ),
    Row(
        "TYPE: cannot read tokens_per_block of a group: expected an integer, got 16.0",
        lambda: Group("attn", 16.0),  # type: ignore[arg-type]
    ),
    Row(
        "TYPE: cannot read context of group 'attn': expected a Context, got a tuple of 3",
        lambda: Group("attn", 16, (0, 2, 1)),  # type: ignore[arg-type]
    ),
    Row(
        "GROUP: cannot describe group 'ssm': expected no context for a state group, got size 2",
        lambda: Group("ssm", None, Context(0, 2)),
    ),
    # views
    Row(
        "TYPE: cannot read axes of a view: expected a sequence of Axis values, got None",
        lambda: view(axes=None),
    ),
    Row(
        "TYPE: cannot read axes of a view: expected a sequence of Axis values, got a value of type Axis",
        lambda: view(axes=DIM),
    ),
    Row(
        "TYPE: cannot read axes of a view: expected Axis values only, got a tuple of 5",
        lambda: view(axes=[TOKEN, ("dim", 0, 8, 8, 2)]),
    ),
    Row(
        "DTYPE: cannot describe view 'layers.0': expected a dtype of bool, int8, uint8, float8_e4m3fn, "
        "float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, float8_e8m0fnu, int16, uint16, float16, "
        "bfloat16, int32, uint32, float32, int64, uint64, float64, got 'bf16'",
        lambda: view(dtype="bf16"),
    ),
    Row(
        "TYPE: cannot read dtype of a view: expected a string, got the type float16",
        lambda: view(dtype=np.float16),
    ),
    Row(
        "TYPE: cannot read group of a view: expected a string, got None",
        lambda: view(group=None),
    ),
    Row(
        "TYPE: cannot read region of a view: expected a string, got a value of type Group",
        lambda: view(region=Group("kv")),
    ),
    Row(
        "RANGE: cannot read num_blocks of a view: expected an integer in [1, 1099511627776), got 0",
        lambda: view(num_blocks=0),
    ),
    Row(
        "STRIDE: cannot describe view 'layers.0': expected axis 'block' to step over the 64 bytes that "
        "the finer axes span, got stride 63",
        lambda: view(block_stride_bytes=63),
    ),
    Row(
        "STRIDE: cannot describe view 'layers.0': expected axis 'token' to step over the 2 bytes that "
        "the finer axes span, got stride 0",
        lambda: view(axes=[attrs.evolve(TOKEN, stride_bytes=0), DIM]),
    ),
    Row(
        "STRIDE: cannot describe view 'layers.0': expected axis 'dim' to step over the 2 bytes that the "
        "finer axes span, got stride 1",
        lambda: view(axes=[attrs.evolve(DIM, stride_bytes=1)]),
    ),
    Row(
        "SIZE: cannot describe view 'layers.0': expected all 4 slots of the token axis, got [0, 2) (a "
        "Context spreads positions over workers)",
        lambda: view(axes=[Axis("token", 0, 2, 4, 16), DIM]),
    ),
    Row(
        "RANGE: cannot read the global size of axis 'dim' of view 'layers.0': expected an integer in [0, "
        "9223372036854775808), got 1208925819614629174706176",
        lambda: view(axes=[Axis("dim", 0, 1, 1 << 40, 0), Axis("dim", 0, 1, 1 << 40, 0)]),
    ),
    # workers
    Row(
        "TYPE: cannot read engine_id of a worker: expected a string, got 7",
        lambda: worker(engine_id=7),
    ),
    Row(
        "TYPE: cannot read rank of a worker: expected an integer, got None",
        lambda: worker(rank=None),
    ),
    Row(
        "TYPE: cannot read regions of a worker: expected a sequence of Region values, got None",
        lambda: worker(regions=None),
    ),
    Row(
        "TYPE: cannot read groups of a worker: expected Group values only, got None",
        lambda: worker(groups=[None]),
    ),
    Row(
        "TYPE: cannot read views of a worker: expected a sequence of View values, got a value of type View",
        lambda: worker(views=view()),
    ),
    Row(
        "NAME: cannot describe worker p/0: expected each region name once, got 'kv' twice",
        lambda: worker(regions=[region(), region()]),
    ),
    Row(
        "NAME: cannot place view 'layers.0' of worker p/0: expected each part of a tensor once in group 'attn', "
        "got two views of the same part (does each layer have a name of its own?)",
        lambda: worker(views=[view(), view(offset_bytes=640)], regions=[region(size_bytes=1280)]),
    ),
    Row(
        "NAME: cannot describe worker p/0: expected each group name once, got 'attn' twice",
        lambda: worker(groups=[Group("attn", 4), Group("attn")]),
    ),
    Row(
        "NAME: cannot place view 'layers.0' of worker p/0: expected one of the regions 'kv', got 'kv.1'",
        lambda: worker(views=[view(region="kv.1")]),
    ),
    Row(
        "NAME: cannot place view 'layers.0' of worker p/0: expected a group of its worker, got 'attn'",
        lambda: worker(groups=[]),
    ),
    Row(
        "BOUNDS: cannot place view 'layers.0' of worker p/0: expected bytes within [0, 640) of region "
        "'kv', got [0, 704)",
        lambda: worker(views=[view(num_blocks=11)]),
    ),
    Row(
        "BOUNDS: cannot place view 'layers.0' of worker p/0: expected bytes within [0, 640) of region "
        "'kv', got [1, 641)",
        lambda: worker(views=[view(offset_bytes=1)]),
    ),
    Row(
        "SIZE: cannot page view 'layers.0' of worker p/0: expected a token axis of 8 slots for group "
        "'attn', got a token axis of 4 slots",
        lambda: worker(groups=[Group("attn", 8)]),
    ),
    Row(
        "SIZE: cannot page view 'layers.0' of worker p/0: expected a token axis of 4 slots for group "
        "'attn', got no token axis",
        lambda: worker(views=[view(axes=[DIM])]),
    ),
    Row(
        "SIZE: cannot page view 'layers.0' of worker p/0: expected no token axis for group 'attn', got a "
        "token axis of 4 slots",
        lambda: worker(groups=[Group("attn")]),
    ),
    Row(
        "OVERLAP: cannot place view 'layers.1' of worker p/0: expected bytes of its own in region 'kv' "
        "for group 'attn', got byte 48 of region 'kv': block 0 of 'layers.1' and block 0 of 'layers.0'",
        lambda: worker(views=[view(num_blocks=8), view(name="layers.1", num_blocks=8, offset_bytes=48)]),
    ),
    Row(
        "RANGE: cannot place view 'v.0': expected at most 262144 runs in the blocks of views that share regions, "
        "got 2097152",
        lambda: worker(
            regions=[region(size_bytes=1 << 30)],
            views=[
                view(
                    name=f"v.{i}",
                    axes=[TOKEN, Axis("dim", 0, 1 << 19, 1 << 19, 64)],
                    num_blocks=1,
                    offset_bytes=i << 26,
                )
                for i in range(2)
            ],
        ),
    ),
    # tensors
    Row(
        "TYPE: cannot read a tensor: expected data_ptr() and stride(), or __array_interface__, got a list of 3",
        lambda: read_view([1, 2, 3]),
    ),
    Row(
        "TYPE: cannot read the pattern of a tensor's view: expected a value of type str, got None",
        lambda: read_view(pattern=None),
    ),
    Row(
        "TYPE: cannot read the name of a tensor's view: expected a value of type str, got None",
        lambda: read_view(name=None),
    ),
    Row(
        "TYPE: cannot read the region of a tensor's view: expected a value of type Region, got 'kv'",
        lambda: read_view(region="kv"),
    ),
    Row(
        "DTYPE: cannot read a tensor: expected a dtype of bool, int8, uint8, float8_e4m3fn, "
        "float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, float8_e8m0fnu, int16, uint16, float16, "
        "bfloat16, int32, uint32, float32, int64, uint64, float64, got 'complex64'",
        lambda: read_view(StandIn((10, 4, 8), dtype="torch.complex64")),
    ),
    Row(
        "SIZE: cannot read a tensor: expected at least one element, got shape (10, 4, 0)",
        lambda: read_view(StandIn((10, 4, 0))),
    ),
    Row(
        "AXES: cannot read a tensor as view 'layers.0': expected one name for each of its 3 dimensions, "
        "'block' once, got 'block token head dim'",
        lambda: read_view(pattern="block token head dim"),
    ),
    Row(
        "AXES: cannot read a tensor as view 'layers.0': expected one name for each of its 3 dimensions, "
        "'block' once, got 'page token dim'",
        lambda: read_view(pattern="page token dim"),
    ),
    Row(
        "STRIDE: cannot read a tensor as view 'layers.0': expected strides >= 0, got -2 on 'dim'",
        lambda: read_view(StandIn((10, 4, 8), (32, 8, -1))),
    ),
    Row(
        "BOUNDS: cannot read a tensor as view 'layers.0': expected an address in region 'kv' from 0x1000 on, got 0xffe",
        lambda: read_view(StandIn((10, 4, 8), address=4094)),
    ),
    Row(
        "TYPE: cannot read the parts of view 'layers.0': expected a mapping of axis names, got a list of 1",
        lambda: read_view(parts=["dim"]),
    ),
    Row(
        "AXES: cannot read the parts of view 'layers.0': expected axes that appear once in 'block token "
        "dim', got 'head'",
        lambda: read_view(parts={"head": (0, 4, 8)}),
    ),
    Row(
        "AXES: cannot read the parts of view 'layers.0': expected axes that appear once in 'block dim dim', got 'dim'",
        lambda: read_view(pattern="block dim dim", parts={"dim": (0, 4, 8)}),
    ),
    Row(
        "TYPE: cannot read the part of axis 'dim' of view 'layers.0': expected (start, stop, size), got a tuple of 2",
        lambda: read_view(parts={"dim": (0, 8)}),
    ),
    Row(
        "TYPE: cannot read the part of axis 'dim' of view 'layers.0': expected an integer, got 0.0",
        lambda: read_view(parts={"dim": (0.0, 8, 16)}),
    ),
    Row(
        "SIZE: cannot read the part of axis 'dim' of view 'layers.0': expected 8 coordinates, as the "
        "tensor has, got [0, 4) of 8",
        lambda: read_view(parts={"dim": (0, 4, 8)}),
    ),
    Row(
        "RANGE: cannot describe axis 'dim': expected 0 <= start < stop <= size, got [4, 12) of 8",
        lambda: read_view(parts={"dim": (4, 12, 8)}),
    ),
    # block tables
    Row(
        "TYPE: cannot read a block table: expected a flat sequence of integers, got float64 of shape (1,)",
        lambda: Blocks([0.5]),
    ),
    Row(
        "TYPE: cannot read a block table: expected a flat sequence of integers, got int64 of shape (1, 2)",
        lambda: Blocks([[1, 2]]),
    ),
    Row(
        "TYPE: cannot read a block table: expected a flat sequence of integers, got object of shape ()",
        lambda: Blocks(None),
    ),
    Row(
        "BLOCKS: cannot read a block table: expected ids in [0, 2147483648), got -1",
        lambda: Blocks([3, -1]),
    ),
    Row(
        "BLOCKS: cannot read a block table: expected ids in [0, 2147483648), got 2147483648",
        lambda: Blocks(np.array([1 << 31])),
    ),
    Row(
        "RANGE: cannot read first of Blocks: expected an integer in [0, 281474976710656), got -1",
        lambda: Blocks([1], first=-1),
    ),
    # pairs
    Row(
        "TYPE: cannot read remotes: expected Worker values only, got None",
        lambda: plan_reads(worker(), [None]),  # type: ignore[list-item]
    ),
    Row(
        "WORKER: cannot plan with remotes: expected each worker once, got p/0 2 times",
        lambda: plan_reads(worker(), [worker()]),
    ),
    Row(
        "WORKER: cannot plan with siblings: expected each worker once, got p/0 2 times",
        lambda: plan_writes(worker(), [worker(engine_id="d")], [worker()]),
    ),
    Row(
        "WORKER: cannot plan with sources: expected each worker once, got p/0 2 times",
        lambda: plan_mesh([worker(engine_id="d")], [worker(), worker()]),
    ),
    Row(
        "TYPE: cannot read not_transferred: expected a sequence of names, got 'layers.0'",
        lambda: plan_reads(worker(), [worker(engine_id="d")], not_transferred="layers.0"),
    ),
    Row(
        "TENSOR: cannot plan for d/0: expected every part of its tensors to be held by a source, got "
        "layers.0: all of it (name tensors in not_transferred if they need not move)",
        lambda: plan_reads(worker(engine_id="d"), []),
    ),
    Row(
        "TENSOR: cannot plan for d/0: expected every part of its tensors to be held by a source, got "
        "layers.1: all of it (name tensors in not_transferred if they need not move)",
        lambda: pair(name="layers.1"),
    ),
    Row(
        "DTYPE: cannot pair the dtype of tensor 'layers.0': expected float16 (destination d/0), got "
        "bfloat16 (source p/0)",
        lambda: pair(dtype="float16"),
    ),
    Row(
        "AXES: cannot pair the axes of tensor 'layers.0': expected width (destination d/0), got dim (source p/0)",
        lambda: pair(axes=[TOKEN, attrs.evolve(DIM, name="width")]),
    ),
    Row(
        "SIZE: cannot pair the size of axis 'dim' of tensor 'layers.0': expected 4 (destination d/0), "
        "got 8 (source p/0)",
        lambda: pair(axes=[TOKEN, Axis("dim", 0, 4, 4, 2)]),
    ),
    Row(
        "GROUP: cannot pair the group of tensor 'layers.0': expected a token group (destination d/0), "
        "got a state group (source p/0)",
        lambda: group_pair(Group("attn", 4), Group("attn")),
    ),
    Row(
        "COVER: cannot plan for d/0: expected every part of its tensors to be held by a source, got "
        "layers.0: head [2, 3) [7, 8) of 8",
        lambda: head_pair(Axis("head", 0, 8, 8, 64), [Axis("head", 0, 2, 8, 64), Axis("head", 3, 7, 8, 64)]),
    ),
    Row(
        "COVER: cannot plan for d/0: expected every part of its tensors to be held by a source, got "
        "layers.0: positions [0, 1) of every 3",
        lambda: group_pair(Group("attn", 4, Context(0, 3)), Group("attn", 4, Context(2, 3))),
    ),
    Row(
        "RANGE: cannot align the contexts of tensor 'layers.0': expected a common cycle of at most "
        "1048576 positions, got 1099503239183",
        lambda: group_pair(Group("attn", 4, Context(0, 1048573)), Group("attn", 4, Context(0, 1048571))),
    ),
    Row(
        "RANGE: cannot describe axis 'token': expected at most 1048576 pieces, got 1048577",
        lambda: group_pair(
            Group("attn", 2 * PIECES),
            Group("attn", 2 * PIECES),
            Axis("token", 0, PIECES, PIECES, 48),
            Axis("token", 0, 2, 2, 16),
        ),
    ),
    # requests
    Row(
        "BLOCKS: cannot bind local group 'attn': expected a block table, got none",
        lambda: bind(local={}),
    ),
    Row(
        "TYPE: cannot bind remote group 'attn': expected Blocks, got a list of 3",
        lambda: bind(remote={"attn": [3, 1, 2]}),
    ),
    Row(
        "NAME: cannot bind a block table: expected a group of 'attn', got 'ssm'",
        lambda: bind(local={"attn": Blocks([3, 1, 2]), "ssm": Blocks([0])}),
    ),
    Row(
        "BLOCKS: cannot bind local group 'attn': expected each destination block once, got block 3 twice",
        lambda: bind(local={"attn": Blocks([3, 1, 3])}),
    ),
    Row(
        "BLOCKS: cannot bind remote group 'attn': expected block ids below 10, the pool's size, got 10",
        lambda: bind(remote={"attn": Blocks([3, 1, 10])}),
    ),
    Row(
        "BLOCKS: cannot bind local group 'attn': expected blocks [3, 4) of the request to be listed, got [0, 3)",
        lambda: bind(tokens=(0, 13)),
    ),
    Row(
        "BLOCKS: cannot bind local group 'attn': expected blocks [0, 3) of the request to be listed, got [1, 3)",
        lambda: bind(local={"attn": Blocks([1, 2], first=1)}),
    ),
    Row(
        "BLOCKS: cannot bind remote group 'attn': expected blocks [0, 3) of the request to be listed, got [0, 2) "
        "(no token range given: every position in the destination's blocks is transferred)",
        lambda: bind(remote={"attn": Blocks([1, 2])}, tokens=None),
    ),
    Row(
        "BLOCKS: cannot bind remote group 'attn': expected blocks [0, 3) of the request to be listed, got [0, 2)",
        lambda: bind(remote={"attn": Blocks([1, 2])}),
    ),
    Row(
        "BLOCKS: cannot bind remote group 'attn': expected a block for each that the other side has, got no block 1 "
        "of the request",
        lambda: bind(remote={"attn": Blocks([1, 0, 2], null=0)}),
    ),
    Row(
        "BLOCKS: cannot bind local group 'attn': expected blocks [0, 3) of the request to be listed, got [0, 2)",
        lambda: bind(local={"attn": Blocks([0, 3], null=0)}),
    ),
    Row(
        "BLOCKS: cannot bind local group 'attn': expected blocks [0, 3) of the request to be listed, got [0, 2)",
        lambda: bind_writes(Blocks([1, 2]), Blocks([1, 2, 3])),
    ),
    Row(
        "BLOCKS: cannot bind remote group 'attn': expected each destination block once, got block 2 twice",
        lambda: bind_writes(Blocks([1, 2, 3]), Blocks([2, 2, 3])),
    ),
    Row(
        "TOKENS: cannot bind tokens: expected start <= stop, got [5, 3)",
        lambda: bind(tokens=(5, 3)),
    ),
    Row(
        "RANGE: cannot read a token range: expected an integer in [0, 281474976710656), got -1",
        lambda: bind(tokens=(-1, 3)),
    ),
    Row(
        "TYPE: cannot read a token range: expected an integer, got 3.0",
        lambda: bind(tokens=(0, np.float32(3))),
    ),
    Row(
        "TYPE: cannot read a range of tokens: expected (start, stop), got 12",
        lambda: bind(tokens=12),
    ),
    Row(
        "NAME: cannot bind a token range: expected a group of 'attn', got 'ssm'",
        lambda: bind(tokens={"ssm": (0, 1)}),
    ),
    Row(
        "INT: cannot number the descriptors of a request: expected ids below 2147483648, got 18253611006 "
        "(a smaller pool, or fewer tensors per plan, has fewer ids)",
        bind_large,
    ),
    Row(
        "PROOF: cannot certify the plan for d/0: expected every byte of layers.0, position 0, once, "
        "got bytes not moved",
        certify_nothing,
    ),
)


def refused(call: Callable[[], object]) -> KVPlanError:
    """The error that a call ends in."""
    with pytest.raises(KVPlanError) as caught:
        call()
    return caught.value


every_row = pytest.mark.parametrize("row", REFUSALS, ids=[row.code for row in REFUSALS])


@every_row
def test_a_refusal_says_exactly_this(row: Row) -> None:
    """The text of each refusal is what the table says, and its code is the error's and one of the closed set."""
    error = refused(row.call)
    assert str(error) == row.message
    assert error.code == row.code
    assert row.code in CODES


def test_the_table_has_every_code_of_the_core() -> None:
    """No code that values, pairs and requests can be refused with is missing from the table."""
    assert {row.code for row in REFUSALS} == set(CODES) - NOT_CORE


GRAMMAR = re.compile(r"[A-Z]+: cannot .+: expected .+, got .+?( \(.+\))?")
FOREIGN = re.compile(r"np\.|array\(|dtype\(|<.* at 0x|<class|<attrs|Attribute\(|Error")


def in_grammar(text: str) -> bool:
    """Whether a message is one printable line of the one grammar, without any library's notation for a value."""
    return text.isprintable() and GRAMMAR.fullmatch(text) is not None and FOREIGN.search(text) is None


@every_row
def test_every_message_follows_the_grammar(row: Row) -> None:
    """One line: what cannot be done, the rule, the value, and a hint in brackets where there is one."""
    assert in_grammar(row.message)


@pytest.mark.parametrize(
    "text",
    [
        "SIZE: cannot pair x: expected 1",
        "SIZE: cannot pair x, got 2",
        "SIZE: cannot pair x: expected 1,\n got 2",
        "SIZE: cannot pair x: expected 1, got np.int64(2)",
        "SIZE: cannot pair x: expected 1, got array([1, 2])",
        "SIZE: cannot pair x: expected 1, got <object object at 0x7f00>",
    ],
)
def test_the_grammar_refuses_what_it_should(text: str) -> None:
    """The check of the grammar can fail: messages with a part missing, two lines or a foreign notation do."""
    assert not in_grammar(text)


def plain(value: object) -> bool:
    """Whether a value is made of the standard library's plain types."""
    if isinstance(value, tuple):
        return all(map(plain, value))
    return type(value) in (int, str, bool, float, type(None))


@every_row
def test_an_error_survives_pickling(row: Row) -> None:
    """Code, text and details are the same after a round trip, so a worker process can report to its parent."""
    error = refused(row.call)
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is KVPlanError
        assert (other.code, str(other), dict(other.details)) == (error.code, str(error), dict(error.details))


@every_row
def test_details_are_plain_values(row: Row) -> None:
    """Details hold numbers, strings and tuples, never an array, a numpy scalar or the object that was refused."""
    details = refused(row.call).details
    assert all(map(plain, details.values())), dict(details)


def test_details_cannot_be_changed() -> None:
    """Details are read-only."""
    details = refused(lambda: region(size_bytes=0)).details
    with pytest.raises(TypeError, match="does not support item assignment"):
        details["value"] = 1  # type: ignore[index]


def test_a_hint_stands_in_brackets_at_the_end() -> None:
    """With a hint the text ends in it, without one it ends in the value."""
    with_hint = KVPlanError("SIZE", "pair", expected="1", got="2", hint="try 1", size=2)
    assert str(with_hint) == "SIZE: cannot pair: expected 1, got 2 (try 1)"
    assert str(KVPlanError("SIZE", "pair", expected="1", got="2")) == "SIZE: cannot pair: expected 1, got 2"
    assert with_hint.details == {"size": 2}


WRONG: tuple[Any, ...] = (
    *(None, "", "x", "x\ny", "\ud800", b"x", True, np.True_, 1.0, np.float64(2), np.longdouble(1), float("nan"), 1j),
    *(-1, np.int64(-1), np.uint64(1 << 63), 1 << 63, 1 << 64, 1 << 20000, np.str_("q"), np.dtype("float16")),
    *((), [], {}, {1: 2}, set(), (1, 2), [None], ["x"], range(3), object(), int, iter(())),
    *(np.arange(2), np.array(3), np.zeros(0), TOKEN, Group("attn", 4), StandIn((1,))),
)
MAKERS: Mapping[Callable[..., object], tuple[str, ...]] = {
    region: ("name", "address", "size_bytes", "memory", "device_id"),
    axis: ("name", "start", "stop", "size", "stride_bytes"),
    Context: ("rank", "size", "interleave_tokens"),
    lambda **changes: Group(**{"name": "attn", **changes}): ("name", "tokens_per_block", "context"),
    view: tuple(field.name for field in attrs.fields(View)),
    worker: tuple(field.name for field in attrs.fields(Worker)),
    read_view: ("tensor", "pattern", "name", "group", "region", "parts"),
    lambda **changes: read_view(parts={"dim": changes["part"]}): ("part",),
    lambda **changes: read_view(parts={"dim": (changes["start"], 8, 8)}): ("start",),
}


@pytest.mark.parametrize(("make", "field"), [(make, field) for make, fields in MAKERS.items() for field in fields])
def test_a_value_of_any_type_is_taken_or_refused_in_the_grammar(make: Callable[..., object], field: str) -> None:
    """No wrong type in any field ends in another exception, or in a message that shows how Python prints it."""
    errors = []
    for wrong in WRONG:
        try:
            make(**{field: wrong})
        except KVPlanError as caught:
            errors.append(caught)
    assert len(errors) > len(WRONG) // 2
    for error in errors:
        assert in_grammar(str(error))
        assert all(map(plain, error.details.values()))


def test_shown_is_short() -> None:
    """A long string or number does not make a long message."""
    assert shown("x" * 1000) == f"'{'x' * 79}..."
    assert shown(-(1 << 5000)) == "an integer of 5001 bits"
