"""The probe of real memory: right descriptions pass, and seven wrong ones are named by what they have in common."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Axis, Blocks, Context, Group, KVPlanError, Region, View, Worker, plan_mesh, region_of, view_of
from kvplan.describe import ITEMSIZE
from kvplan.testing import Values, assert_memory
from kvplan.testing.memory import _base, _numbers, region_bytes

LAYERS, HEADS, TOKENS, DIM = 4, 4, 4, 8
BLOCKS = {"attn": Blocks([5, 2, 7])}
SPAN = (0, 10)


class Engine:
    """One rank of an engine whose attention layers have caches of their own, and its write path."""

    def __init__(self, rank: int = 0, tp: int = 2, dtype: Any = np.float16, tokens: int = TOKENS) -> None:
        self.rank, self.tp, self.tokens = rank, tp, tokens
        self.caches = [self.cache(dtype) for _ in range(LAYERS)]

    def cache(self, dtype: Any) -> np.ndarray:
        return np.zeros((9, 2, HEADS // self.tp, self.tokens, DIM), dtype)

    def write(self, values: Values) -> None:
        """Store keys and values of all heads' tokens as a forward pass does: this rank's heads, slot by slot."""
        heads = slice(self.rank * HEADS // self.tp, (self.rank + 1) * HEADS // self.tp)
        slots = [BLOCKS["attn"].ids[i // self.tokens] * self.tokens + i % self.tokens for i in range(SPAN[1])]
        for layer, cache in enumerate(self.caches):
            for kv in range(2):
                stored = values(f"layers.{layer}", "token head dim", kv=kv)[:, heads]
                for slot, token in zip(slots, stored, strict=True):
                    cache[slot // self.tokens, kv, :, slot % self.tokens] = token

    def worker(self, pattern: str = "block kv head token dim", name: str = "decode", **changed: Any) -> Worker:
        """The right description, or with another pattern, rank or order of caches a wrong one."""
        rank, caches = changed.get("rank", self.rank), changed.get("caches", self.caches)
        size = HEADS // self.tp
        shards = {"head": (rank * size, (rank + 1) * size, HEADS)}
        regions = [region_of(cache, f"kv.{layer}") for layer, cache in enumerate(caches)]
        views = [
            view_of(cache, pattern, name=f"layers.{layer}", group="attn", region=region, shards=shards)
            for layer, (cache, region) in enumerate(zip(caches, regions, strict=True))
        ]
        return Worker(name, self.rank, regions, [Group("attn", views[0].sizes["token"])], views)


def report(worker: Worker, write: Callable[[Values], object], blocks: Any = None, tokens: Any = SPAN) -> str:
    """What the probe says, without the first byte, whose address changes."""
    with pytest.raises(AssertionError) as caught:
        assert_memory([worker], write, blocks=blocks or BLOCKS, tokens=tokens)
    return re.sub(r"\n  first: .*|, first: .*", "", str(caught.value)).partition("\n")[2]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "int8", "int32"])
def test_right_descriptions_pass(dtype: str) -> None:
    """Two ranks of every dtype of numpy's."""
    ranks = [Engine(rank, dtype=dtype) for rank in range(2)]

    def write(values: Values) -> None:
        for rank in ranks:
            rank.write(values)

    assert_memory([rank.worker() for rank in ranks], write, blocks=BLOCKS, tokens=SPAN)


def test_layers_in_reverse() -> None:
    engine = Engine()
    seen = report(engine.worker(caches=engine.caches[::-1]), engine.write)
    assert seen == "VALUE: at decode/0: 2560 bytes wrong: everywhere: layers.n holds layers.3-n"


def test_heads_of_the_next_rank() -> None:
    engine = Engine(1)
    assert report(engine.worker(rank=0), engine.write) == (
        "VALUE: at decode/1: 2560 bytes wrong: everywhere: head h holds head h+2"
    )


def test_a_tensor_that_was_allocated_anew() -> None:
    """The worker keeps the memory of the old one, so that it can be read."""
    engine = Engine()
    worker = engine.worker()
    engine.caches[2] = engine.cache(np.float16)
    assert report(worker, engine.write) == "COVER: at decode/0: 640 bytes never written: layers.2"


def test_k_and_v_exchanged() -> None:
    engine = Engine()
    worker = engine.worker()
    swapped = [attrs.evolve(view, axes=[a for a in view.axes if a.name != "kv"]) for view in worker.views]
    views = []
    for view in swapped:
        stride = 2 * TOKENS * DIM * 2  # of V, with the two heads of this rank
        for kv, offset in ((0, stride), (1, 0)):
            axes = [Axis("kv", kv, kv + 1, 2, 0), *view.axes]
            views.append(attrs.evolve(view, axes=axes, offset_bytes=offset))
    assert report(attrs.evolve(worker, views=views), engine.write) == (
        "VALUE: at decode/0: 2560 bytes wrong: everywhere: K holds V, V holds K"
    )


