"""What a connector's own tests need: an assertion on the descriptors that it makes.

A connector for 6 KV heads cuts slices out of blocks. It takes the prefill worker that has the first of a decode
worker's heads for the one that has them all. So they are, where one TP size divides the other:

>>> from kvplan import Axis, Blocks, Group, Region, View, Worker
>>> HEAD = 16 * 256  # bytes that a block of 16 tokens has for each head
>>> def slices(rank, tp, ids, remote_tp, remote_ids):
...     heads, remote_heads = 6 // tp, 6 // remote_tp
...     remote, first = divmod(rank * heads, remote_heads)
...     ours = [(((rank + 1) << 40) + block * heads * HEAD, heads * HEAD, 0) for block in ids]
...     starts = [(block * remote_heads + first) * HEAD for block in remote_ids]
...     theirs = [(((remote + 1) << 40) + start, heads * HEAD, 0) for start in starts]
...     return (("decode", rank), ("prefill", remote)), (ours, theirs)
>>> def engine(name, tp):
...     share, step = 6 // tp, 6 // tp * HEAD
...     for rank in range(tp):
...         head = Axis("head", rank * share, (rank + 1) * share, 6, HEAD)
...         axes = [head, Axis("token", 0, 16, 16, 256), Axis("dim", 0, 128, 128, 2)]
...         region = Region("kv", (rank + 1) << 40, 50 * step)
...         view = View("layers.0.k", "attn", region, "bfloat16", axes, 50, step)
...         yield Worker(name, rank, [region], [Group("attn", 16)], [view])
>>> def check(tp, remote_tp):
...     copies = dict(slices(rank, tp, [7, 3], remote_tp, [40, 12]) for rank in range(tp))
...     tables = {"local": {"attn": Blocks([7, 3])}, "remote": {"attn": Blocks([40, 12])}}
...     print(assert_copies(engine("decode", tp), engine("prefill", remote_tp), copies, **tables))
>>> check(tp=6, remote_tp=2)
verified: 49152 bytes in 12 descriptors to 6 workers, 0 unused slots; VALUE, COVER, DISJOINT, BOUNDS, OWN hold
>>> check(tp=3, remote_tp=2)
Traceback (most recent call last):
...
AssertionError: not verified: 49152 bytes in 6 descriptors to 3 workers
VALUE: at decode/1: 8192 bytes wrong, first: layers.0.k dim 0 head 3 byte 0 of position 0
(layers.0.k dim 0 head 3 byte 0 in group attn block 7 slot 0, address 0x2000000f000 of decode/1)
holds bytes outside the request, copied from
layers.0.k dim 0 head 0 byte 0 in group attn block 41 slot 0, address 0x1000007b000 of prefill/0

Head 3 is on prefill/1; what follows head 2 on prefill/0 is another request's block.

Random requests for one's own engines, and random engines, are in :mod:`kvplan.testing.strategies`, which needs the
``testing`` extra. Any test runner will do.
"""

from kvplan.testing.asserts import assert_copies

__all__ = ["assert_copies"]
