"""Speculative decoding: which methods may run with transfers, and which have a cache.

Rejected tokens are never handed over, whatever has drafted them. Some drafts have a cache of their
own, for the same positions as the model's. It moves with the model's, so both engines must run the
same draft; the engine's identity has its facts (:mod:`kvplan_nixl.vllm.identity`).
"""

from __future__ import annotations

from typing import Any, Final

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvplan import KVPlanError

WITHOUT_CACHE: Final = (
    "ngram",
    "ngram_gpu",
    "suffix",
    "medusa",
    "mlp_speculator",
    "custom_class",
)
"""Methods whose drafts have no cache, or none in vLLM's block tables."""

WITH_CACHE: Final = ("eagle", "eagle3", "mtp", "draft_model")
"""Methods whose drafts have layers with caches.

What a draft caches at a position depends on the tokens up to there, and on the next one too unless
it is a ``draft_model``. Decode reads positions before a prompt's last token, so the next token is
always of the prompt.
"""


def check_drafts(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Refuse speculative decoding whose caches are not known to be right. Raises ``LAYOUT``."""
    speculative: Any = config.speculative_config
    if speculative is None:
        return
    method = speculative.method
    if method not in (*WITHOUT_CACHE, *WITH_CACHE):
        methods = ", ".join((*WITHOUT_CACHE, *WITH_CACHE))
        raise _refusal(f"a method of {methods}", str(method))
    # vLLM keeps a state for each token that may be accepted in a step, and does not say which one
    # is the last. Convolutions have steps for them too.
    if cache.has_mamba_layers:
        raise _refusal("a model without Mamba or linear-attention states", "one with states")
    if method in WITHOUT_CACHE:
        return
    # Each of several modules reads one token further than the one before it.
    if speculative.use_multi_module_mtp():
        raise _refusal("one module that predicts tokens", "several of them")
    parallel = config.parallel_config
    # EAGLE numbers its layers after those of a stage, as another stage numbers the model's.
    if parallel.pipeline_parallel_size > 1:
        got = f"{parallel.pipeline_parallel_size}"
        raise _refusal("one pipeline stage, with drafts that have a cache", got)
    if parallel.decode_context_parallel_size > 1:
        got = f"{parallel.decode_context_parallel_size}"
        raise _refusal("a decode context of 1, with drafts that have a cache", got)
    # vLLM 0.32 gives a draft model the block table of the first group, whichever is its own:
    # _build_attention_metadata in vllm/v1/worker/gpu_model_runner.py.
    num_groups = len(cache.kv_cache_groups)
    if method == "draft_model" and num_groups > 1:
        raise _refusal("one cache group, with a draft model", f"{num_groups}")


def _refusal(expected: str, got: str) -> KVPlanError:
    action = "transfer with speculative decoding"
    return KVPlanError("LAYOUT", action, expected=expected, got=got)
