"""The second judge: what vLLM allocates for a tiny model of each family, compared with the engine that kvplan plans.

``.ci/engines models`` or, where vLLM is installed, ``python -m tests.models.vllm_judge``: builds each model of
transformers that vLLM has without weights on a CPU, lets vLLM make its KV cache groups, and compares groups, layers,
block sizes, page sizes, shapes, dtypes and windows with ``model.engine``. Exit status 1: one is wrong, or
none is equal, as without vLLM.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

from kvplan import Model
from kvplan.models import FAMILIES
from tests.models.walk import CLASSES, EXCEPTIONS, TINY, model_types, stated

SIZES: Final[dict[str, Any]] = {
    **TINY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 192),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 4096),
    "vocab_size": 256,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_head_dim": 128,
    "mamba_d_head": 32,
    "sliding_window": 64,
}
"""As in the walk, but heads of sizes that vLLM's kernels for CPUs have."""

OTHER_SIZES: Final[dict[str, dict[str, Any]]] = {
    "falcon_h1": {"mamba_d_ssm": 384},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {"first_k_dense_replace": 0},
    "lfm2": {"conv_dim": 192, "full_attn_idxs": [2, 4]},
    "longcat_flash": {"head_dim": 64},
    "mamba2": {"head_dim": 32},
    "zamba2": {"num_key_value_heads": 6},
}

Rows = dict[tuple[int, bool], tuple[Any, ...]]
"""For each layer's cache with tokens, and each state: the layers of its group, tokens, bytes and shapes of a block."""


def config_of(model_type: str) -> dict[str, Any]:
    """A config.json that vLLM reads."""
    config_class = CLASSES[model_type]
    fields = {field.name for field in dataclasses.fields(config_class)}
    sizes = {key: value for key, value in SIZES.items() if key in fields}
    if "kv_lora_rank" in fields:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    config = stated(config_class(**{**sizes, **EXCEPTIONS.get(model_type, {}), **OTHER_SIZES.get(model_type, {})}))
    return {**config, "architectures": [ARCHITECTURES[model_type]], "dtype": "bfloat16", "torch_dtype": "bfloat16"}


def allocated(config: dict[str, Any]) -> Rows:
    """What vLLM makes of the file."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import MambaSpec

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        arguments: dict[str, Any] = {"mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False}
        engine = EngineArgs(folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, **arguments)
        vllm = engine.create_engine_config()
        vllm.cache_config.kv_cache_layout = "LBHNC"
        start(vllm)
        with set_current_vllm_config(vllm):
            initialize_model(vllm)
    specs = {}
    for name, layer in vllm.compilation_config.static_forward_context.items():
        shares = getattr(layer, "kv_sharing_target_layer_name", None)
        spec = None if shares or not isinstance(layer, AttentionLayerBase) else layer.get_kv_cache_spec(vllm)
        if spec is not None:
            specs[name] = spec
    rows: Rows = {}
    layers = len(Model.from_config(config).layers)
    for group in get_kv_cache_groups(vllm, specs):
        found = {}
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            number = int(re.findall(r"\d+", name)[0]) % layers  # Falcon-H1 numbers states after all attention layers
            if isinstance(spec, MambaSpec):
                tokens, window = None, None
                shapes = [(*shape, str(dtype)) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
            else:
                tokens, window = spec.block_size, getattr(spec, "sliding_window", None)
                window = getattr(spec, "attention_chunk_size", None) or window
                dims = spec.head_size if "MLA" in type(spec).__name__ else spec.head_size + spec.head_size_v
                shapes = [(spec.num_kv_heads, dims, str(spec.dtype))]
            key = number, tokens is not None
            assert key not in found
            found[key] = tokens, spec.page_size_bytes, window, plain(shapes)
        rows |= {key: (sorted(found), *row) for key, row in found.items()}
    return rows


def plain(shapes: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Shapes without the order of their dimensions, and dtypes by their bare names."""
    return sorted((*sorted(dims), dtype.removeprefix("torch.")) for *dims, dtype in shapes)


def planned(config: dict[str, Any], tokens: int | None) -> Rows:
    """What kvplan makes of the same file, with blocks of ``tokens``."""
    model = Model.from_config(config)
    together = len(model.groups) > 1
    model = model.grouped() if together else model
    (worker,) = model.engine("vllm", tokens_per_block=tokens or 16, shared=together, num_blocks=2)
    strides = {view.name: view.block_stride_bytes for view in worker.views}
    blocks = {group.name: group.tokens_per_block for group in worker.groups}
    rows: Rows = {}
    for group in model.groups:
        found = {}
        for number, layer in enumerate(model.layers):
            own = [tensor for tensor in layer if tensor.group == group]
            shapes = [(*(size for _, size in t.axes), t.dtype or model.dtype) for t in own if "conv" not in t.kind]
            conv = [(dict(tensor.axes), tensor.dtype) for tensor in own if "conv" in tensor.kind]
            if conv:
                channels = sum(axes["channel"] for axes, _ in conv)
                shapes.append((channels, conv[0][0]["step"], conv[0][1]))
            if own and own[0].paged:
                axes = dict(own[0].axes)
                shapes = [(axes.get("head", 1), axes.get("kv", 1) * axes["dim"], model.dtype)]
            if own:
                stride = strides[f"layers.{number}.{own[0].kind}"]
                found[number, own[0].paged] = blocks[group], stride, own[0].window, plain(shapes)
        rows |= {key: (sorted(found), *row) for key, row in found.items()}
    return rows


def start(vllm: Any) -> None:
    """One rank of its own; its groups are made anew, since only a mixture of experts has one for them."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(vllm):
        if not parallel_state.torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/start", 0, "gloo")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)


def verdict(model_type: str) -> tuple[str, str]:
    """``equal``, ``wrong``, ``not loaded`` or ``not compared``, and why."""
    if model_type not in ARCHITECTURES:
        return "not loaded", "no causal language model in transformers"
    if "index_head_dim" in FAMILIES[model_type].defaults:
        return "not loaded", "sparse attention, which needs a GPU"
    if model_type == "zamba2":
        return "not compared", "vLLM numbers its attention by shared blocks, not by layers"
    try:
        config = config_of(model_type)
        theirs = allocated(config)
    except Exception as error:
        return "not loaded", f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    ours = planned(config, min((tokens for _, tokens, *_ in theirs.values() if tokens), default=None))
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            return "wrong", f"\n  {key}: {ours.get(key)}\n  in vLLM: {theirs.get(key)}"
    return "equal", f"{len(theirs)} caches"


def main(names: list[str]) -> int:
    """Judge the families named, or all that kvplan reads."""
    counts: Counter[str] = Counter()
    types = model_types()
    for model_type in names or sorted({*types} & {*FAMILIES}):
        result, text = verdict(model_type)
        counts[result] += 1
        print(result, model_type, text, flush=True)
    print(dict(counts))
    return 0 if counts["equal"] and not counts["wrong"] else 1


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(main(sys.argv[1:]))
