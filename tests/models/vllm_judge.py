"""The second judge: what vLLM allocates for a tiny model of each family, compared with the engine that kvplan plans.

``.ci/engines models`` or, where vLLM is installed, ``python -m tests.models.vllm_judge``: builds each model that vLLM
has without weights on a CPU, lets vLLM make its KV cache groups, and compares groups, layers, block sizes, page sizes,
shapes, dtypes and windows with ``model.engine``. It compares the tensors that the connector reads off vLLM's own specs
with those of the model, too. It does so for the last rank of TP 1, of TP 2 with heads and groups that both ranks hold,
and of TP 3 with heads and groups that the ranks divide. The other ranks are not there: a cache depends on how many
there are, not on what they say. All families take three minutes, and their verdicts are written to vllm_verdicts.json,
from which ``python -m tests.models.page`` makes a page; arguments name some of them.

Exit status 1: one is wrong, or none is equal, as without vLLM.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_CPU_KVCACHE_SPACE": "1"}

import attrs
import torch
import transformers
from transformers.models.auto import modeling_auto

from kvplan import KVPlanError, Model
from kvplan.bridges import RankInfo, vllm_model
from kvplan.models import FAMILIES
from kvplan.models.tensors import Tensor
from tests.models.page import write_verdicts
from tests.models.walk import CLASSES, EXCEPTIONS, KEYS, ROPE, TINY, model_types, stated

SIZES: Final[dict[str, Any]] = {
    **TINY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 192),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size"), 96),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), 96),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 4096),
    "vocab_size": 384,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_head_dim": 128,
    "linear_num_heads": 6,
    "mamba_d_head": 32,
    "sliding_window": 64,
}
"""As in the walk, but heads of sizes that vLLM's kernels for CPUs have, and widths that 2 and 3 ranks divide."""


def mrope(*sections: int) -> dict[str, Any]:
    """The rotary embedding of images, whose sections make up half a head."""
    return {"rope_parameters": {**ROPE, "mrope_section": sections}}


def nas_block(heads_of_group: int | None) -> dict[str, Any]:
    """What a file of Nemotron-NAS states of a layer; without a group of heads it has no attention."""
    attention = {"n_heads_in_group": heads_of_group, "no_op": heads_of_group is None, "replace_with_linear": False}
    return {"attention": attention, "ffn": {"no_op": False, "intermediate_size": 96}}


BAILING: Final[dict[str, Any]] = {
    **dict.fromkeys(("use_bias", "use_qkv_bias", "norm_topk_prob"), False),
    "embedding_dropout": 0.0,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
}

OTHER_SIZES: Final[dict[str, dict[str, Any]]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**ROPE, "mrope_section": [6, 6, 4]}}},
    "bailing_hybrid": {
        "head_dim": 16,
        **dict.fromkeys(("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")),
    },
    "chatglm": {"kv_channels": 32},
    **{key: {"attn_type_list": [0, 0, 1] * 2} for key in ("minimax_m1", "minimax_text_01")},
    **{key: {"head_dim": 32} for key in ("internlm2", "minicpm", "orion")},
    "falcon_h1": {"mamba_d_ssm": 384},
    "glm4_moe": {"head_dim": 32},
    "glm4v_moe_text": mrope(4, 2, 2),
    "glm4_moe_lite": {"first_k_dense_replace": 0},
    "lfm2": {"conv_dim": 192, "full_attn_idxs": [2, 4]},
    "longcat_flash": {"head_dim": 64},
    "mamba2": {"head_dim": 32},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"] * 2},
    "step3p5": {"rope_parameters": ROPE},
    "zamba2": {"num_key_value_heads": 6},
    **dict.fromkeys(("paddleocr_vl_text", "cosmos3_edge_text", "hunyuan_vl_text"), mrope(16, 8, 8)),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), mrope(8, 4, 4)),
}