def test_a_wrong_block_size() -> None:
    """The engine has blocks of 8 tokens, described as blocks of 4 with the same strides."""
    engine = Engine(tokens=8)
    worker = engine.worker()
    views = []
    for view in worker.views:
        axes = [attrs.evolve(a, stop=4, size=4) if a.name == "token" else a for a in view.axes]
        views.append(attrs.evolve(view, axes=axes))
    seen = report(attrs.evolve(worker, groups=[Group("attn", 4)], views=views), engine.write)
    assert seen == (
        "VALUE: at decode/0: 512 bytes wrong: positions 4-5: position p holds position p+4\n"
        "COVER: at decode/0: 1024 bytes never written: positions 6-9"
    )


def test_another_dtype_of_the_same_size() -> None:
    """It moves right between engines that share the mistake; a dtype that converts would not."""
    engine = Engine()
    worker = engine.worker()
    worker = attrs.evolve(worker, views=[attrs.evolve(view, dtype="bfloat16") for view in worker.views])
    assert report(worker, engine.write) == "VALUE: at decode/0: 2560 bytes wrong: everywhere: values of float16"


def test_strides_of_another_layout() -> None:
    """Heads and tokens are exchanged; there are as many of one as of the other."""
    engine = Engine(tp=1)
    seen = report(engine.worker("block kv token head dim"), engine.write)
    assert "384 bytes: positions 0,4,8: position p holds position p+1, head 1 holds head 0" in seen


def test_a_rank_of_a_context_that_has_no_token() -> None:
    """Ranks hold 4 positions in turn; of 4 tokens, the second has none."""
    engine = Engine(tp=1)
    first, second = engine.worker(name="first"), engine.worker(name="second")
    turns = [
        attrs.evolve(worker, groups=[Group("attn", TOKENS, Context(rank, 2, TOKENS))])
        for rank, worker in enumerate((first, second))
    ]

    def write(values: Values) -> None:
        for layer, cache in enumerate(engine.caches):
            for kv in range(2):
                cache[5, kv] = values(f"layers.{layer}", "head token dim", kv=kv)

    assert_memory(turns, write, blocks={"attn": Blocks([5])}, tokens=(0, 4))


CONV = {"x": 4, "B": 2, "C": 2}


