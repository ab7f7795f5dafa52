"""Workers of the cache that an engine has allocated: vLLM, SGLang, TensorRT-LLM, LMCache."""

from kvplan.bridges.assembly import Seat
from kvplan.bridges.lmcache import from_lmcache
from kvplan.bridges.recipes import from_sglang, from_tensorrt_llm, from_vllm

__all__ = [
    "Seat",
    "from_lmcache",
    "from_sglang",
    "from_tensorrt_llm",
    "from_vllm",
]