ALSO_STATED: Final[dict[str, dict[str, Any]]] = {
    "": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
    },
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "aria_text": {"num_experts_per_tok": 2},
    "bailing_hybrid": {
        **dict.fromkeys(("use_bias", "use_qkv_bias", "norm_topk_prob"), False),
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "layer_group_size": 3,
        "short_conv_kernel_size": 4,
        "no_kda_lora": True,
        "group_norm_size": 6,
        "moe_shared_expert_intermediate_size": 96,
    },
    "bailing_moe": BAILING,
    "bailing_moe_v2": BAILING,
    "chatglm": {
        **dict.fromkeys(("add_bias_linear", "add_qkv_bias", "apply_residual_connection_post_layernorm"), False),
        **dict.fromkeys(("original_rope", "rmsnorm", "post_layer_norm", "multi_query_attention"), True),
        "fp32_residual_connection": False,
        "hidden_dropout": 0.0,
        "layernorm_epsilon": 1e-6,
        "padded_vocab_size": 384,
        "multi_query_group_num": 3,
    },
    "exaone": {"activation_function": "silu", "layer_norm_epsilon": 1e-6},
    "glm4v_moe_text": {"head_dim": 32, "use_qk_norm": False},
    "hy_v3": {"first_k_dense_replace": 0, "expert_hidden_dim": 96, "route_norm": True},
    "iquestcoder": {"qkv_bias": False},
    "kimi_linear": {
        "layer_types": None,
        "linear_attn_config": {
            "num_heads": 6,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [3, 6],
            "kda_layers": [1, 2, 4, 5],
        },
        "mla_use_nope": True,
    },
    "lfm2": {"block_dim": 192},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mimo": {"sliding_window": None},
    "mimo_v2_flash": {
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 6),
        **dict.fromkeys(("swa_head_dim", "swa_v_head_dim"), 64),
        **dict.fromkeys(("swa_rope_theta", "rope_theta"), 1e4),
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
        "moe_layer_freq": [0] * 6,
        "layernorm_epsilon": 1e-6,
        "sliding_window_size": 64,
    },
    "minicpm": {"dim_model_base": 192, "scale_depth": 1, "scale_emb": 1},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid"},
    "nemotron-nas": {"block_configs": [*map(nas_block, (6, None, 2, 6, 2, 6))]},
    "step3_text": {"moe_layers_enum": "4,5"},
    "step3p5": {"num_attention_groups": 3, "rope_theta": 1e4, "rope_parameters": None, "rope_scaling": None},
}
"""Keys that published files state and vLLM reads, but that the class in transformers does not have."""

