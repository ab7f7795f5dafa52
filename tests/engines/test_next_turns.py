"""The connector's part in vLLM's scheduler, without an engine: what a next turn reads, and what decode hands over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvplan_nixl.vllm import KvplanConnector
from kvplan_nixl.vllm.metadata import KvplanHandshakeMetadata
from tests.seen_steps import Seen

PROMPT, ANSWER, BLOCK, WINDOW = 100, 12, 16, 48
SAID = [*range(PROMPT + ANSWER)]
COMPUTED = PROMPT + ANSWER - 1  # the last token of an answer is in no cache
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}

Start = Callable[..., KvplanConnector]

SIZES = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
SPECS = {
    "full": FullAttentionSpec(**SIZES),
    "window": SlidingWindowSpec(**SIZES, sliding_window=WINDOW),
    "state": MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,)),
}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the scheduler's part of an engine whose cache has groups of these kinds. It says no facts of a model."""
    monkeypatch.setattr("kvplan_nixl.vllm.connector.identity_of", lambda *_: {})
    monkeypatch.setattr("kvplan_nixl.vllm.connector.check_models", lambda *_: None)
    started: list[KvplanConnector] = []

    def make(*kinds: str, role: str = "kv_producer", **settings: Any) -> KvplanConnector:
        config = VllmConfig()
        config.model_config = SimpleNamespace(get_vocab_size=lambda: 1000, use_mla=False)
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KvplanConnector",
            kv_connector_module_path="kvplan_nixl.vllm",
            kv_role=role,
            engine_id=role,
            kv_connector_extra_config={"host": "127.0.0.1", "port": 0, **settings},
        )
        groups = [KVCacheGroupSpec([f"layers.{n}"], SPECS[kind]) for n, kind in enumerate(kinds)]
        cache = KVCacheConfig(num_blocks=50, kv_cache_tensors=[], kv_cache_groups=groups)
        connector = KvplanConnector(config, KVConnectorRole.SCHEDULER, cache)
        started.append(connector)
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): KvplanHandshakeMetadata(b"offer", ())})
        return connector

    yield make
    for connector in started:
        connector.shutdown()


def request_of(tokens: list[int], params: dict[str, Any] | None) -> Request:
    sampling = SamplingParams(max_tokens=ANSWER, extra_args={"kv_transfer_params": params})
    return Request("r", [*tokens], sampling, None)


