"""How vLLM 0.33 and SGLang 0.5.23 store a model's cache, and which sizes and layouts they support.

kvplan plans more than engines support: ten KV heads on four ranks, say. Each rule of :data:`RULES`
names the file of the engine that has it, and yields a reason for each option that the engine
refuses at start, or would store in another way. What depends on the hardware (an attention backend
that can be replaced) is no reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from kvplan.errors import KVPlanError
from kvplan.models.layouts import HEAD, KV, STEP
from kvplan.models.model import Model
from kvplan.models.options import AUTO, EngineOptions, items_of
from kvplan.models.tensors import SSM

VLLM: Final = "vLLM 0.33"
SGLANG: Final = "SGLang 0.5.23"

ENGINES: Final = MappingProxyType({"vllm": VLLM, "sglang": SGLANG})
"""Engines by the word for their defaults, as in ``--src vllm,tp=4``."""

CONNECTOR: Final = "KvplanConnector"
ASKED_LAYOUTS: Final = MappingProxyType(
    {CONNECTOR: "BLHNC", "NixlConnector": "LBHNC", "MooncakeConnector": "LBHNC"}
)
"""The layouts that connectors ask vLLM for, except for MLA (``get_required_kvcache_layout``)."""

STATED_STATES: Final = ("nemotron_h", "kimi_linear", "qwen3_5_text", "qwen3_5_moe_text")
"""Types whose states vLLM stores as their file or class says; others have the weights' dtype."""


def _has_index(model: Model) -> bool:
    return any(tensor.kind == "index" for tensor in model.tensors)


def _has(model: Model, axis_name: str) -> bool:
    return any(axis_name in dict(tensor.axes) for tensor in model.tensors)


def _is_mla(model: Model) -> bool:
    paged = [tensor for tensor in model.tensors if tensor.paged]
    return bool(paged) and all(HEAD not in dict(tensor.axes) for tensor in paged)


def default_keys(model: Model, engine: str, connector: str = CONNECTOR) -> dict[str, str]:
    """Return how an engine with a connector stores the model by default, as keys of ``--src``.

    >>> default_keys(Model.shipped("llama-3.1-8b"), VLLM)
    {'layout': 'BLHNC', 'block': '16', 'kv': 'content'}
    """
    keys = _sglang_keys(model) if engine == SGLANG else _vllm_keys(model, connector)
    if any(tensor.plain_axes for tensor in model.tensors) and not model.dtype.startswith("float8"):
        keys["dtype"] = model.dtype
    return keys


def _sglang_keys(model: Model) -> dict[str, str]:
    keys = {"layout": "LBNHC", "block": "64" if _has_index(model) else "1"}
    if _has(model, KV):
        keys["kv"] = "split"
    if model.model_type == "kimi_linear":
        keys["conv"] = "SD"
    return keys


def _vllm_keys(model: Model, connector: str) -> dict[str, str]:
    keys = {"layout": "LBNHC", "block": "64" if _has_index(model) else "16"}
    # attention layers and recurrent states
    if len({tensor.paged for tensor in model.tensors}) > 1:
        keys["block"] = AUTO
    if not _is_mla(model):
        asked = ASKED_LAYOUTS.get(connector, "LBNHC")
        keys["layout"] = "LBHNC" if _has_index(model) else asked
    if _has(model, KV):
        keys["kv"] = "content"
    if len(model.groups) > 1:
        keys["shared"] = "1"
    if _has(model, STEP) and connector != "NixlConnector":
        keys["conv"] = "SD"
    states = {tensor.kind: tensor.dtype for tensor in model.tensors if not tensor.paged}
    weights = next((dtype for kind, dtype in states.items() if kind != SSM), "bfloat16")
    if SSM in states and model.model_type not in STATED_STATES and weights != states[SSM]:
        keys["ssm"] = f"{weights}"
    return keys


