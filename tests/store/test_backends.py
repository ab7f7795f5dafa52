"""Backends: whatever holds the files, rules store.S1 to store.S5 hold, and engines get the same bytes."""

from __future__ import annotations

import pytest

from kvplan import Blocks, KVPlanError
from kvplan_nixl.serving.store import Backend, Limits, Unfinished, evict
from tests.store.engines import PROMPT, QWEN, EngineWithStore

BLOCKS = {"attn": Blocks([3, 9, 5, 1, 7, 30])}
SPACE = "0" * 16
PAGES = [f"{SPACE}/{number:064x}" for number in range(4)]
PART = "a" * 32
NAMES = [f"{page}/{PART}" for page in PAGES]
DAY_S = 86400.0


def test_a_file_is_read_as_it_was_written(backend: Backend) -> None:
    """Whole or in part, once it is there, and ``None`` before and afterwards."""
    name, other, *_ = NAMES
    assert backend.get(name) is None
    assert {backend.get(name, number) for number in (0, 7)} == {None}
    backend.put(name, [b"012", memoryview(b"3456789")])
    backend.put(other, [])
    assert backend.get(name) == b"0123456789"
    beginnings = {0: b"", 3: b"012", 10: b"0123456789", 99: b"0123456789"}
    assert {number: backend.get(name, number) for number in beginnings} == beginnings
    assert (backend.get(other), backend.get(other, 0), backend.get(other, 48)) == (b"", b"", b"")
    backend.delete(name)
    backend.delete(name)
    assert (backend.get(name), backend.get(other)) == (None, b"")


def test_a_page_lists_its_files_alone(backend: Backend) -> None:
    """Those of other pages are none of its own, nor are those of names that begin alike."""
    for name in (NAMES[0], NAMES[1], f"{PAGES[0]}/pin"):
        backend.put(name, [b"x"])
    assert sorted(backend.files(PAGES[0])) == [PART, "pin"]
    assert backend.files(PAGES[1]) == (PART,)
    assert backend.files(PAGES[2]) == ()
    entries = {entry.name: entry.num_bytes for entry in backend.entries()}
    assert entries == {NAMES[0]: 1, NAMES[1]: 1, f"{PAGES[0]}/pin": 1}
    assert backend.sweep(0.0) == Unfinished(0, 0)


def test_two_writers_of_a_name_leave_one_file(backend: Backend) -> None:
    """Either of them."""
    backend.put(NAMES[0], [b"first"])
    backend.put(NAMES[0], [b"second"])
    assert backend.get(NAMES[0]) in (b"first", b"second")
    assert len([*backend.entries()]) == 1


def test_uses_are_ordered_from_the_end_of_a_prefix(backend: Backend) -> None:
    """A later use counts, an earlier one is forgotten, and what is not there stays so."""
    for name in NAMES[:3]:
        backend.put(name, [b"x"])
    now_s = 40 * DAY_S
    backend.touch(PAGES, now_s - DAY_S)
    backend.touch(PAGES[:2], now_s)
    used = {entry.name: entry.used_s for entry in backend.entries() if entry.name in NAMES}
    assert used.keys() == {*NAMES[:3]}
    assert backend.files(PAGES[3]) == ()
    first_s, second_s, third_s = (used[name] for name in NAMES[:3])
    assert now_s - 700 < second_s < first_s <= now_s
    assert now_s - DAY_S - 700 < third_s < now_s - DAY_S


@pytest.mark.parametrize("name", ["../x", "", f"{SPACE}/{'0' * 64}/../../x", f"{SPACE}/{'0' * 64}/.x"])
def test_no_name_leaves_its_place(name: str, backend: Backend) -> None:
    """A name is hexadecimal."""
    for call in (backend.get, backend.delete, lambda name: backend.put(name, [])):
        with pytest.raises(KVPlanError, match=r"^NAME: cannot name a file of a store"):
            call(name)


def test_what_one_engine_saves_another_loads(backend: Backend) -> None:
    """TP 2 saves and TP 1 with blocks of 32 loads, page by page of its own."""
    writer = EngineWithStore.of(QWEN, backend, seed=5, tp=2)
    assert writer.save(PROMPT, BLOCKS, 96) == 12
    assert writer.save(PROMPT, BLOCKS, 96) == 0
    reader = EngineWithStore.of(QWEN, backend, tokens_per_block=32)
    assert reader.find(PROMPT) == 96
    reader.load(PROMPT, {"attn": Blocks([4, 1, 8])}, 96)
    again = EngineWithStore.of(QWEN, backend, tp=2)
    again.load(PROMPT, BLOCKS, 96)
    ids = BLOCKS["attn"].ids.tolist()
    for before, after in zip(writer.caches, again.caches, strict=True):
        assert before.contents(ids) == after.contents(ids)
        assert not after.client.faults


def test_eviction_takes_the_ends_of_prefixes_first(backend: Backend) -> None:
    """Whatever a backend keeps the times of uses in; pinned pages stay, and nothing else is left of the others."""
    engine = EngineWithStore.of(QWEN, backend, seed=5)
    engine.save(PROMPT, BLOCKS, 96)
    client = engine.caches[0].client
    chain = client.chain(PROMPT)
    client.use(chain, 96)
    now_s = max(entry.used_s for entry in backend.entries())
    total = sum(entry.num_bytes for entry in backend.entries())
    evicted = evict(backend, Limits(max_bytes=total // 2), now_s)
    assert (evicted.num_pages, evicted.left_bytes, engine.find(PROMPT)) == (3, total // 2, 48)
    client.pin(chain, 16)
    assert evict(backend, Limits(max_model_bytes=0), now_s).num_pages == 2
    assert engine.find(PROMPT) == 16
    client.unpin(chain, 16)
    assert evict(backend, Limits(max_age_s=700), now_s + 1e6).num_pages == 1
    assert [*backend.entries()] == []