def blocks_of(kinds: tuple[str, ...], num_tokens: int, cached: tuple[int, ...] = ()) -> KVCacheBlocks:
    """Tables of a request: of windows and states without old blocks, and of each group a number of cached blocks."""
    groups = []
    for group, kind in enumerate(kinds):
        num_null = {"full": 0, "window": (num_tokens - WINDOW + 1) // BLOCK, "state": (num_tokens - 1) // BLOCK}[kind]
        blocks = [KVCacheBlock(0 if n < num_null else n + 1) for n in range(-(-num_tokens // BLOCK))]
        for n, block in enumerate(blocks):
            block.is_null = n < num_null
            if cached and n < cached[group] and not block.is_null:
                block._block_hash = BlockHashWithGroupId(b"hash")
        groups.append(blocks)
    return KVCacheBlocks(tuple(groups))


def answered(decode: KvplanConnector, kinds: tuple[str, ...], num_in_flight: int = 0) -> Any:
    """The parameters that decode returns for a prompt which it has read and answered."""
    request = request_of(SAID[:PROMPT], {"do_remote_prefill": True})
    request.append_output_token_ids(SAID[PROMPT:])
    request.num_computed_tokens, request.num_in_flight_tokens = COMPUTED + num_in_flight, num_in_flight
    request.status = RequestStatus.FINISHED_STOPPED
    ids = blocks_of(kinds, COMPUTED).get_block_ids()
    _, params = decode.request_finished_all_groups(request, ids)
    return params


def read_of(
    prefill: KvplanConnector, kinds: tuple[str, ...], tokens: list[int], params: Any, cached: tuple[int, ...] = ()
) -> Any:
    """What prefill reads of a next turn, None if it computes all; with numbers of cached blocks by group."""
    request = request_of(tokens, params)
    prefill.on_new_request(request)
    num_cached = max(cached, default=0) * BLOCK
    num_tokens, is_async = prefill.get_num_new_matched_tokens(request, num_cached)
    assert num_tokens is not None
    assert is_async == (num_tokens > 0)
    prefill.update_state_after_alloc(request, blocks_of(kinds, num_cached + num_tokens or 1, cached), num_tokens)
    step = Seen(prefill.build_connector_meta(SchedulerOutput.make_empty()))
    assert step.refused == {}
    return step.reads[0] if step.reads else None


KINDS = [("full",), ("window",), ("full", "window"), ("full", "state"), ("full", "window", "state")]


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_the_next_turn_reads_the_answer(start: Start, kinds: tuple[str, ...]) -> None:
    """Prefill reads all that decode has computed, and computes new tokens. Proxies pass parameters on as they are."""
    decode = start(*kinds, role="kv_consumer", bidirectional_kv_xfer=True)
    params = answered(decode, kinds)
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert params["remote_num_tokens"] == COMPUTED
    read = read_of(start(*kinds), kinds, [*SAID, 7, 8, 9], params)
    first = (COMPUTED - WINDOW + 1) // BLOCK * BLOCK
    starts = {"full": 0, "window": first}
    expected = {f"group{n}": (starts[kind], COMPUTED) for n, kind in enumerate(kinds) if kind in starts}
    assert read.tokens == expected


def test_decode_hands_over_nothing_unless_asked(start: Start) -> None:
    assert answered(start("full", role="kv_consumer"), ("full",)) is None


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize("tokens", [[*SAID[:PROMPT], 7, 8], SAID[:PROMPT]], ids=["rewritten", "repeated"])
def test_another_text_in_place_of_the_answer(start: Start, kinds: tuple[str, ...], tokens: list[int]) -> None:
    """The prompt is read if all of it is there, but its last token. States and windows have passed it."""
    decode = start(*kinds, role="kv_consumer", bidirectional_kv_xfer=True)
    read = read_of(start(*kinds), kinds, tokens, answered(decode, kinds))
    if kinds == ("full",):
        assert read.tokens == {"group0": (0, min(PROMPT, len(tokens) - 1))}
    else:
        assert read is None


def test_another_conversation_is_refused(start: Start) -> None:
    """It fails, and nothing of it is read."""
    decode = start("full", role="kv_consumer", bidirectional_kv_xfer=True)
    request = request_of([7, *SAID[1:]], answered(decode, ("full",)))
    prefill = start("full")
    prefill.on_new_request(request)
    num_tokens, _ = prefill.get_num_new_matched_tokens(request, 0)
    assert num_tokens
    prefill.update_state_after_alloc(request, blocks_of(("full",), num_tokens), num_tokens)
    assert Seen(prefill.build_connector_meta(SchedulerOutput.make_empty())).refused["r"].code == "PROMPT"


@pytest.mark.parametrize(("threshold", "is_read"), [(COMPUTED - 4 * BLOCK, True), (COMPUTED - 4 * BLOCK + 1, False)])
def test_prefill_computes_what_is_little(start: Start, threshold: int, is_read: bool) -> None:
    """Fewer positions than the threshold are not read, beside those that are cached. Decode reads them in any case."""
    # two answers: a reader that computes all releases its one
    decodes = [start("full", role="kv_consumer", bidirectional_kv_xfer=True) for _ in range(2)]
    params, other_params = (answered(decode, ("full",)) for decode in decodes)
    prefill = start("full", kv_recompute_threshold=threshold)
    assert (read_of(prefill, ("full",), [*SAID, 7], params, (4,)) is not None) == is_read
    as_decode = {**other_params, "do_remote_prefill": True, "do_remote_decode": False}
    reader = start("full", kv_recompute_threshold=threshold)
    assert read_of(reader, ("full",), [*SAID, 7], as_decode, (4,)).tokens == {"group0": (4 * BLOCK, COMPUTED)}


def test_a_group_that_has_cached_less_reads_more(start: Start) -> None:
    """vLLM takes the hit of full attention, where the connector restores states: those of windows may lag behind."""
    kinds = ("full", "window", "state")
    decode = start(*kinds, role="kv_consumer", bidirectional_kv_xfer=True)
    prefill = start(*kinds, kv_recompute_threshold=0)
    assert prefill.supports_divergent_local_hybrid_hits
    read = read_of(prefill, kinds, [*SAID, 7], answered(decode, kinds), (6, 0, 0))
    assert read.tokens == {"group0": (6 * BLOCK, COMPUTED), "group1": (4 * BLOCK, COMPUTED)}
    assert "group2" in read.local


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_a_step_under_way_is_not_handed_over(start: Start, kinds: tuple[str, ...]) -> None:
    """Its positions may be written late. A state would be changed in place, so it is of no known position."""
    decode = start(*kinds, role="kv_consumer", bidirectional_kv_xfer=True)
    params = answered(decode, kinds, num_in_flight=1)
    assert (params is None) == ("state" in kinds)
    if params is not None:
        assert params["remote_num_tokens"] == COMPUTED


def test_a_reset_ends_handoffs(start: Start) -> None:
    """Their requests are released, and their leases are over."""
    decode = start("full", role="kv_consumer", bidirectional_kv_xfer=True)
    assert answered(decode, ("full",)) is not None
    assert decode.build_connector_meta(SchedulerOutput.make_empty()).released == set()
    assert decode.reset_cache() is True
    assert decode.build_connector_meta(SchedulerOutput.make_empty()).released == {"r"}
