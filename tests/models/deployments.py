"""Bytes that a rank of published deployments reads for a request, as vLLM counts them.

``python -m tests.models.deployments``, where vLLM is installed, builds each model at its published size on a CPU,
without weights, for the last rank of its tensor parallel size. vLLM's own functions say which layers cache, how large
their pages are, in which dtype, and which positions a layer with a window still needs; kvplan has no part in it. What
it finds is in deployments.json, to which tests hold the figures of ``kvplan verify``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

RESULTS: Final = Path(__file__).with_name("deployments.json")

DEPLOYMENTS: Final[dict[str, tuple[int, int]]] = {
    "llama-3.1-70b": (8, 4_096),
    "qwen3-235b-a22b": (4, 8_000),
    "deepseek-v3": (8, 4_000),
    "gpt-oss-120b": (1, 20_000),
    "gemma-3-27b": (2, 16_000),
    "gemma-4-31b": (2, 16_000),
    "nemotron-h-8b": (2, 8_000),
    "qwen3-next-80b": (2, 8_000),
    "granite-4.0-h-tiny": (2, 1_000),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": (8, 20_000),
    "nvidia--Llama-3.1-70B-Instruct-FP8": (4, 4_096),
    "nvidia--Qwen3-235B-A22B-NVFP4": (4, 8_000),
}
"""The tensor parallel size of models and the tokens of a request: shipped ones, and files of aiconfigurator-core."""


def results() -> dict[str, int]:
    """What vLLM has counted."""
    found: dict[str, int] = json.loads(RESULTS.read_text())
    return found


def counted(name: str, ranks: int, tokens: int) -> int:
    """The bytes that the last rank reads, by vLLM."""
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, SlidingWindowManager
    from vllm.v1.kv_cache_interface import MambaSpec

    from tests.models.test_published_files import FILES
    from tests.models.vllm_bytes import config_of
    from tests.models.vllm_judge import built

    itemsize_of_fp8 = None
    if name in FILES:
        config = json.loads(FILES[name].read_bytes())
        quantized = FILES[name].with_name(f"{name}_hf_quant_config.json")
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            if quantized.exists():
                Path(folder, "hf_quant_config.json").write_bytes(quantized.read_bytes())
            read = get_config(folder, trust_remote_code=False)
        text = read.get_text_config()
        quantization = ModelArchConfigConvertorBase(read, text).get_quantization_config()
        dtype = get_kv_cache_quant_algo_string(quantization) if quantization else None
        itemsize_of_fp8 = 1 if str(dtype).startswith("fp8") else None
        config = text.to_dict() | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
        config.pop("quantization_config", None)
        config["architectures"] = [
            (json.loads(FILES[name].read_bytes())["architectures"][0]).replace(
                "ForConditionalGeneration", "ForCausalLM"
            )
        ]
    else:
        config = config_of(name)
    vllm, specs, _ = built(config, ranks, block_size=16)
    total = 0
    for group in get_kv_cache_groups(vllm, specs):
        block = group.kv_cache_spec.block_size
        for layer in group.layer_names:
            spec = specs[layer]
            if isinstance(spec, MambaSpec):
                total += spec.real_page_size_bytes
                continue
            skipped = 0
            if window := getattr(spec, "sliding_window", None):
                manager = SimpleNamespace(sliding_window=window, extra_retained_tokens=0)
                skipped = SlidingWindowManager.get_num_skipped_tokens(manager, tokens - 1)
            if chunk := getattr(spec, "attention_chunk_size", None):
                manager = SimpleNamespace(attention_chunk_size=chunk)
                skipped = ChunkedLocalAttentionManager.get_num_skipped_tokens(manager, tokens - 1)
            bytes_per_token = spec.real_page_size_bytes // spec.block_size
            if itemsize_of_fp8:
                bytes_per_token = bytes_per_token // spec.dtype.itemsize * itemsize_of_fp8
            total += bytes_per_token * (tokens - skipped // block * block)
    return total


def main() -> int:
    """Count all, and write what vLLM has."""
    from tests.models.vllm_judge import prepare

    prepare()
    found: dict[str, Any] = {}
    for name, (ranks, tokens) in DEPLOYMENTS.items():
        found[name] = counted(name, ranks, tokens)
        print(name, found[name], flush=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    sys.exit(main())