def engine_named(text: str) -> tuple[str | None, str]:
    """Return the engine that the text of a side names, if it names one, and the other keys.

    Raises ``NAME`` if it names two.

    >>> engine_named("vllm,tp=4"), engine_named("tp=4")
    (('vLLM 0.33', 'tp=4'), (None, 'tp=4'))
    """
    items = [item.strip() for item in text.split(",")]
    words = [item for item in items if item in ENGINES]
    if len(words) > 1:
        got = " and ".join(words)
        raise KVPlanError("NAME", "read a side", expected="one engine", got=got)
    keys = ",".join(item for item in items if item not in ENGINES)
    return (ENGINES[words[0]] if words else None), keys


def with_defaults(model: Model, engine: str, keys: str, connector: str = CONNECTOR) -> str:
    """Return the text of a side with an engine's defaults for all keys that it leaves out."""
    stated = items_of(keys)
    left_out = {key for key, value in stated.items() if value == AUTO and key in ("dtype", "ssm")}
    items = default_keys(model, engine, connector) | stated
    for key in left_out:
        items |= {key: default_keys(model, engine, connector).get(key, AUTO)}
    return ",".join(f"{key}={value}" for key, value in items.items())


def _kv_heads(model: Model) -> list[int]:
    """Return the numbers of KV heads of attention layers; latents have none."""
    paged = [tensor for tensor in model.tensors if tensor.paged]
    return sorted({tensor.shards for tensor in paged if tensor.sharded == HEAD})


def _query_heads(model: Model, options: EngineOptions) -> Iterator[str]:
    if model.query_heads is not None and model.query_heads % options.tp:
        yield f"tp={options.tp} does not divide {model.query_heads} query heads"


def _divided_heads(model: Model, options: EngineOptions) -> Iterator[str]:
    for heads in _kv_heads(model):
        if heads % options.tp and options.tp % heads:
            yield f"{heads} KV heads and tp={options.tp}, neither of which divides the other"


def _gpt_oss_heads(model: Model, options: EngineOptions) -> Iterator[str]:
    for heads in _kv_heads(model):
        if model.model_type == "gpt_oss" and options.tp > heads:
            yield f"tp={options.tp}, more than the {heads} KV heads, which it does not replicate"


def _minicpm3_heads(model: Model, options: EngineOptions) -> Iterator[str]:
    if model.model_type == "minicpm3":
        yield "K and V of each head in its cache, not latents"


def _states(model: Model, options: EngineOptions) -> Iterator[str]:
    """A single group of Mamba-2 is replicated; everything else of a state is divided."""
    states = [tensor for tensor in model.tensors if not tensor.paged]
    for units in sorted({tensor.shards for tensor in states if tensor.shards > 1}):
        if units % options.tp:
            divided = f"the {units} heads, groups or channels of a state"
            yield f"tp={options.tp} does not divide {divided}"


def _pcp_sizes(model: Model, options: EngineOptions) -> Iterator[str]:
    sizes = dict.fromkeys((1, options.pcp, options.tp * options.pcp))
    if options.pcp > 1 and options.dcp not in sizes:
        expected = ", ".join(map(str, sizes))
        yield f"dcp={options.dcp} with pcp={options.pcp} is none of {expected}"


