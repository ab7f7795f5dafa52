"""Workers from the cache that an engine has allocated: vLLM, SGLang, TensorRT-LLM, LMCache.

An engine's own objects know addresses, shapes and strides, and which layers share a block table.
The model knows which tensors a layer caches, and a :class:`RankInfo` which part of them this worker
holds. :func:`vllm_model` and :func:`sglang_model` read a model off a running engine, so no
configuration is needed. The functions here read the objects by their attributes and import no
engine, so any object with the same attributes works. They refuse objects that contradict the model
or each other, with both values.

The worker has a group for each block table of the engine, in the engine's order. A group has the
name that the model gives the group of its first layer (``attn``, ``swa``, ``state``); a second
group of the same name is ``swa.1``. Its regions are the engine's allocations if the objects know
them, else the memory that its tensors span. What an engine stores as plain bytes, as vLLM and
SGLang do with fp8, has the dtype of the model. Layers numbered after the last layer of the model
are its draft layers.
"""

from kvplan.bridges.assembly import ObservedModel, RankInfo
from kvplan.bridges.lmcache import from_lmcache
from kvplan.bridges.sglang import from_sglang
from kvplan.bridges.sglang_model import TotalHeads, sglang_model, sglang_state
from kvplan.bridges.tensorrt_llm import from_tensorrt_llm
from kvplan.bridges.vllm import from_vllm
from kvplan.bridges.vllm_model import KvHeads, holds_state, vllm_group_names, vllm_model

__all__ = [
    "KvHeads",
    "ObservedModel",
    "RankInfo",
    "TotalHeads",
    "from_lmcache",
    "from_sglang",
    "from_tensorrt_llm",
    "from_vllm",
    "holds_state",
    "sglang_model",
    "sglang_state",
    "vllm_group_names",
    "vllm_model",
]
