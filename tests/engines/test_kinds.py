"""The kinds of vLLM's caches that the connector moves, beside NixlConnector's, by vLLM's own classes.

Every class of vLLM's interface has a row. One that a new release adds has none, and fails.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from kvplan import KVPlanError

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")
description = pytest.importorskip("kvplan_nixl.vllm.description")
tp_mapping = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping")

ATTENTION: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
STATES: dict[str, Any] = {"block_size": 16, "shapes": ((4, 3),), "dtypes": (torch.float16,)}

MOVED: dict[str, list[dict[str, Any]]] = {
    "FullAttentionSpec": [{}, {"sliding_window": 32}, {"tokens_per_state": 8}],
    "MLAAttentionSpec": [{}, {"tokens_per_state": 4}, {"tokens_per_state": 128}],
    "SlidingWindowSpec": [{"sliding_window": 32}, {"sliding_window": 32, "extra_retained_tokens": 3}],
    "SlidingWindowMLASpec": [{"sliding_window": 32}, {"sliding_window": 32, "bounded_replay": True}],
    "ChunkedLocalAttentionSpec": [{"attention_chunk_size": 32}],
    "RSWASpec": [{"rswa_window": 32}],
    "SinkFullAttentionSpec": [{"sink_len": 16}],
    "HiddenStateCacheSpec": [{}],
    "CircularBufferSpec": [{}],
    "MambaSpec": [{}, {"tp_replicated": True}],
}
"""Classes that the connector moves, with fields of their own."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "CrossAttentionSpec": ({}, "positions of another sequence, of which vLLM's scheduler loads nothing"),
    "EncoderOnlyAttentionSpec": ({}, "no cache"),
}
"""Classes that it refuses by name, and why. NixlConnector takes them, since they are attention."""

NOT_TRANSFERRED: dict[str, str] = {
    "KVCacheSpec": "a base class",
    "AttentionSpec": "a base class",
    "UniformTypeKVCacheSpecs": "several specs of one table, each of which is looked at",
    "HiSparseHotSpec": "vLLM makes its groups with enable_kv_transfer False",
    "HiSparseResidentSpec": "vLLM makes its groups with enable_kv_transfer False",
}


def spec_of(kind: str, fields: dict[str, Any]) -> Any:
    """A spec of a class."""
    return getattr(interface, kind)(**(STATES if kind == "MambaSpec" else ATTENTION), **fields)


def check(*specs: Any, **fields: Any) -> None:
    """Check a cache of one group."""
    names = {f"layers.{number}": spec for number, spec in enumerate(specs)}
    spec = specs[0] if len(specs) == 1 else interface.UniformTypeKVCacheSpecs(16, kv_cache_specs=names)
    cache = cache_of(interface.KVCacheGroupSpec([*names], spec, **fields))
    description.check_kinds(cache)
    description.groups_of(cache)


def cache_of(group: Any) -> Any:
    return interface.KVCacheConfig(num_blocks=50, kv_cache_tensors=[], kv_cache_groups=[group])


@pytest.mark.parametrize(
    ("kind", "fields", "kept"),
    [
        ("SlidingWindowSpec", {"sliding_window": 32}, 31),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 32}, 0),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 48}, 0),
        ("FullAttentionSpec", {}, None),
    ],
)
def test_positions_kept_before_the_next_one(kind: str, fields: dict[str, int], kept: int | None) -> None:
    """The fewest at any position: where a chunk ends there are none, whatever its size."""
    cache = cache_of(interface.KVCacheGroupSpec(["layers.0"], spec_of(kind, fields)))
    assert description.windows_of(cache) == ({} if kept is None else {"group0": kept})


def test_each_class_has_a_row() -> None:
    """A release may add one. In it, look up what a block holds and who frees it, before it is moved."""
    classes = {
        name
        for name, value in vars(interface).items()
        if isinstance(value, type) and issubclass(value, interface.KVCacheSpec)
    }
    assert classes == {*MOVED, *REFUSED, *NOT_TRANSFERRED}


@pytest.mark.parametrize(("kind", "fields"), [(kind, fields) for kind in MOVED for fields in MOVED[kind]])
def test_what_is_moved(kind: str, fields: dict[str, Any]) -> None:
    """These have blocks of positions, in the order of a request, or one block of a request."""
    check(spec_of(kind, fields))


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    """LAYOUT, with the name of the class."""
    with pytest.raises(KVPlanError, match=rf"^LAYOUT: cannot transfer a cache of vLLM: expected .*, got {kind}$"):
        check(spec_of(kind, REFUSED[kind][0]))


@pytest.mark.parametrize("kind", [*MOVED, *REFUSED])
def test_what_nixl_connector_takes(kind: str) -> None:
    """All of it is moved here too, but what is refused for the reason in its row."""
    cls = getattr(interface, kind)
    is_taken = tp_mapping._is_attention_spec(cls) or tp_mapping._is_ssm_spec(cls)
    assert is_taken
    assert kind in MOVED or REFUSED[kind][1]


def test_layers_of_a_group_are_looked_at_one_by_one() -> None:
    """Layers of one table may have values for different numbers of tokens, but none for a part of one."""
    rows, keys = spec_of("MLAAttentionSpec", {"tokens_per_state": 128}), spec_of("MLAAttentionSpec", {})
    check(rows, keys)
    with pytest.raises(
        KVPlanError, match=r"^LAYOUT: cannot read a cache of vLLM: expected tokens_per_state of 1 or more"
    ):
        check(rows, spec_of("FullAttentionSpec", {"tokens_per_state": Fraction(1, 4)}))


def test_blocks_on_the_host_are_refused() -> None:
    """Those of HiSparse are in a pool of their own, whose blocks are not those of the device."""
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .*expected blocks on the device, got a group whose blocks are on"):
        check(spec_of("MLAAttentionSpec", {}), host_resident=True)
