"""Searches: one search for all workers of an engine finds what the definition says, and asks for each page once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan import Model
from kvplan.protocol.page_keys import Chain
from kvplan.protocol.page_shards import shards_of
from kvplan.protocol.pages import pack
from kvplan.protocol.prefix_search import Attended
from kvplan_nixl.serving.store import Backend, MemoryBackend, StoreReader, find

SIZE = 4
NUM_PAGES = 7
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4}
FULL = Model.from_config({"model_type": "llama", "num_hidden_layers": 1, **SIZES}, "m")
WINDOWS = Model.from_config(
    {
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        **SIZES,
    },
    "m",
)
_granite = Model.shipped("granite-4.0-h-tiny")
STATES = attrs.evolve(
    _granite, layers=(next(layer for layer in _granite.layers if layer[0].paged), _granite.layers[0]), name="m"
)
MODELS = {"full": FULL, "windows": WINDOWS, "states": STATES}
_packed: dict[tuple[str, str], tuple[str, list[Any]]] = {}


class CountingBackend(MemoryBackend):
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_lists = 0

    def files(self, page: str) -> tuple[str, ...]:
        self.num_lists += 1
        return super().files(page)


def fill(backend: Backend, chain: Chain, shards: Sequence[Any], pages: Mapping[int, Sequence[int]]) -> None:
    """Put some shards of some pages."""
    for page, numbers in pages.items():
        key = chain.keys[page]
        for number in numbers:
            shard = shards[number]
            chunks = pack(key, SIZE * (page + 1), shard, memoryview(bytes(shard.num_bytes)))
            backend.put(f"{chain.space}/{key}/{shard.name}", chunks)


def oracle(readers: Sequence[StoreReader], chain: Chain, start: int, stop: int, step: int) -> int:
    """The definition: the longest prefix of which every worker's every group has all the pages that it needs."""

    def has(reader: StoreReader, end: int) -> bool:
        for group in reader.groups:
            if group.is_state and end % SIZE:
                return False
            pages = reader.pages(group, reader.needs(start, end)[group.name])
            if any(reader.plan_of(chain, page, group, {}) is None for page in pages):
                return False
        return True

    ends = [end for end in range(step, stop + 1, step) if end > start]
    return max((end for end in ends if all(has(reader, end) for reader in readers)), default=start)


def attended_by(kind: int) -> Attended:
    """Windows of several sizes, one of blocks, and one that no model has: it is not monotonic."""
    functions: list[Attended] = [
        lambda end: max(0, end - 5),
        lambda end: max(0, end - 1),
        lambda end: end // 8 * 8,
        lambda end: end,
        lambda end: end * 7 % 11,
    ]
    return functions[kind]


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_search_finds_what_the_definition_says(data: st.DataObject) -> None:
    """Of any shards of any pages, for any ranks, starts, ends and steps, with windows and states in any order."""
    name = data.draw(st.sampled_from(sorted(MODELS)))
    model = MODELS[name]
    writers = model.engine("w", tp=data.draw(st.sampled_from([1, 2])), num_blocks=9)
    shards = list({shard.name: shard for worker in writers for shard in shards_of(worker, SIZE)}.values())
    workers = model.engine("r", tp=data.draw(st.sampled_from([1, 2, 4])), num_blocks=9)
    groups = [group.name for group in workers[0].groups]
    windowed = [group.name for group in workers[0].groups if not group.is_state]
    kinds = {group: data.draw(st.sampled_from([None, 0, 1, 2, 3, 4])) for group in windowed}
    attended = {group: attended_by(kind) for group, kind in kinds.items() if kind is not None}
    # in either order of groups
    is_reversed = data.draw(st.booleans()) and len(groups) > 1
    if is_reversed:
        workers = tuple(attrs.evolve(worker, groups=worker.groups[::-1]) for worker in workers)
    backend = MemoryBackend()
    readers = [StoreReader(backend, worker, tokens_per_page=SIZE, attended=attended) for worker in workers]
    chain = readers[0].chain(range(NUM_PAGES * SIZE))
    # a page has all shards, none, or some
    whole = st.just([*range(len(shards))])
    some = st.lists(st.sampled_from(range(len(shards))), unique=True)
    pages = data.draw(st.fixed_dictionaries({page: st.one_of(whole, whole, some) for page in range(NUM_PAGES)}))
    fill(backend, chain, shards, pages)
    for _ in range(3):
        start = data.draw(st.integers(0, 12))
        stop = data.draw(st.one_of(st.none(), st.integers(0, NUM_PAGES * SIZE + 3)))
        step = data.draw(st.sampled_from([None, 1, 2, 3, 4, 6, 8]))
        most = min(NUM_PAGES * SIZE, NUM_PAGES * SIZE if stop is None else stop)
        expected = oracle(readers, chain, start, most, step or SIZE)
        assert find(readers, chain, start=start, stop=stop, step=step) == expected
        assert find(readers[:1], chain, start=start, stop=stop, step=step) >= expected


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("kind", ["windows", "states"])
def test_a_search_asks_for_each_page_once(kind: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where full attention has all pages and the other group none, for all workers together."""
    model = MODELS[kind]
    workers = model.engine("r", tp=tp, num_blocks=9)
    (other,) = [group.name for group in workers[0].groups if group.name != "attn"]
    attended = {other: attended_by(0)} if kind == "windows" else {}
    backend = CountingBackend()
    readers = [StoreReader(backend, worker, tokens_per_page=SIZE, attended=attended) for worker in workers]
    counts = []
    plan_of, num_plans = StoreReader.plan_of, 0

    def counted(*arguments: Any) -> Any:
        nonlocal num_plans
        num_plans += 1
        return plan_of(*arguments)

    monkeypatch.setattr(StoreReader, "plan_of", counted)
    for num_pages in (50, 100, 200):
        chain = readers[0].chain(range(num_pages, num_pages + num_pages * SIZE))
        own = [attrs.evolve(worker, groups=worker.groups) for worker in workers]
        shards = {
            shard.name: shard
            for worker in own
            for shard in shards_of(worker, SIZE)
            if {view.name for view in shard.worker.views} <= {v.name for v in worker.views if v.group == "attn"}
        }
        fill(backend, chain, [*shards.values()], {page: range(len(shards)) for page in range(num_pages)})
        backend.num_lists = num_plans = 0
        assert find(readers, chain) == 0
        assert backend.num_lists == num_pages
        counts.append(num_plans)
    # pages with equal shards are equal, so the workers are asked for few of them
    assert max(counts) <= 2 * tp * 3


def test_a_search_that_takes_too_long_ends() -> None:
    """Nobody waits for it, and its thread is free."""
    (worker,) = FULL.engine("r", num_blocks=9)
    backend = MemoryBackend()
    reader = StoreReader(backend, worker, tokens_per_page=SIZE)
    with pytest.raises(Exception, match="BACKEND: cannot search a store: expected an answer in time"):
        find([reader], reader.chain(range(99)), until_s=0.0)