def _dcp_in_tp(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.tp % options.dcp and options.pcp == 1:
        yield f"dcp={options.dcp} does not divide tp={options.tp}"


def _dcp_of_replicas(model: Model, options: EngineOptions) -> Iterator[str]:
    """Decode context parallelism divides the positions of replicated KV heads."""
    tp, dcp = options.tp, options.dcp
    for heads in _kv_heads(model) if dcp > 1 else ():
        # ranks beyond the number of KV heads hold copies of them
        replicas = tp // heads
        if tp <= heads:
            yield f"dcp={dcp} with tp={tp}, not more than the {heads} KV heads"
        elif dcp > replicas:
            yield f"dcp={dcp}, more than the {replicas} ranks that hold each of {heads} KV heads"
        elif model.query_heads is not None and model.query_heads // heads % dcp:
            query_heads = f"{model.query_heads // heads} query heads of a KV head"
            yield f"dcp={dcp} does not divide the {query_heads}"


def _pcp_of_latents(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.pcp > 1 and any(tensor.sharded is not None for tensor in model.tensors):
        yield f"pcp={options.pcp} in a model with other layers than MLA"


def _pcp_in_tp(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.pcp > 1:
        yield f"pcp={options.pcp}, whose ranks its tp_size counts too"


def _interleave(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.dcp > 1 and options.block is not None and options.block % options.interleave:
        yield f"interleave={options.interleave} does not divide block={options.block}"


def _block_of_16(model: Model, options: EngineOptions) -> Iterator[str]:
    is_paged = any(tensor.paged for tensor in model.tensors)
    if options.block is not None and options.block % 16 and is_paged:
        yield f"block={options.block}, no multiple of 16"


def _block_of_64(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.block is not None and options.block % 64 and _has_index(model):
        yield f"block={options.block}, no multiple of 64, in a model with an indexer"


def _page_of_64(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.block != 64 and _has_index(model):
        yield f"block={options.block}, not 64, in a model with an indexer"


def _block_of_a_state(model: Model, options: EngineOptions) -> Iterator[str]:
    """Blocks of attention are made as large as a state, or larger."""
    block = options.block
    if block is not None:
        stored = options.cached(model)
        if stored.kernel_blocks(options.tp, block, options.kv) > 1:
            yield f"block={block}, smaller than a state, not {AUTO}"


def _shared_pool(model: Model, options: EngineOptions) -> Iterator[str]:
    if len(model.groups) > 1 and not options.shared:
        yield "shared=0, not 1"


def _own_pools(model: Model, options: EngineOptions) -> Iterator[str]:
    if len(model.groups) > 1 and options.shared:
        yield "shared=1, not 0"


def _kv_together(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.kv != "content" and _has(model, KV):
        yield f"kv={options.kv}, not content"


def _kv_apart(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.kv != "split" and _has(model, KV):
        yield f"kv={options.kv}, not split"


def _heads_in_slots(model: Model, options: EngineOptions) -> Iterator[str]:
    """With disaggregation a pool asserts that heads are inside slots; latents have no heads."""
    if _kv_heads(model):
        if options.layout != "LBNHC":
            yield f"layout={options.layout}, not LBNHC, the only one with disaggregation"
    elif options.layout not in ("LBNHC", "LBHNC"):
        yield f"layout={options.layout}, neither LBNHC nor LBHNC"


def _whole_blocks(model: Model, options: EngineOptions) -> Iterator[str]:
    """Layers of unequal shapes share memory block by block: a layer's block is contiguous."""
    # scales are stored with their tensors and have no shape of their own
    shapes = {tensor.axes for tensor in model.tensors if tensor.scale_of is None}
    if len(shapes) > 1 and options.layout in ("LHBNC", "BHLNC"):
        yield f"layout={options.layout}, which divides blocks, in a model whose layers differ"


def _sparse_mla(model: Model, options: EngineOptions) -> Iterator[str]:
    if _has_index(model) and _is_mla(model) and options.layout.startswith("B"):
        yield f"layout={options.layout}: kernels of sparse MLA assert strides of whole rows"


def _sparse_heads(model: Model, options: EngineOptions) -> Iterator[str]:
    if _has_index(model) and not _is_mla(model) and options.layout != "LBHNC":
        yield f"layout={options.layout}, not LBHNC, in a model whose indexer chooses blocks"


def _scales(stored: Mapping[str, str]) -> Rule:
    """Return the rule that scales of each dtype are ``inline``, in the ``page`` or a ``region``."""

    def rule(model: Model, options: EngineOptions) -> Iterator[str]:
        scales = [tensor for tensor in model.tensors if tensor.scale_of is not None]
        for dtype in sorted({tensor.dtype or "" for tensor in scales}):
            if options.scales != stored.get(dtype):
                instead = f"not {stored[dtype]}" if dtype in stored else "not stored"
                yield f"scales={options.scales} of {dtype}, {instead}"

    return rule


Rule = Callable[[Model, EngineOptions], Iterator[str]]

RULES: Final[tuple[tuple[str, str, Rule], ...]] = (
    (VLLM, "vllm/config/model.py", _query_heads),
    (VLLM, "vllm/model_executor/layers/linear.py", _divided_heads),
    (VLLM, "vllm/model_executor/models/gpt_oss.py", _gpt_oss_heads),
    (VLLM, "vllm/model_executor/models/minicpm3.py", _minicpm3_heads),
    (VLLM, "vllm/model_executor/layers/mamba/mamba_mixer2.py", _states),
    (VLLM, "vllm/config/parallel.py", _pcp_sizes),
    (VLLM, "vllm/config/parallel.py", _dcp_in_tp),
    (VLLM, "vllm/config/model.py", _dcp_of_replicas),
    (VLLM, "vllm/v1/attention/backend.py", _pcp_of_latents),
    (VLLM, "vllm/config/vllm.py", _interleave),
    (VLLM, "vllm/v1/attention/backends/flash_attn.py", _block_of_16),
    (VLLM, "vllm/v1/attention/backends/mla/indexer.py", _block_of_64),
    (VLLM, "vllm/platforms/interface.py", _block_of_a_state),
    (VLLM, "vllm/v1/core/kv_cache_planning.py", _shared_pool),
    (VLLM, "vllm/v1/kv_cache_interface.py", _kv_together),
    (VLLM, "vllm/v1/attention/backends/utils.py", _whole_blocks),
    (VLLM, "vllm/v1/attention/backends/mla/sparse_utils.py", _sparse_mla),
    (VLLM, "vllm/models/minimax_m3/nvidia/sparse_attention_msa.py", _sparse_heads),
    (
        VLLM,
        "vllm/v1/kv_cache_interface.py",
        _scales({"float32": "inline", "float8_e4m3fn": "page"}),
    ),
    (SGLANG, "sglang/srt/models/llama.py", _query_heads),
    (SGLANG, "sglang/srt/models/llama.py", _divided_heads),
    (SGLANG, "sglang/srt/layers/attention/mamba/mamba.py", _states),
    (SGLANG, "sglang/srt/distributed/parallel_state.py", _dcp_in_tp),
    (SGLANG, "sglang/srt/arg_groups/parallel_hook.py", _pcp_in_tp),
    (SGLANG, "sglang/srt/arg_groups/model_overrides/deepseek_v2.py", _page_of_64),
    (SGLANG, "sglang/srt/mem_cache/memory_pool.py", _own_pools),
    (SGLANG, "sglang/srt/mem_cache/memory_pool.py", _kv_apart),
    (SGLANG, "sglang/srt/mem_cache/memory_pool.py", _heads_in_slots),
    (SGLANG, "sglang/srt/mem_cache/memory_pool.py", _scales({"float8_e4m3fn": "region"})),
)
"""Each rule: the engine, the file that has it, and a function that yields its reasons."""


def reasons(model: Model, options: EngineOptions) -> dict[str, list[str]]:
    """Return the reasons why each engine does not support a side, with the files that say so.

    >>> phi = Model.from_config({"model_type": "phi3", "num_hidden_layers": 40,
    ...     "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10})
    >>> for reason in reasons(phi, EngineOptions(tp=4))["vLLM 0.33"]:
    ...     print(reason)
    10 KV heads and tp=4, neither of which divides the other (vllm/model_executor/layers/linear.py)
    """
    by_engine: dict[str, list[str]] = {engine: [] for engine in ENGINES.values()}
    for engine, source, rule in RULES:
        by_engine[engine] += [f"{reason} ({source})" for reason in rule(model, options)]
    return by_engine
