"""How vLLM 0.33 and SGLang 0.5.23 store a model's cache by default, as keys of ``--src``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from kvplan.bridges.assembly import FP8_DTYPES
from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.models.layouts import KV

AUTO: Final = "auto"
"""The value of ``block`` that makes a block of attention as large as a recurrent state."""

VLLM: Final = "vLLM 0.33"
SGLANG: Final = "SGLang 0.5.23"

ENGINES: Final = MappingProxyType({"vllm": VLLM, "sglang": SGLANG})
"""Engines by the word that stands for their defaults in ``--src vllm,tp=4``."""

ROW_WORDS: Final = ("fp8", "fp8_e4m3", "fp8_ds_mla")
"""The words that make vLLM and SGLang keep sparse latents in rows of fp8 values and scales.

(``_canonicalize_sparse_mla_kv_cache_dtype`` of vLLM's mla_attention.py, 0.32)
"""


def stored_dtype(model: Model, word: str | None) -> str | None:
    """Return the dtype of a model's cache that a dtype or an engine's word for it means.

    None is as the model's file says, which of sparse latents is in rows.

    >>> stored_dtype(Model.shipped("llama-3.1-8b"), "fp8")
    'float8_e4m3fn'
    >>> stored_dtype(Model.shipped("deepseek-v3.2"), "fp8") is None
    True
    """
    has_rows = any(tensor.plain_axes for tensor in model.tensors)
    if word is None or (has_rows and word in ROW_WORDS):
        return None
    return FP8_DTYPES.get(word, word)


def has_index(model: Model) -> bool:
    """Return whether a model has an indexer."""
    return any(tensor.kind == "index" for tensor in model.tensors)


def has_kv(model: Model) -> bool:
    """Return whether a model caches K and V, and not latents or states alone."""
    return any(KV in dict(tensor.axes) for tensor in model.tensors)


def default_keys(model: Model) -> dict[str, dict[str, str]]:
    """Return how each engine stores the model by default, as keys of ``--src``.

    >>> default_keys(Model.shipped("qwen3-next-80b"))["vLLM 0.33"]
    {'layout': 'LBNHC', 'block': 'auto', 'kv': 'content', 'shared': '1'}
    """
    # attention beside recurrent states
    is_hybrid = len({tensor.paged for tensor in model.tensors}) > 1
    index_block = "64" if has_index(model) else None
    vllm = {"layout": "LBNHC", "block": AUTO if is_hybrid else index_block or "16"}
    sglang = {"layout": "LBNHC", "block": index_block or "1"}
    if has_kv(model):
        vllm["kv"] = "content"
        sglang["kv"] = "split"
    if len(model.groups) > 1:
        vllm["shared"] = "1"
    return {VLLM: vllm, SGLANG: sglang}


def items_of(text: str) -> dict[str, str]:
    """Return the values of a text such as ``tp=4,block=16``, by key."""
    return dict(item.partition("=")[::2] for item in text.split(",") if item)


def engine_of(text: str) -> tuple[str | None, str]:
    """Return the engine that the text of a side names, if it names one, and the keys beside it.

    Raises ``NAME`` if it names two.

    >>> engine_of("vllm,tp=4"), engine_of("tp=4")
    (('vLLM 0.33', 'tp=4'), (None, 'tp=4'))
    """
    items = text.split(",")
    words = [item for item in items if item in ENGINES]
    if len(words) > 1:
        got = " and ".join(words)
        raise KVPlanError("NAME", "read a side", expected="one engine", got=got)
    keys = ",".join(item for item in items if item not in ENGINES)
    return (ENGINES[words[0]] if words else None), keys


def with_defaults(model: Model, engine: str, keys: str) -> str:
    """Return the text of a side with an engine's defaults for all keys that it leaves out."""
    items = default_keys(model)[engine] | items_of(keys)
    return ",".join(f"{key}={value}" for key, value in items.items())
