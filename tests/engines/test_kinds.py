"""The kinds of vLLM's caches that the connector moves, by vLLM's own classes."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from kvplan import KVPlanError

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")
description = pytest.importorskip("kvplan_nixl.vllm.description")

ATTENTION: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}


def check(kind: str, **fields: Any) -> None:
    """Check a cache of one group of a kind."""
    spec = getattr(interface, kind)(**ATTENTION, **fields)
    group = SimpleNamespace(kv_cache_spec=spec)
    description.check_kinds(SimpleNamespace(transfer_groups=[group]))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("FullAttentionSpec", {}),
        ("FullAttentionSpec", {"sliding_window": 32}),
        ("MLAAttentionSpec", {}),
        ("SlidingWindowSpec", {"sliding_window": 32}),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 32}),
    ],
)
def test_values_of_each_token_are_moved(kind: str, fields: dict[str, Any]) -> None:
    """These have blocks of positions, in the order of a request."""
    check(kind, **fields)


@pytest.mark.parametrize(
    ("kind", "fields", "got"),
    [
        ("MLAAttentionSpec", {"tokens_per_state": 4}, "one for 4 tokens in MLAAttentionSpec"),
        ("FullAttentionSpec", {"tokens_per_state": Fraction(1, 4)}, "one for 1/4 tokens in FullAttentionSpec"),
        ("SinkFullAttentionSpec", {"sink_len": 16}, "SinkFullAttentionSpec"),
        ("RSWASpec", {"rswa_window": 32}, "RSWASpec"),
        ("HiddenStateCacheSpec", {}, "HiddenStateCacheSpec"),
        ("CircularBufferSpec", {}, "CircularBufferSpec"),
        ("CrossAttentionSpec", {}, "CrossAttentionSpec"),
    ],
)
def test_other_kinds_are_refused_by_name(kind: str, fields: dict[str, Any], got: str) -> None:
    """LAYOUT: rows of several tokens, sinks, gaps inside a request, rings, another sequence's positions."""
    with pytest.raises(KVPlanError, match=f"^LAYOUT: cannot transfer a cache of vLLM: expected .*, got {got}$"):
        check(kind, **fields)
