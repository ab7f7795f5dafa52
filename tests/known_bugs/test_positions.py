"""Positions: blocks pair by the positions that they hold, whatever their place in a list."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvplan import Blocks, plan_reads, plan_writes, verify
from tests.known_bugs.faults import asking, grouped, moving
from tests.known_bugs.known_bug import Outcome, accepted, known_bug
from tests.small import engine


@known_bug("D1", "vllm-project/vllm#48633, vllm-project/vllm#48758", "verify: VALUE")
def test_pushed_from_the_head() -> tuple[Outcome, Outcome]:
    """To a destination with a cached prefix, the source sent its first blocks instead of its last."""
    (source,), (destination,) = engine("prefill"), engine("decode")
    plan = plan_writes(source, [destination])
    request = asking({"attn": Blocks([3, 9, 4, 7])}, {"attn": Blocks([8, 1], first=2)}, (8, 16))
    first_two = moving(plan, **{**request, "local": {"attn": Blocks([3, 9], first=2)}})
    return lambda: verify(first_two, **request), lambda: verify(plan, **request)


@known_bug("D2", "vllm-project/vllm#50558 and vLLM 0.33.0, base_worker.py", "verify: VALUE, OWN")
def test_paired_from_the_tail() -> tuple[Outcome, Outcome]:
    """A prompt of 2048 tokens became 2049 on the destination, which shifted all blocks paired from the tail."""
    (source,), (destination,) = (engine(name, 1, heads=1, tokens=64, layers=1, blocks=40) for name in "pd")
    plan = plan_reads(destination, [source])
    ids = np.arange(32)
    new = {"attn": Blocks([5, 9], first=31)}  # 31 blocks are cached; block 32 is for position 2048, computed here
    request = asking(new, {"attn": Blocks(ids)}, (31 * 64, 2048))
    last_two = moving(plan, **asking(new, {"attn": Blocks(ids[-2:], first=31)}, (31 * 64, 33 * 64)))
    return lambda: verify(last_two, **request), lambda: verify(plan, **request)


@accepted("D13", "vLLM 0.33.0, base_worker.py")
def test_nothing_of_one_group() -> Outcome:
    """A fully cached group got all blocks in place of its last 0, because a slice from -0 is the whole list."""
    source, destination = (grouped(name, full=4, window=4) for name in ("prefill", "decode"))
    plan = plan_reads(destination, [source])
    request = asking(
        local={"full": Blocks([5], first=2), "window": Blocks([], first=2)},
        remote={"full": Blocks([1, 2, 3]), "window": Blocks([7, 8])},
        tokens={"full": (8, 12), "window": (8, 8)},
    )
    return lambda: verify(plan, **request)


@accepted("D3", "vllm-project/vllm#41693, vllm-project/vllm#42554")
def test_placeholders_of_states() -> Outcome:
    """A placeholder before the last state made one list longer than the other, and an assertion failed."""
    source, destination = (grouped(name, state=None, attn=4) for name in ("prefill", "decode"))
    plan = plan_reads(destination, [source])
    request = asking(
        local={"state": Blocks([16], first=1), "attn": Blocks([20, 21])},
        remote={"state": Blocks([0, 17], null=0), "attn": Blocks([24, 25])},
        tokens=(0, 8),
    )
    return lambda: verify(plan, **request)


@known_bug("D4", "xLLM-AI/xllm#2040", "refused: BLOCKS")
def test_lists_of_different_origin() -> tuple[Outcome, Outcome]:
    """A destination with a cached prefix sent only ids of new blocks, to a source that counts from the first."""
    (source,), (destination,) = engine("prefill"), engine("decode")
    plan = plan_writes(source, [destination])
    own = {"attn": Blocks([3, 9, 4, 7, 1, 5])}
    unaware = asking(own, {"attn": Blocks([8])}, (0, 24))
    request = asking(own, {"attn": Blocks([8], first=5)}, (20, 24))
    return lambda: verify(plan, **unaware), lambda: verify(plan, **request)


@known_bug("D5", "vllm-project/vllm-ascend#8908", "verify: VALUE")
def test_a_block_more_for_a_draft() -> tuple[Outcome, Outcome]:
    """A full last block got one more for draft tokens on the source, which shifted blocks paired from the tail."""
    (source,), (destination,) = engine("prefill"), engine("decode")
    plan = plan_reads(destination, [source])
    theirs, ours = [3, 9, 4, 7], [8, 1, 5, 2]

    def request(tokens: int) -> dict[str, Any]:
        with_draft, without = -(-(tokens + 1) // 4), -(-tokens // 4)
        return asking({"attn": Blocks(ours[:without])}, {"attn": Blocks(theirs[:with_draft])}, (0, tokens))

    last_three = moving(plan, **{**request(12), "remote": {"attn": Blocks(theirs[-3:])}})
    return (
        lambda: verify(last_three, **request(12)),
        lambda: tuple(verify(plan, **request(tokens)) for tokens in (11, 12, 13)),
    )


@known_bug("D6", "NVIDIA/TensorRT-LLM#17619, NVIDIA/TensorRT-LLM#18657", "verify: VALUE")
def test_a_window_anchored_by_its_length() -> tuple[Outcome, Outcome]:
    """A window's block list was anchored at the prompt's end, but ended with a block for draft tokens."""
    source, destination = (grouped(name, window=4) for name in ("prefill", "decode"))
    plan = plan_reads(destination, [source])
    request = asking(
        local={"window": Blocks([8, 1], first=3)},
        remote={"window": Blocks([4, 7, 9], first=3)},  # the prompt's blocks 3 and 4, and a scratch block
        tokens=(12, 20),
    )
    ending_here = moving(plan, **{**request, "remote": {"window": Blocks([4, 7, 9], first=2)}})
    return lambda: verify(ending_here, **request), lambda: verify(plan, **request)


@known_bug("D7", "vllm-project/vllm#42761, vllm-project/vllm#42959", "verify: OWN")
def test_a_block_that_the_window_has_left() -> tuple[Outcome, Outcome]:
    """A block id of an earlier step, freed since by a sliding window, was offloaded again."""
    gpu, cpu = (grouped(name, window=4) for name in ("gpu", "cpu"))
    plan = plan_writes(gpu, [cpu])
    stored = {"window": Blocks([4, 7, 9])}
    earlier = asking({"window": Blocks([3, 8, 5])}, stored, (0, 12))
    now = asking({"window": Blocks([0, 8, 5], null=0)}, stored, (4, 12))
    return lambda: verify(moving(plan, **earlier), **now), lambda: verify(plan, **now)


@known_bug("D8", "tests of vLLM 0.33.0, test_mooncake_store_coordinator.py", "verify: COVER")
def test_pruned_twice() -> tuple[Outcome, Outcome]:
    """A prefix hit was shortened by a draft model's block twice, so its last block stayed empty."""
    (source,), (destination,) = (engine(name, tokens=16) for name in ("store", "decode"))
    plan = plan_reads(destination, [source])
    request = asking({"attn": Blocks([8, 1, 5, 2])}, {"attn": Blocks([3, 9, 4, 7])}, (0, 48))
    pruned = moving(plan, **{**request, "tokens": (0, 32)})
    return lambda: verify(pruned, **request), lambda: verify(plan, **request)


