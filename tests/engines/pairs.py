"""The pairs of engines that are judged: one line each, in vLLM's own settings."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.engines.models import BFLOAT16, EPSILON, THETA, WINDOW, YARN


class Pair(NamedTuple):
    """A prefill engine, a decode engine and a trial of them (a function of ``trials``).

    Prefill keeps blocks that nobody reads for ``lease_s`` seconds. UCX moves bytes by ``transports``, else as the
    connector says.
    """

    model: str
    prefill: dict[str, Any]
    decode: dict[str, Any]
    trial: str = "transfer"
    lease_s: int = 90
    transports: str = ""


class Beside(NamedTuple):
    """Other connectors of an engine, in vLLM's own settings, for a MultiConnector. FOLDER is one of theirs."""

    before: tuple[dict[str, Any], ...] = ()
    after: tuple[dict[str, Any], ...] = ()
    by_name: bool = False


OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "MemoryOffloadingSpec",
        "spec_module_path": "tests.engines.memory_offloading",
        "cpu_bytes_to_use": 1 << 28,
    },
}
EXAMPLE = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": "FOLDER"},
}

PIPELINED = {"enforce_eager": False, "compilation_config": {"mode": 3, "backend": "eager", "cudagraph_mode": "NONE"}}
"""With PP and ``enforce_eager``, vLLM 0.32 on a CPU stops in its own runner, whatever the connector."""


def side(block: int = 32, tp: int = 1, pp: int = 1, **more: Any) -> dict[str, Any]:
    """An engine's settings."""
    more = {**PIPELINED, **more} if pp > 1 else more
    return {"block_size": block, "tensor_parallel_size": tp, "pipeline_parallel_size": pp, **more}


SMALL = {"num_gpu_blocks_override": 200, "max_num_batched_tokens": 256}  # requests wait for blocks, prompts are chunked

CHUNKED = {"max_num_batched_tokens": 48, "max_num_seqs": 16}  # prompts are computed in chunks of less than two blocks
EARLY: dict[str, Any] = {
    **CHUNKED,
    "kv_connector_extra_config": {"early_tokens": 32},
}  # and published when they are computed
DIRECTLY: dict[str, Any] = {"kv_connector_extra_config": {"staging_bytes": 0}}  # nothing is staged
ASYNC = {"async_scheduling": True}
CACHED = {"enable_prefix_caching": True, "num_gpu_blocks_override": 64}  # all are soon used
BOTH: dict[str, Any] = {**CACHED, "kv_role": "kv_both"}  # either engine is prefill and decode
TO_AND_FRO = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 60}  # prefill reads from decode, too
NEXT_TURN: dict[str, Any] = {
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 100,
    "kv_connector_extra_config": TO_AND_FRO,
}
TURNS: dict[str, Any] = {**NEXT_TURN, "kv_connector_extra_config": {**TO_AND_FRO, "kv_recompute_threshold": 0}}
CROWDED: dict[str, Any] = {
    **NEXT_TURN,
    "num_gpu_blocks_override": 24,
    "kv_connector_extra_config": {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 3600},
}  # for the answers of five requests, which nobody asks for
UNCACHED = {"enable_prefix_caching": False}
FEW = {"num_gpu_blocks_override": 20}  # for one or two requests
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_prefix_caching": True}
ALIKE: dict[str, Any] = {"kv_connector_extra_config": {"model": "alike"}}  # the model's name for both engines
KEYED: dict[str, Any] = {"kv_connector_extra_config": {"key": "a secret of all engines", "verify": True}}
OTHER_KEY: dict[str, Any] = {"kv_connector_extra_config": {"key": "a secret of other engines"}}
ON_HOSTS: dict[str, Any] = {"kv_connector_extra_config": {"key": "a secret of all engines"}}
THROUGH_HOST: dict[str, Any] = {"copies": ("d2h", "h2d")}  # bytes move through main memory
VERIFIED: dict[str, Any] = {"kv_connector_extra_config": {"verify": True}}


def drafting(method: str, **settings: Any) -> dict[str, Any]:
    """Settings of an engine that drafts three tokens a step."""
    return {**CACHED, "speculative_config": {"method": method, "num_speculative_tokens": 3, **settings}}