OTHER_NAMES: Final = {
    "bailing_hybrid": "BailingMoeV3ForCausalLM",
    "bailing_moe": "BailingMoeForCausalLM",
    "bailing_moe_v2": "BailingMoeV2ForCausalLM",
    "chatglm": "ChatGLMForConditionalGeneration",
    "exaone": "ExaoneForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "iquestcoder": "IQuestCoderForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "mimo": "MiMoForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "minimax_m1": "MiniMaxM1ForCausalLM",
    "minimax_text_01": "MiniMaxText01ForCausalLM",
    "nemotron-nas": "DeciLMForCausalLM",
    "orion": "OrionForCausalLM",
    "step3_text": "Step3TextForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}
"""The architectures of files that transformers does not have, or maps to no causal language model."""

RANKS: Final[dict[int, dict[str, Any]]] = {
    1: {},
    2: {
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "num_attention_groups": 1,
        "block_configs": [*map(nas_block, (6, None, 3, 6, 3, 6))],
        "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8},
    },
    3: {},
}
"""How many ranks, and the sizes that make them hold the same heads and groups."""

NOT_COMPARED: Final = {
    "mimo_v2_flash": "windows of vLLM are a token shorter than those of SGLang and transformers, which kvplan has",
    "minicpm3": "vLLM keeps K and V of each head, SGLang and transformers keep latents, which kvplan has",
    "zamba2": "vLLM numbers its attention by shared blocks, not by layers",
}

LING_2: Final = "bailing_hybrid/BailingMoeV2_5ForCausalLM"
"""A model of the same type as Ling 3, but with lightning attention."""

ON_CPU: Final = ("apertus", "bloom")
"""Types whose models read their own weights as they are made; the others have none."""

MULTIMODAL: Final = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
"""The mappings of transformers that have models around text models."""

TYPES: Final[dict[str, list[str]]] = {}
"""The types of files around each text model."""

Rows = dict[tuple[int, bool], tuple[Any, ...]]
"""For each layer's cache with tokens, and each state: the layers of its group, tokens, bytes and shapes of a block."""


class WrongError(Exception):
    """What vLLM's own objects say of a cache is not what kvplan reads in the model's file."""


class Absent(MetaPathFinder, Loader):
    """Stands in for packages that models import to prepare images, or for kernels of GPUs."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """A package, whatever it is."""
        known = name.partition(".")[0] in ("torchvision", "cutlass", "cuda")
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> Any:
        """Has every name."""
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module: Any) -> None:
        """Nothing to do."""


def config_of(model_type: str, ranks: int) -> dict[str, Any]:
    """A config.json that vLLM reads: that of a text model, or the one around it if vLLM has no other."""
    model_type, _, architecture = model_type.partition("/")
    config_class = CLASSES.get(model_type) or unknown(model_type)
    known = {field.name for field in dataclasses.fields(config_class)}
    if model_type not in CLASSES:
        known |= {*FAMILIES[model_type].defaults, "num_hidden_layers", "num_attention_heads", "hidden_size"}
        known |= {*SIZES} - {*KEYS, "index_topk"}
    sizes = {key: value for key, value in {**SIZES, **RANKS[ranks]}.items() if key in known}
    sizes |= EXCEPTIONS.get(model_type, {}) | OTHER_SIZES.get(model_type, {})
    sizes |= {key: value for key, value in RANKS[ranks].items() if key in sizes}
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    config = {**ALSO_STATED[""], **stated(config_class(**sizes)), **ALSO_STATED.get(model_type, {})}
    config |= {"head_dim": 192} if architecture else {}  # so that its states are several times as large as latents
    config |= {key: value for key, value in RANKS[ranks].items() if key in ALSO_STATED.get(model_type, {})}
    config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    architecture = architecture or OTHER_NAMES.get(model_type) or name_of(model_type, "CAUSAL_LM")
    around_it = ((name_of(outer, kind), outer) for outer in TYPES.get(model_type, []) for kind in MULTIMODAL)
    if not architecture:
        architecture, outer = next(((name, outer) for name, outer in around_it if name in supported()), ("", ""))
        if not architecture:
            raise ValueError("no text model in vLLM, and no file around it in this transformers")
        config = around(stated(transformers.CONFIG_MAPPING[outer]()), config)
    return {**config, "architectures": [architecture]}


def name_of(model_type: str, mapping: str) -> str:
    """The name that a model of transformers has in files."""
    names: dict[str, str] = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
    return names.get(model_type, "")


def around(outer: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The file ``outer`` with another text model of the same type, wherever it has it."""
    if outer.get("model_type") == config["model_type"]:
        return config
    return {key: around(value, config) if isinstance(value, dict) else value for key, value in outer.items()}


class Keys(dict[str, Any]):
    """A mapping whose keys are attributes too."""

    def __getattr__(self, key: str) -> Any:
        if key not in self:
            raise AttributeError(key)
        return self[key]


class Unknown(transformers.PreTrainedConfig):  # type: ignore[misc]
    """A file whose lists of mappings are lists of objects, as published classes make them."""

    def __post_init__(self, **keys: Any) -> None:
        super().__post_init__(**keys)
        blocks: Any = getattr(self, "block_configs", None)
        self.block_configs = json.loads(json.dumps(blocks), object_hook=Keys)


def unknown(model_type: str) -> Any:
    """A class for the files of a type that this release of transformers does not have."""
    config_class: Any = type("Unknown", (Unknown,), {"model_type": model_type})
    config_class = dataclasses.dataclass(config_class)
    transformers.AutoConfig.register(model_type, config_class, exist_ok=True)
    return config_class


def supported() -> Any:
    """The architectures that vLLM has."""
    from vllm.model_executor.models import ModelRegistry

    return ModelRegistry.get_supported_archs()


def built(config: dict[str, Any], ranks: int, block_size: int | None = None) -> tuple[Any, dict[str, Any], Any]:
    """vLLM's configuration of a model on the last rank, the spec of each layer that caches, and the model.

    With a ``block_size``, states have the dtype that they have on a GPU; without one float32, as on a CPU.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model

    model_type = config["model_type"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        arguments: dict[str, Any] = {"mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False}
        arguments |= {"mamba_cache_dtype": "float32"} if LING_2.endswith(config["architectures"][0]) else {}
        arguments |= {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 512,
            "language_model_only": True,
            "block_size": block_size,
        }
        vllm = EngineArgs(folder, tensor_parallel_size=ranks, **arguments).create_engine_config()
        vllm.cache_config.kv_cache_layout = "LBHNC"
        if block_size is not None:
            from vllm.model_executor.models.config import MODELS_CONFIG_MAP

            vllm.cache_config.mamba_ssm_cache_dtype = "auto"
            rule = MODELS_CONFIG_MAP.get(config["architectures"][0])
            if hasattr(rule, "update_mamba_ssm_cache_dtype"):
                rule.verify_and_update_config(vllm)
        start(vllm, ranks)
        with set_current_vllm_config(vllm), torch.device("cpu" if model_type in ON_CPU else "meta"):
            model = initialize_model(vllm)
    specs = {}
    for name, layer in vllm.compilation_config.static_forward_context.items():
        shares = getattr(layer, "kv_sharing_target_layer_name", None)
        spec = None if shares or not isinstance(layer, AttentionLayerBase) else layer.get_kv_cache_spec(vllm)
        if spec is not None:
            specs[name] = spec
    return vllm, specs, model


def allocated(config: dict[str, Any], ranks: int) -> Rows:
    """What vLLM makes of the file on the last rank."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import MambaSpec

    vllm, specs, _model = built(config, ranks)  # an engine keeps its model, in which the connector looks
    rows: Rows = {}
    groups = get_kv_cache_groups(vllm, specs)
    check_observed(config, ranks, vllm, groups)
    for group in groups:
        found = {}
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            number = number_of(name, config)
            if isinstance(spec, MambaSpec):
                tokens, window = None, None
                shapes = [(*shape, str(dtype)) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
            else:
                tokens, window = spec.block_size, getattr(spec, "sliding_window", None)
                window = getattr(spec, "attention_chunk_size", None) or window
                dims = spec.head_size if "MLA" in type(spec).__name__ else spec.head_size + spec.head_size_v
                shapes = [(spec.num_kv_heads, dims, str(spec.dtype))]
            key = number, tokens is not None
            assert key not in found, name
            found[key] = tokens, spec.page_size_bytes, window, plain(shapes)
        rows |= {key: (sorted(found), *row) for key, row in found.items()}
    return rows


def number_of(name: str, config: dict[str, Any]) -> int:
    """The number that kvplan gives vLLM's layer of a name."""
    own, *second = map(int, re.findall(r"\.(\d+)", name))  # LongCat-Flash attends twice in a layer
    own //= 2 if config["model_type"] == "cosmos3_edge" else 1  # which numbers attention and MLP
    layers = len(Model.from_config(config).layers)
    return (2 * own + second[0] if second else own) % layers  # Falcon-H1 numbers states after attention


def check_observed(config: dict[str, Any], ranks: int, vllm: Any, groups: Sequence[Any]) -> None:
    """Compare what the connector reads off vLLM's specs and layers with what kvplan reads in the file.

    Raises WrongError. Groups and windows are those of the scheduler, and not of a tensor.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    from kvplan_nixl.settings import ModelSettings
    from kvplan_nixl.vllm.description import kv_heads_of

    names = [name for group in groups for name in group.layer_names]
    cache = SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=[SimpleNamespace(layers=names)])
    observed = vllm_model(
        "observed",
        RankInfo("vllm", ranks - 1, ranks - 1, ranks),
        cache,
        vllm.compilation_config.static_forward_context,
        kv_heads=kv_heads_of(vllm, ModelSettings()),
        conv=get_conv_state_layout(),
    )
    model = Model.from_config(config)
    planned = {(number, t.kind): tensor_of(t, model) for number, layer in enumerate(model.layers) for t in layer}
    found = {(number_of(name, config), t.kind): tensor_of(t, model) for name in names for t in observed.layers[name][1]}
    for key in sorted({*planned, *found}):
        if planned.get(key) != found.get(key):
            raise WrongError(f"{key} observed: {found.get(key)}, in the file: {planned.get(key)}")


def tensor_of(tensor: Tensor, model: Model) -> Tensor:
    """A tensor without what a scheduler alone needs."""
    dtype = tensor.dtype or model.dtype
    return attrs.evolve(tensor, group="any", window=None, chunked=False, plain_axes=None, dtype=dtype)


def plain(shapes: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Shapes without the order of their dimensions, and dtypes by their bare names."""
    return sorted((*sorted(dims), dtype.removeprefix("torch.")) for *dims, dtype in shapes)


def planned(config: dict[str, Any], tokens: int | None, ranks: int) -> Rows:
    """What kvplan makes of the same file on the last rank, with blocks of ``tokens``."""
    model = Model.from_config(config)
    together = len(model.groups) > 1
    model = model.grouped() if together else model
    worker = model.engine("vllm", ranks, tokens_per_block=tokens or 16, shared=together, num_blocks=2)[-1]
    views = {view.name: view for view in worker.views}
    blocks = {group.name: group.tokens_per_block for group in worker.groups}
    rows: Rows = {}
    for group in model.groups:
        found = {}
        for number, layer in enumerate(model.layers):
            own = [tensor for tensor in layer if tensor.group == group]
            conv: list[tuple[Any, ...]] = []
            shapes: list[tuple[Any, ...]] = []
            for tensor in own:
                view = views[f"layers.{number}.{tensor.kind}"]
                sizes: dict[str, Any] = {axis.name: axis.extent for axis in view.axes}
                if tensor.kind.startswith("conv"):
                    conv.append((sizes["channel"], sizes["step"], view.dtype))
                elif tensor.paged:
                    shapes.append((sizes.get("head", 1), sizes.get("kv", 1) * sizes["dim"], view.dtype))
                else:
                    shapes.append((*sizes.values(), view.dtype))
            if conv:
                shapes.append((sum(channels for channels, *_ in conv), *conv[0][1:]))
            if own:
                stride = views[f"layers.{number}.{own[0].kind}"].block_stride_bytes
                found[number, own[0].paged] = blocks[group], stride, own[0].window, plain(shapes)
        rows |= {key: (sorted(found), *row) for key, row in found.items()}
    return rows


def start(vllm: Any, ranks: int) -> None:
    """The last of ``ranks``, which is alone. Its groups are new, since only a mixture of experts has one for them."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(vllm):
        if not parallel_state.torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/start", 0, "gloo")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)
    group = parallel_state.get_tp_group()
    group.world_size, group.rank_in_group = ranks, ranks - 1


def verdict(model_type: str, ranks: int) -> tuple[str, str]:
    """``equal``, ``wrong``, ``refused`` by kvplan, ``not loaded`` by vLLM or ``not compared``, and why."""
    if model_type in NOT_COMPARED:
        return "not compared", NOT_COMPARED[model_type]
    if "index_head_dim" in FAMILIES[model_type.partition("/")[0]].defaults:
        return "not loaded", "sparse attention, which needs a GPU"
    try:
        config = config_of(model_type, ranks)
        Model.from_config(config)
        theirs = allocated(config, ranks)
    except KVPlanError as error:
        return "refused", str(error)
    except WrongError as error:
        return "wrong", str(error)
    except Exception as error:
        return "not loaded", shortly(error)
    ours = planned(config, min((tokens for _, tokens, *_ in theirs.values() if tokens), default=None), ranks)
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            return "wrong", f"{key}: {ours.get(key)}, in vLLM: {theirs.get(key)}"
    return "equal", ""


def shortly(error: Exception) -> str:
    """What vLLM says, or where it says nothing."""
    text = " ".join(str(error).split()).partition(" Supported architectures")[0].partition(" [type=")[0]
    text = text.rpartition("Value error, ")[2].partition(" for '/")[0]
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f" in {Path(place.tb_frame.f_code.co_filename).name}" if place is not None and not text else ""
    return f"{type(error).__name__}{where}: {text}"[:160].strip(": ")


def prepare() -> None:
    """Let vLLM build models of GPUs here, in this process."""
    from vllm.model_executor.models import registry
    from vllm.triton_utils import triton

    importlib.import_module("tvm_ffi")  # before there is anything to import for CUDA
    sys.meta_path.append(Absent())
    triton.set_allocator = torch.cuda.Stream = MagicMock()
    registry._run_in_subprocess = lambda function: function()  # a process for each model would take ten seconds


def main(names: list[str]) -> int:
    """Judge the families named, or all that kvplan reads, and then write the verdicts."""
    prepare()
    TYPES.update(model_types())
    by_family: dict[str, list[tuple[str, str]]] = {}
    judged = names or sorted([*FAMILIES, LING_2])
    for number, name in enumerate(judged, 1):
        started = time.perf_counter()
        results: list[tuple[str, str]] = []
        for ranks in RANKS:
            if ranks > 1 and results[0][0] != "equal":
                break
            results.append(verdict(name, ranks))
        by_family[name] = results
        spent = time.perf_counter() - started
        print(f"[{number}/{len(judged)}] {name}: {'; '.join(map(': '.join, results))}, {spent:.1f} s", flush=True)
    if not names:
        write_verdicts(by_family)
    for place, ranks in enumerate(RANKS):
        counts = Counter(dict.fromkeys(("equal", "wrong"), 0))
        counts.update(results[place][0] for results in by_family.values() if place < len(results))
        print(f"TP {ranks}:", ", ".join(f"{count} {result}" for result, count in counts.items()))
    verdicts = {result for results in by_family.values() for result, _ in results}
    return 0 if "equal" in verdicts and not verdicts & {"wrong", "refused"} else 1


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(main(sys.argv[1:]))