@known_bug("D9", "vllm-project/vllm#53951", "refused: BLOCKS")
def test_a_reader_of_one_block_more() -> tuple[Outcome, Outcome]:
    """A store kept a window's last blocks, and a reader with a draft model needed one more before them."""
    return _kept_and_needed(kept=2, start=4)


@known_bug("D12", "vllm-project/vllm#56701", "refused: BLOCKS")
def test_a_hit_of_more_than_is_kept() -> tuple[Outcome, Outcome]:
    """A hit was reported for a window and draft tokens whose blocks had been freed."""
    return _kept_and_needed(kept=2, start=6)


def _kept_and_needed(kept: int, start: int) -> tuple[Outcome, Outcome]:
    """A store that kept the last blocks of 16 positions, and a reader that needs all from ``start`` on."""
    store, reader = (grouped(name, window=4) for name in ("store", "decode"))
    plan = plan_reads(reader, [store])

    def request(blocks: int) -> dict[str, Any]:
        held = Blocks([0] * (4 - blocks) + [3, 9, 4, 7][4 - blocks :], null=0)
        return asking({"window": Blocks([8, 1, 5, 2])}, {"window": held}, (start, 16))

    needed = 4 - start // 4
    return lambda: verify(plan, **request(kept)), lambda: verify(plan, **request(needed))


@known_bug("D10", "vllm-project/vllm#51362", "verify: OWN")
def test_no_block_is_not_block_0() -> tuple[Outcome, Outcome]:
    """A state table with 0 for no state was stored whole, so the null block 0 was stored as states."""
    source, store = (grouped(name, state=None) for name in ("prefill", "store"))
    plan = plan_writes(source, [store])
    theirs, ids = {"state": Blocks([4, 6, 5])}, [0, 0, 7]
    request = asking({"state": Blocks(ids, null=0)}, theirs, {"state": (2, 3)})
    whole = moving(plan, **asking({"state": Blocks(ids)}, theirs, {"state": (0, 3)}))
    return lambda: verify(whole, **request), lambda: verify(plan, **request)