NGRAM = drafting("ngram", prompt_lookup_max=3, prompt_lookup_min=1)
EAGLE = drafting("eagle", model="llama, EAGLE")
EAGLE_3 = drafting("eagle3", model="llama, EAGLE-3")
LLAMA = drafting("draft_model", model="llama")
MTP = drafting("mtp")

PAIRS = {
    "llama": Pair("llama", side(), side()),
    "llama 32->64": Pair("llama", side(32), side(64)),
    "llama 64->32": Pair("llama", side(64), side(32)),
    "llama 96->64": Pair("llama", side(96), side(64)),
    "llama TP 1->2": Pair("llama", side(), side(tp=2)),
    "llama 32->64 TP 1->2": Pair("llama", side(32), side(64, tp=2)),
    "llama 32->64 TP 1->2, directly": Pair("llama", side(32), side(64, tp=2, **DIRECTLY)),
    "llama 64->32 TP 2->1": Pair("llama", side(64, tp=2), side(32)),
    "llama PP 2->1": Pair("llama", side(pp=2), side()),
    "llama 32->64 PP 1->2": Pair("llama", side(32), side(64, pp=2)),
    "qwen-3 32->64": Pair("qwen3", side(32), side(64)),
    "gemma-3": Pair("gemma-3", side(), side()),
    "gemma-3 32->64": Pair("gemma-3", side(32), side(64)),
    "granite-hybrid": Pair("granite-hybrid", side(), side()),
    "granite-hybrid TP 1->2": Pair("granite-hybrid", side(), side(tp=2)),
    "deepseek-v3": Pair("deepseek-v3", side(16), side(16)),
    "deepseek-v3 TP 1->2": Pair("deepseek-v3", side(16), side(16, tp=2)),
    "llama 64->32, prefix on decode": Pair("llama", side(64), side(32, enable_prefix_caching=True), "prefix"),
    "llama 32->64, 200 in flight": Pair("llama", side(32, **SMALL), side(64, **SMALL), "burst"),
    "llama 32->64, chunked": Pair("llama", side(32, **CHUNKED), side(64, **CHUNKED)),
    "gemma-3 32->64, chunked": Pair("gemma-3", side(32, **CHUNKED), side(64, **CHUNKED)),
    "granite-hybrid TP 1->2, chunked": Pair("granite-hybrid", side(**CHUNKED), side(tp=2, **CHUNKED)),
    "llama 32->64, chunk by chunk": Pair("llama", side(32, **EARLY), side(64), "chunks"),
    "llama 32->64 TP 1->2, chunk by chunk": Pair("llama", side(32, **EARLY), side(64, tp=2), "chunks"),
    "llama 64->32, chunk by chunk, async": Pair("llama", side(64, **EARLY, **ASYNC), side(32, **ASYNC), "chunks"),
    "gemma-3 32->64, chunk by chunk": Pair("gemma-3", side(32, **EARLY), side(64), "chunks"),
    "granite-hybrid TP 1->2, chunk by chunk": Pair("granite-hybrid", side(**EARLY), side(tp=2), "chunks"),
    "llama 32->64, aborted chunk by chunk": Pair("llama", side(32, **EARLY), side(64), "aborted_chunks", lease_s=30),
    "llama 64->32, through main memory, chunk by chunk": Pair(
        "llama", side(64, **THROUGH_HOST, **EARLY), side(32, **THROUGH_HOST), "chunks"
    ),
    "llama 32->64, chunk by chunk, prefill preempts": Pair(
        "llama",
        side(32, **EARLY, num_gpu_blocks_override=24, scheduler_reserve_full_isl=False),
        side(64),
        "preempted_chunks",
    ),
    "llama 32->64, async": Pair("llama", side(32, **SMALL, **ASYNC), side(64, **SMALL, **ASYNC), "burst"),
    "llama 64->32, decode preempts": Pair(
        "llama", side(64), side(32, num_gpu_blocks_override=80), "preempted_on_decode"
    ),
    "llama 32->64, prefill preempts": Pair(
        "llama",
        side(32, **CHUNKED, num_gpu_blocks_override=24, scheduler_reserve_full_isl=False),
        side(64),
        "preempted_on_prefill",
    ),
    "llama 32->64, two of each": Pair("llama", side(32), side(64), "several"),
    "llama 32->64, aborted": Pair("llama", side(32), side(64), "aborted", lease_s=30),
    "llama, prefill dies": Pair("llama", side(), side(), "prefill_dies"),
    "llama, prefill dies, over TCP": Pair("llama", side(), side(), "prefill_dies", transports="tcp"),
    "llama, prefill dies, recompute": Pair("llama", side(), side(kv_load_failure_policy="recompute"), "recomputed"),
    "llama, prefill restarts": Pair("llama", side(), side(), "prefill_restarts"),
    "llama, prefill freezes": Pair("llama", side(), side(), "prefill_freezes"),
    "llama, prefill freezes under reads": Pair(
        "llama", side(), side(), "prefill_freezes_under_reads", lease_s=30, transports="tcp"
    ),
    "llama TP 1->2, prefill freezes under reads": Pair(
        "llama", side(), side(tp=2), "prefill_freezes_under_reads", lease_s=30, transports="tcp"
    ),
    "llama, decode dies": Pair("llama", side(), side(), "decode_dies", lease_s=30),
    "llama 32->64 TP 1->2, two hosts": Pair("llama", side(32, **ON_HOSTS), side(64, tp=2, **ON_HOSTS), "on_two_hosts"),
    "llama 32->64, slow link": Pair("llama", side(32, **ON_HOSTS), side(64, **ON_HOSTS), "on_a_slow_link"),
    "llama 32->64, hosts parted": Pair("llama", side(32, **ON_HOSTS), side(64, **ON_HOSTS), "hosts_parted", lease_s=30),
    "llama 32->64, answers lost": Pair("llama", side(32, **ON_HOSTS), side(64, **ON_HOSTS), "answers_lost", lease_s=30),
    "llama 32->64, questions lost": Pair(
        "llama", side(32, **ON_HOSTS), side(64, **ON_HOSTS), "questions_lost", lease_s=30
    ),
    "llama 32->64, host restarts": Pair(
        "llama", side(32, **ON_HOSTS), side(64, **ON_HOSTS), "host_restarts", lease_s=30
    ),
    "llama TP 1->2, vllm serve": Pair("llama", {}, {}, "served"),
    "llama DP 2->2 TP 1->2, vllm serve": Pair("llama", {"data_parallel_size": 2}, {"data_parallel_size": 2}, "served"),
    "llama DP 2->2 TP 1->2, vllm serve, at once": Pair(
        "llama", {"data_parallel_size": 2}, {"data_parallel_size": 2}, "served_at_once"
    ),
    "llama, vllm serve, before offloading": Pair(
        "llama",
        {"beside": Beside(after=(OFFLOADING,), by_name=True)},
        {"beside": Beside(after=(OFFLOADING,), by_name=True)},
        "served_beside",
        lease_s=600,
    ),
    "llama 32->64, before offloading": Pair(
        "llama",
        side(32, beside=Beside(after=(OFFLOADING,))),
        side(64, **FEW, beside=Beside(after=(OFFLOADING,))),
        "beside",
        lease_s=600,
    ),
    "llama 32->64, after offloading": Pair(
        "llama",
        side(32, beside=Beside(before=(OFFLOADING,))),
        side(64, **FEW, enable_prefix_caching=True, beside=Beside(before=(OFFLOADING,))),
        "beside",
        lease_s=600,
    ),
    "llama 64->32, before example": Pair(
        "llama",
        side(64, beside=Beside(after=(EXAMPLE,))),
        side(32, beside=Beside(after=(EXAMPLE,))),
        "beside",
        lease_s=600,
    ),
    "llama 64->32, after example": Pair(
        "llama",
        side(64, beside=Beside(before=(EXAMPLE,))),
        side(32, beside=Beside(before=(EXAMPLE,))),
        "beside",
        lease_s=600,
    ),
    "llama 32->64 TP 1->2, before offloading": Pair(
        "llama",
        side(32, beside=Beside(after=(OFFLOADING,))),
        side(64, tp=2, beside=Beside(after=(OFFLOADING,))),
        "beside",
        lease_s=600,
    ),
    "gemma-3 32->64, before offloading": Pair(
        "gemma-3",
        side(32, **CACHED, beside=Beside(after=(OFFLOADING,))),
        side(64, **CACHED, beside=Beside(after=(OFFLOADING,))),
        "shared_prefix_beside",
    ),
    "gemma-3, before offloading": Pair(
        "gemma-3",
        side(32, **CACHED, beside=Beside(after=(OFFLOADING,))),
        side(32, **CACHED, beside=Beside(after=(OFFLOADING,))),
        "shared_prefix",
    ),
    "mistral, shared prefix": Pair("mistral", side(**CACHED), side(**CACHED), "shared_prefix"),
    "gpt-oss 32->64, shared prefix": Pair(
        "gpt-oss",
        side(32, **CACHED),
        side(64, **CACHED),
        "shared_prefix",
    ),
    "gemma-3 32->64, shared prefix": Pair(
        "gemma-3",
        side(32, **CACHED),
        side(64, **CACHED),
        "shared_prefix",
    ),
    "gemma-3n, shared prefix": Pair("gemma-3n", side(**CACHED), side(**CACHED), "shared_prefix"),
    "gemma-3, five turns": Pair("gemma-3", side(**BOTH), side(**BOTH), "conversation"),
    "gpt-oss 32<->64, five turns": Pair(
        "gpt-oss",
        side(32, **BOTH),
        side(64, **BOTH),
        "conversation",
    ),
    "llama, to and fro": Pair("llama", side(**TURNS), side(**TURNS), "turns"),
    "llama 32<->64 TP 1<->2, to and fro": Pair("llama", side(32, **TURNS), side(64, tp=2, **TURNS), "turns"),
    "gemma-3 64<->32, to and fro": Pair("gemma-3", side(64, **TURNS), side(32, **TURNS), "turns"),
    "granite-hybrid TP 1<->2, to and fro": Pair(
        "granite-hybrid",
        side(**{**TURNS, **UNCACHED}),
        side(tp=2, **{**TURNS, **UNCACHED}),
        "turns",
    ),
    "llama, kept answers give way": Pair(
        "llama",
        side(**{**NEXT_TURN, "kv_connector_extra_config": {**TO_AND_FRO, "decoder_kv_blocks_ttl": 5}}),
        side(**CROWDED),
        "crowded",
    ),
    "granite-hybrid, prefix caches, to and fro": Pair("granite-hybrid", side(**TURNS), side(**TURNS), "turns"),
    "llama 64<->32, answer rewritten": Pair("llama", side(64, **NEXT_TURN), side(32, **NEXT_TURN), "rewritten"),
    "gemma-3, answer rewritten": Pair("gemma-3", side(**NEXT_TURN), side(**NEXT_TURN), "rewritten_in_window"),
    "granite-hybrid, answer rewritten": Pair(
        "granite-hybrid", side(**NEXT_TURN), side(**NEXT_TURN), "rewritten_after_state"
    ),
    "llama, another prompt": Pair(
        "llama",
        side(),
        side(enable_prefix_caching=True),
        "another_prompt",
    ),
    "llama, read twice": Pair("llama", side(**FEW), side(), "read_twice"),
    "llama, reset": Pair("llama", side(), side(), "reset", lease_s=600),
    "llama, n=12": Pair("llama", side(**FEW), side(**FEW), "twelve_answers"),
    "llama, twelve readers": Pair("llama", side(**FEW), side(**FEW), "twelve_readers"),
    "llama, another adapter": Pair(
        "llama",
        side(**ADAPTERS),
        side(**ADAPTERS),
        "another_adapter",
        lease_s=30,
    ),
    "llama, another salt": Pair(
        "llama",
        side(),
        side(enable_prefix_caching=True),
        "another_salt",
        lease_s=30,
    ),
    "llama, other weights": Pair(
        "llama",
        side(**ALIKE, model="llama, other weights"),
        side(**ALIKE),
        "unlike",
    ),
    "llama 32->64 TP 1->2, with a key": Pair("llama", side(32, **KEYED), side(64, tp=2, **KEYED)),
    "llama, other key": Pair("llama", side(**KEYED), side(**OTHER_KEY), "refused", lease_s=30),
    "llama, no key": Pair("llama", side(**KEYED), side(), "refused", lease_s=30),
    "llama 32->64, chunk by chunk, verified": Pair("llama", side(32, **EARLY), side(64, **VERIFIED), "flipped_chunks"),
    "gemma-3 32->64, chunk by chunk, verified": Pair("gemma-3", side(32, **EARLY), side(64, **VERIFIED), "chunks"),
    "granite-hybrid TP 1->2, chunk by chunk, verified": Pair(
        "granite-hybrid", side(**EARLY), side(tp=2, **VERIFIED), "chunks"
    ),
    "llama 32->64, verified": Pair("llama", side(32), side(64, **VERIFIED), "flipped"),
    "granite-hybrid TP 1->2, verified": Pair("granite-hybrid", side(), side(tp=2, **VERIFIED)),
    "gemma-3 64->32 TP 2->1, verified": Pair("gemma-3", side(64, tp=2), side(32, **VERIFIED), "flipped"),
    "llama 32->64, through main memory": Pair("llama", side(32, **THROUGH_HOST), side(64, **THROUGH_HOST)),
    "llama 64->32, through main memory, chunked": Pair(
        "llama", side(64, **THROUGH_HOST, **CHUNKED), side(32, **THROUGH_HOST, **CHUNKED)
    ),
    "llama 32->64, through main memory, 200 in flight": Pair(
        "llama", side(32, **THROUGH_HOST, **SMALL, **ASYNC), side(64, **THROUGH_HOST, **SMALL, **ASYNC), "burst"
    ),
    "llama 64->32, through main memory, prefix on decode": Pair(
        "llama", side(64), side(32, **THROUGH_HOST, enable_prefix_caching=True), "prefix"
    ),
    "llama 32->64, through main memory, prefix on prefill": Pair(
        "llama", side(32, **THROUGH_HOST, enable_prefix_caching=True), side(64), "prefix_on_prefill"
    ),
    "gemma-3 32->64, through main memory, shared prefix": Pair(
        "gemma-3", side(32, **THROUGH_HOST, **CACHED), side(64, **THROUGH_HOST, **CACHED), "shared_prefix"
    ),
    "granite-hybrid, through main memory": Pair("granite-hybrid", side(**THROUGH_HOST), side(**THROUGH_HOST)),
    "llama 64<->32, through main memory, to and fro": Pair(
        "llama", side(64, **TURNS, **THROUGH_HOST), side(32, **TURNS, **THROUGH_HOST), "turns"
    ),
    "llama, nothing copied from prefill": Pair("llama", side(copies=("h2d",)), side(), "not_copied"),
    "llama, nothing copied to decode": Pair("llama", side(), side(copies=("d2h",)), "not_copied"),
    "llama 32->64, n-grams": Pair("llama", side(32, **NGRAM), side(64, **NGRAM), "drafted"),
    "llama 64->32, n-grams on decode": Pair("llama", side(64, **CACHED), side(32, **NGRAM), "drafted"),
    "gemma-3 32->64, n-grams on decode": Pair("gemma-3", side(32, **CACHED), side(64, **NGRAM), "drafted"),
    "llama 64->32, EAGLE": Pair("llama", side(64, **EAGLE), side(32, **EAGLE), "drafted"),
    "llama 32->64 TP 1->2, EAGLE-3": Pair("llama", side(32, **EAGLE_3), side(64, tp=2, **EAGLE_3), "drafted"),
    "llama 32->64, EAGLE-3, async": Pair("llama", side(32, **EAGLE_3, **ASYNC), side(64, **EAGLE_3, **ASYNC)),
    "mistral 32->64, EAGLE-3": Pair("mistral", side(32, **EAGLE_3), side(64, **EAGLE_3), "drafted"),
    "gemma-3 64->32, EAGLE": Pair("gemma-3", side(64, **EAGLE), side(32, **EAGLE), "drafted"),
    "llama 64->32, a llama drafts": Pair("llama", side(64, **LLAMA), side(32, **LLAMA), "drafted"),
    "llama 32->64, a llama drafts, 200 in flight": Pair(
        "llama",
        side(32, **{**LLAMA, **SMALL}),
        side(64, **{**LLAMA, **SMALL}),
        "burst",
    ),
    "deepseek-v3, MTP": Pair("deepseek-v3, MTP", side(16, **MTP), side(16, **MTP), "drafted"),
    "llama, EAGLE on decode": Pair("llama", side(), side(**EAGLE), "refused"),
    "llama, EAGLE on prefill": Pair("llama", side(**EAGLE), side(), "refused"),
    "llama, another EAGLE": Pair(
        "llama",
        side(**EAGLE),
        side(**drafting("eagle", model="llama, another EAGLE")),
        "refused",
    ),
    "gemma-3 32->64 TP 1->2, of an invented type": Pair(
        "gemma-3, invented", side(32, trust_remote_code=True), side(64, tp=2, trust_remote_code=True)
    ),
    "granite-hybrid TP 1->2, of an invented type": Pair(
        "granite-hybrid, invented", side(trust_remote_code=True), side(tp=2, trust_remote_code=True)
    ),
    "gemma-3, windows freed on prefill alone": Pair(
        "gemma-3", side(), side(disable_hybrid_kv_cache_manager=True), "refused"
    ),
    "gemma-3 32->64, windows freed on decode alone": Pair(
        "gemma-3", side(32, disable_hybrid_kv_cache_manager=True), side(64)
    ),
    "mistral 32->64": Pair("mistral", side(32), side(64)),
    "gpt-oss 64->32": Pair("gpt-oss", side(64), side(32)),
    "gemma-3n 32->64": Pair("gemma-3n", side(32), side(64)),
    "llama-4 32->64": Pair("llama-4", side(32), side(64)),
    "phi-3 64->32": Pair("phi-3", side(64), side(32)),
    "olmo-3 32->64": Pair("olmo-3", side(32), side(64)),
    "cohere-2 64->32": Pair("cohere-2", side(64), side(32)),
    "exaone-4 32->64": Pair("exaone-4", side(32), side(64)),
    "mixtral 64->32": Pair("mixtral", side(64), side(32)),
    "glm-4 32->64": Pair("glm-4", side(32), side(64)),
    "smollm-3 64->32": Pair("smollm-3", side(64), side(32)),
    "starcoder-2 32->64": Pair("starcoder-2", side(32), side(64)),
    "qwen-3 moe 32->64": Pair("qwen-3 moe", side(32), side(64)),
    "deepseek-v2": Pair("deepseek-v2", side(16), side(16)),
    "mamba-2": Pair("mamba-2", side(), side()),
    "nemotron-h": Pair("nemotron-h", side(), side()),
    "falcon-h1": Pair("falcon-h1", side(), side()),
    "zamba-2": Pair("zamba-2", side(), side()),
}