def mamba(order: str, part: int = 0) -> tuple[Worker, Callable[[Values], None]]:
    """One rank of two with a convolution's state, in memory always x, B, C, and as described in some order."""
    cache = np.zeros((6, sum(CONV.values()) // 2, 3), np.float32)
    region = region_of(cache)
    views, at = [], 0
    for name in order:
        size = CONV[name] // 2
        shards = {"channel": (part * size, part * size + size, 2 * size)}
        tensor = cache[:, at : at + size]
        views.append(
            view_of(tensor, "block channel width", name=f"conv.{name}", group="state", region=region, shards=shards)
        )
        at += size

    def write(values: Values) -> None:
        states = [values(f"conv.{name}", "channel width")[: size // 2] for name, size in CONV.items()]
        cache[3] = np.concatenate(states)

    return Worker("decode", 0, [region], [Group("state", None)], views), write


def test_a_convolution_split_in_another_order() -> None:
    state = {"state": Blocks([3])}
    right, write = mamba("xBC")
    assert_memory([right], write, blocks=state)
    wrong, write = mamba("xCB")
    assert report(wrong, write, state, None) == (
        "VALUE: at decode/0: 24 bytes wrong: conv.C, conv.B: conv.C holds conv.B, conv.B holds conv.C"
    )


def test_the_state_of_another_rank() -> None:
    wrong, write = mamba("xBC", part=1)
    seen = report(wrong, write, {"state": Blocks([3])}, None)
    assert "conv.x: channel c holds channel c-2" in seen
    assert "conv.B, conv.C: channel 1 holds channel 0" in seen


def test_memory_after_a_transfer() -> None:
    """Prefill writes, memmove replaces the transfer, and decode's memory is read: its layers are in reverse."""
    prefill, decode = [Engine(rank) for rank in range(2)], Engine(tp=1, tokens=6)
    sources = [rank.worker(name="prefill") for rank in prefill]
    local = {"attn": Blocks([3, 1])}

    def write(values: Values, worker: Worker) -> None:
        for rank in prefill:
            rank.write(values)
        for plan in plan_mesh([worker], sources).plans:
            for spec in plan.bind(local=local, remote=BLOCKS, tokens=SPAN):
                for (to, length, _), (start, _, _) in zip(*(side.tolist() for side in spec.descriptors()), strict=True):
                    ctypes.memmove(to, start, length)

    right = decode.worker()
    assert_memory([right], lambda values: write(values, right), blocks=local, tokens=SPAN)
    wrong = decode.worker(caches=decode.caches[::-1])
    written = lambda values: write(values, wrong)  # noqa: E731
    with pytest.raises(AssertionError, match=r"layers.n holds layers.3-n"):
        assert_memory([right], written, blocks=local, tokens=SPAN)


def test_memory_that_something_else_overwrites() -> None:
    """What it writes is no label."""
    engine, random = Engine(), np.random.default_rng(1)

    def write(values: Values) -> None:
        engine.write(values)
        engine.caches[1][5, 0, 1, :2] = random.standard_normal((2, DIM))

    assert report(engine.worker(), write) == (
        "VALUE: at decode/0: 32 bytes wrong: layers.1, positions 0-1, K, head 1: no label"
    )


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_all_digits_are_exact(dtype: str) -> None:
    """Every digit of a dtype's base has one element that is this number, so that engines round none."""
    if dtype == "bfloat16":
        elements = np.arange(1 << 16, dtype=np.uint16)
    elif ITEMSIZE[dtype] == 1:
        elements = np.arange(256, dtype=np.uint8)
    else:
        elements = np.arange(256).astype(dtype).view(f"u{ITEMSIZE[dtype]}")
    with np.errstate(all="ignore"):
        numbers = _numbers(elements, dtype)
    assert {*range(_base(dtype))} <= {*numbers[np.isfinite(numbers)].tolist()}


def refusal(code: str, write: Any, **changed: Any) -> None:
    worker = changed.pop("worker", Engine().worker())
    with pytest.raises(KVPlanError) as caught:
        assert_memory([worker], write, **{"blocks": BLOCKS, "tokens": SPAN, **changed})
    assert caught.value.code == code


def test_what_is_no_request_is_refused() -> None:
    """Names of no tensor, dimensions that do not fit, blocks too few for the tokens, and memory of a GPU."""
    refusal("NAME", lambda values: values("layers.9", "token head dim", kv=0))
    for dimensions in ("token head dim", "token head kv", "token head kv dim dim", "token head kv dim page"):
        refusal("NAME", lambda values, dimensions=dimensions: values("layers.0", dimensions))
    few: list[dict[str, Any]] = [{"blocks": {}}, {"blocks": {"attn": Blocks([5])}}]
    for changed in few:
        refusal("BLOCKS", lambda values: None, **changed)
    refusal("RANGE", lambda values: None, tokens=(3, 3))
    with pytest.raises(KVPlanError, match="tensor_at"):
        region_bytes(Region("kv", 1 << 40, 64, "VRAM", 0))


def test_memory_that_something_else_reads() -> None:
    """A tensor of torch, indexed as the memory of a GPU would be."""
    torch = pytest.importorskip("torch")
    cache = torch.zeros((9, 2, HEADS, TOKENS, DIM), dtype=torch.float8_e4m3fn)
    region = region_of(cache)
    view = view_of(cache, "block kv head token dim", name="layers.0", group="attn", region=region)
    worker = Worker("decode", 0, [region], [Group("attn", TOKENS)], [view])
    flat = cache.view(torch.uint8).reshape(-1)

    def write(values: Values) -> None:
        for kv in range(2):
            stored = torch.from_numpy(values("layers.0", "token head dim", kv=kv)).to(cache.dtype)
            for position, token in enumerate(stored.view(torch.uint8)):
                block = int(BLOCKS["attn"].ids[position // TOKENS])
                cache.view(torch.uint8)[block, kv, :, position % TOKENS] = token

    read: list[str] = []

    def region_bytes(region: Region) -> Any:
        read.append(region.name)
        return flat

    assert_memory([worker], write, blocks=BLOCKS, tokens=SPAN, region_bytes=region_bytes)
    assert read


def test_a_view_without_axes() -> None:
    """A state of one element."""
    cache = np.zeros(6, np.int32)
    region = region_of(cache)
    view = View("count", "state", region.name, "int32", (), 6, 4)
    worker = Worker("decode", 0, [region], [Group("state", None)], [view])

    def write(values: Values) -> None:
        cache[4] = values("count", "")

    assert_memory([worker], write, blocks={"state": Blocks([4])})
