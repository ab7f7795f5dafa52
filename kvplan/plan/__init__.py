"""Plans: from the descriptions of two engines to the descriptor ids of a request.

Theory of operation
===================

A plan is made once for each remote engine and knows no request. Binding turns the block tables and
the token range of one request into ids, with numpy alone. No stage knows a model, a layout or an
engine: everything is views.

::

    workers --match--> tensors on both sides --cells--> boxes, each with one source
            --runs--> contiguous bytes --rows--> strided rows, registered once; series of ids
    block tables, range --bind--> ids into the rows

1. **match** pairs tensors by name. Tensors of equal geometry are planned once: all layers of a
   kind.
2. **cells** cuts the destination's shard of a tensor where the shard of a source begins or ends,
   along every axis, and chooses one source for each box.
3. **runs** finds the bytes of a box that are contiguous on both sides. First within one token: axes
   whose strides equal on both sides merge, and neighbouring heads, K and V, layers and tensors
   join. Then across tokens, inside a block.
4. **rows** puts each run into a strided row: equal runs at a constant step, repeated in
   every block of the pool. A descriptor's id is ``base + step * block id + slot term``, where only
   the block id depends on the request. Runs that share all but the base are one **series**.
5. **bind** computes these sums for the blocks of a request: one addition for each series.

Stages 1 to 4 know a destination and its sources. **pairs** runs them for every two workers;
**transfer** and **mesh** say which side is local.

Block sizes need not divide each other, because positions repeat after a *period*, the least common
multiple of both block sizes (and of the context-parallel cycles). In a period there are a few
**block pairs**: one block of the destination with one of the source, and the positions that are in
both::

    position        0              32      48      64              96
    destination     |       block 0        |        block 1        |      blocks of 48 tokens
    source          |   block 0     |    block 1    |    block 2   |      blocks of 32 tokens
    block pairs     |     0-0       |  0-1 |  1-1   |      1-2     |

    tokens (0, 40)  |###############|oo                          #: longest runs   o: token by token

>>> import numpy as np
>>> from kvplan import Group
>>> from kvplan.plan.block_pairs import block_pairs
>>> pairs = block_pairs((Group("attn", 48), Group("attn", 32)), np.array([[0, 1]]), 1, 96)
>>> list(zip(pairs.position.tolist(), *pairs.block.tolist()))
[(0, 0, 0), (32, 0, 1), (48, 1, 1), (64, 1, 2)]

Nothing joins across two blocks of one side: any two blocks may be anywhere in the pool. Inside a
block pair the tokens of a longest run follow each other on both sides. The positions that such runs
cover are the *spans* of a period: most often a block pair each. A block pair has several spans
where one side keeps its tokens in segments, such as kernel blocks of 16 in a block of 64.

A request's range may cover a span or cut it. A span that is covered moves by its longest runs. One
that is cut, at most the first and the last, moves token by token:

>>> from kvplan import Model, plan_reads
>>> model = Model.shipped("qwen2.5-1.5b")
>>> (decode,) = model.engine("decode", tokens_per_block=48)
>>> (prefill,) = model.engine("prefill", tokens_per_block=32)
>>> (pair,) = plan_reads(decode, [prefill]).pairs
>>> (attention,) = pair.group_pairs
>>> attention.spans
((0, 32), (32, 48), (48, 64), (64, 96))
>>> for series, tokens in attention.moves(0, 40):
...     print(type(series).__name__, tokens)
RunSeries (0, 32)
RunSeries (0, 32)
TokenSeries (32, 40)

All offsets are relative to regions until the end, so remote workers of equal geometry share
everything but base addresses.

Bounds
======

Workers come from the offers of peers, and a small offer can describe a large plan. So **estimate**
counts what each stage is about to list: ranges of axes, cells, runs of one token, their slots on
both sides, block pairs and rows. A plan whose estimate exceeds its :class:`kvplan.Budget` is
refused with ``RANGE``. The stages themselves know no budget. ``python -m benchmarks.hostile`` shows
what offers cost that are made to cost much.

Longer runs are optional: where more than 2**20 ranges of a period would have to be joined, tokens
move one by one. Requests come from the caller, not from a peer, so their ids have a limit of their
own: 2**28 with one worker.
"""

from kvplan.plan.bind import Workspace
from kvplan.plan.cost import Cost, PairCost
from kvplan.plan.mesh import MeshPlan, contacts, plan_mesh
from kvplan.plan.series import Ids
from kvplan.plan.specs import Pair, ReadSpec
from kvplan.plan.tables import Descriptors, Table
from kvplan.plan.tails import tails
from kvplan.plan.transfer import TransferPlan, plan_reads, plan_writes

__all__ = [
    "Cost",
    "Descriptors",
    "Ids",
    "MeshPlan",
    "Pair",
    "PairCost",
    "ReadSpec",
    "Table",
    "TransferPlan",
    "Workspace",
    "contacts",
    "plan_mesh",
    "plan_reads",
    "plan_writes",
    "tails",
]
