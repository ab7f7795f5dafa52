"""Bytes per token of published models, as vLLM counts them, beside kvplan's.

``.ci/engines bytes`` or, where vLLM is installed, ``python -m tests.models.vllm_bytes``: builds each model at its
published size without weights on a CPU, adds the pages of its layers up, and lets vLLM say how many tokens a pool of
some size holds, as it logs it at start. What it finds is written to vllm_bytes.json, which tests compare with kvplan
and with the table of docs/how-to/models.md. Rows of sparse latents are vLLM's specs of one layer, since a model of them
needs a GPU.

Exit status 1: a number differs from kvplan's, which is printed beside it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kvplan import Model
from kvplan.models.config import shipped_configs

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "vllm_bytes.json"

NAMES: Final = (
    *("llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "phi-4", "mistral-small-24b"),
    *("deepseek-v3", "gpt-oss-20b", "gemma-3-27b"),
    *("qwen3-next-80b", "granite-4.0-h-tiny", "nemotron-h-8b"),
)
SPARSE: Final = ("deepseek-v3.2", "glm-5")
"""Models of sparse latents, in the rows that vLLM keeps for ``--kv-cache-dtype fp8``."""

OTHERS: Final[dict[str, dict[str, Any]]] = {
    "glm-5": {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 78,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
    }
}
"""The published sizes of models that kvplan does not ship."""

POOL_GIB: Final = 40
"""The memory of the pool whose tokens vLLM logs."""

Counts = dict[str, int]
"""``token`` and ``request``, the bytes of all layers for each; ``logged``, the tokens that vLLM logs of the pool."""


def results() -> dict[str, Counts]:
    """What vLLM has counted."""
    found: dict[str, Counts] = json.loads(RESULTS.read_text())
    return found


def sizes_of(name: str) -> dict[str, Any]:
    """The published sizes of a model."""
    sizes: dict[str, Any] = {**shipped_configs(), **OTHERS}[name]
    return sizes


def counted(name: str) -> Counts:
    """The bytes of a model per token and per request, as kvplan counts them."""
    from kvplan.cli.caches import caches_of

    number = {"token": 0, "request": 0}
    for cache in caches_of(Model.from_config(sizes_of(name)).with_dtypes(ssm_dtype="float32")):
        number["token" if cache.tensor.paged else "request"] += cache.total_bytes
    return number


def config_of(name: str) -> dict[str, Any]:
    """The file of a model: its published sizes, and the defaults of its class."""
    import transformers

    from tests.models.vllm_judge import ALSO_STATED, name_of
    from tests.models.walk import stated

    sizes = sizes_of(name)
    sizes = sizes.get("text_config", sizes)
    model_type = sizes["model_type"]
    keys = {key: value for key, value in sizes.items() if key not in ("model_type", "torch_dtype", "dtype")}
    config = {**ALSO_STATED[""], **stated(transformers.CONFIG_MAPPING[model_type](**keys)), **keys}
    config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16", "architectures": [name_of(model_type, "CAUSAL_LM")]}
    return config


def specs_of(name: str) -> tuple[Any, dict[str, Any]]:
    """vLLM's configuration, and its spec of each layer that caches."""
    from tests.models.vllm_judge import built

    if name not in SPARSE:
        return built(config_of(name), 1)[:2]
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    vllm, specs, _ = built(config_of("deepseek-v3"), 1)
    config = sizes_of(name)
    index = config["index_head_dim"]
    row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    latents = SimpleNamespace(
        kv_cache_dtype="fp8_ds_mla",
        head_size=row,
        sliding_window=None,
        indexer=True,
        non_causal_multi_token_decode=False,
    )
    # an fp32 scale for each 128 values, as Indexer makes it
    keys = SimpleNamespace(cache_config=vllm.cache_config, head_dim=index + index // 128 * 4, dtype=torch.uint8)
    specs = {}
    for layer in range(config["num_hidden_layers"]):
        specs[f"layers.{layer}.attn"] = MLAAttention.get_kv_cache_spec(latents, vllm)
        specs[f"layers.{layer}.index"] = DeepseekV32IndexerCache.get_kv_cache_spec(keys, vllm)
    return vllm, specs


def vllm_counts(name: str) -> Counts:
    """The bytes of a model as vLLM has them, and the tokens that it logs."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import MambaSpec

    vllm, specs = specs_of(name)
    number = {"token": 0, "request": 0}
    for spec in specs.values():
        if isinstance(spec, MambaSpec):
            number["request"] += spec.real_page_size_bytes
        else:
            bytes_per_token, rest = divmod(spec.real_page_size_bytes, spec.block_size)
            assert rest == 0, spec
            number["token"] += bytes_per_token
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    kv_cache_utils.logger.addHandler(handler)
    kv_cache_utils.logger.setLevel(logging.INFO)
    (pool,) = kv_cache_utils.get_kv_cache_configs(vllm, [specs], [POOL_GIB << 30])
    kv_cache_utils.update_kv_cache_capacity(vllm, pool)
    kv_cache_utils.logger.removeHandler(handler)
    (logged,) = re.findall(r"KV cache size: ([\d,]+) tokens", "\n".join(lines))
    return number | {"logged": int(logged.replace(",", ""))}


def table() -> str:
    """The numbers as a Markdown table."""
    rows = ["| model | bytes per token | bytes per request | tokens that vLLM logs |", "|---|---:|---:|---:|"]
    for name, number in results().items():
        figures = " | ".join(f"{number[unit]:,}" for unit in ("token", "request", "logged"))
        rows.append(f"| {name} | {figures} |")
    return "\n".join(rows)


def main() -> int:
    """Count all, write what vLLM has, and print what differs."""
    from tests.models.vllm_judge import prepare

    prepare()
    found = {}
    status = 0
    for name in (*NAMES, *SPARSE):
        found[name] = vllm_counts(name)
        ours = counted(name)
        equal = ours.items() <= found[name].items()
        status |= not equal
        print(f"{name}: {found[name]}", "equal" if equal else f"DIFFERS, kvplan has {ours}", flush=True)
    lines = [f"{json.dumps(name)}: {json.dumps(number)}" for name, number in found.items()]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return status


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    sys.exit(main())