PUBLISHED = ", bfloat16"
"""What follows the name of a model whose files are of bfloat16, as most published ones are."""

GEMMA_4 = "gemma-4, 12 layers"
PAIRS |= {
    "gemma-4 TP 1->2": Pair(GEMMA_4, side(), side(tp=2)),
    "gemma-4 TP 2->1": Pair(GEMMA_4, side(tp=2), side()),
    "gemma-4 32->64": Pair(GEMMA_4, side(32), side(64)),
    "gemma-4 64->32 TP 2->1": Pair(GEMMA_4, side(64, tp=2), side(32)),
    "nemotron-h TP 1->2": Pair("nemotron-h", side(), side(tp=2)),
    "falcon-h1 TP 1->2": Pair("falcon-h1", side(), side(tp=2)),
    "mamba-2 TP 1->2": Pair("mamba-2", side(), side(tp=2)),
}

DTYPES: dict[str, dict[str, Any]] = {
    "dtype float32": {},
    "dtype bfloat16": {"dtype": "bfloat16"},
    "mamba_cache_dtype float32": {"dtype": "bfloat16", "mamba_cache_dtype": "float32"},
    "mamba_cache_dtype float16": {"dtype": "bfloat16", "mamba_cache_dtype": "float16"},
    "mamba_ssm_cache_dtype float32": {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"},
    "mamba_ssm_cache_dtype bfloat16": {"dtype": "float32", "mamba_ssm_cache_dtype": "bfloat16"},
}
"""Settings of both engines, whose models are of bfloat16."""

for hybrid in BFLOAT16[:4]:
    for name, settings in DTYPES.items():
        PAIRS[f"{hybrid}, {name}"] = Pair(f"{hybrid}{PUBLISHED}", side(**settings), side(**settings), "continued")

SKIPPED: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "2"]}
SKIPPED_OTHERS: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]}
PAIRS |= {
    "llama 32->64, dtype float32": Pair(f"llama{PUBLISHED}", side(32), side(64)),
    "llama 32->64, fp8": Pair("llama", side(32, kv_cache_dtype="fp8"), side(64, kv_cache_dtype="fp8")),
    "llama 32->64, fp8 but for layers": Pair("llama", side(32, **SKIPPED), side(64, **SKIPPED)),
    "gemma-3 32->64, fp8 but for windows": Pair(
        "gemma-3",
        side(32, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["sliding_window"]),
        side(64, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["sliding_window"]),
    ),
    "llama, fp8 but for other layers": Pair("llama", side(**SKIPPED), side(**SKIPPED_OTHERS), "refused"),
    "llama, int8 with scales": Pair(
        "llama", side(kv_cache_dtype="int8_per_token_head"), side(kv_cache_dtype="int8_per_token_head")
    ),
    "llama, float32 to bfloat16": Pair("llama", side(), side(dtype="bfloat16"), "refused"),
    "llama, bfloat16 to float32": Pair("llama", side(dtype="bfloat16"), side(), "refused"),
    "llama, bfloat16 to float16": Pair("llama", side(dtype="bfloat16"), side(dtype="float16"), "refused"),
    "llama, fp8 to float32": Pair("llama", side(kv_cache_dtype="fp8"), side(), "refused"),
    "llama, fp8 of float32 to fp8 of bfloat16": Pair(
        "llama", side(kv_cache_dtype="fp8"), side(kv_cache_dtype="fp8", dtype="bfloat16"), "unlike"
    ),
}

OVERRIDES = {
    "RoPE theta": ("llama", THETA),
    "YaRN": ("llama", YARN),
    "epsilon": ("llama", EPSILON),
    "window": ("gemma-3", WINDOW),
}
"""A model, and values of its config.json that an engine may be given by ``hf_overrides``."""

for name, (model, value) in OVERRIDES.items():
    given: dict[str, Any] = {"hf_overrides": value}
    PAIRS |= {
        f"{model}, {name} on prefill": Pair(model, side(**CACHED, **given), side(**CACHED), "unlike"),
        f"{model}, {name} on decode": Pair(model, side(**CACHED), side(**CACHED, **given), "unlike"),
        f"{model} 32->64, {name} on both": Pair(model, side(32, **given), side(64, **given)),
        f"{model} 32->64, {name} by override to file": Pair(
            model, side(32, **given), side(64, model=f"{model}, {name}")
        ),
        f"{model} 64->32, {name} by file to override": Pair(
            model, side(64, model=f"{model}, {name}"), side(32, **given)
        ),
    }

HALF: dict[str, Any] = {"dtype": "bfloat16"}  # vLLM quantises no weights of float32
PAIRS |= {
    "llama, int8 weights on prefill": Pair(
        "llama", side(**HALF, quantization="int8_per_channel_weight_only"), side(**HALF), "refused"
    ),
    "llama, int8 weights on decode": Pair(
        "llama", side(**HALF), side(**HALF, quantization="int8_per_channel_weight_only"), "refused"
    ),
    "llama 32->64, int8 weights on both": Pair(
        "llama",
        side(32, **HALF, quantization="int8_per_channel_weight_only"),
        side(64, **HALF, quantization="int8_per_channel_weight_only"),
    ),
}

TRAINED: dict[str, Any] = {"weight_transfer_config": {"backend": "folder"}}
PAIRS |= {
    "llama, adapter replaced": Pair("llama", side(**ADAPTERS), side(**ADAPTERS), "adapter_replaced", lease_s=30),
    "llama, adapter replaced, times kept": Pair(
        "llama", side(**ADAPTERS), side(**ADAPTERS), "adapter_replaced_times_kept", lease_s=30
    ),
    "llama, adapter overwritten between read and load": Pair(
        "llama", side(**ADAPTERS), side(**ADAPTERS, overwrites=True), "adapter_overwritten", lease_s=30
    ),
    "llama, weights reloaded": Pair("llama", side(), side(), "weights_reloaded", lease_s=30),
    "llama, weights updated": Pair("llama", side(**TRAINED), side(**TRAINED), "weights_updated", lease_s=30),
}
