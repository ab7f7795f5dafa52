"""The rules of sizes and layouts of vLLM 0.33 and SGLang 0.5.23, each with its source.

kvplan plans more than engines run: ten KV heads on four ranks, say. A rule here is a function of a
model and the options of one engine. It yields a reason for each thing that the engine refuses at
start, or stores in another way. What depends on the hardware (an attention backend that another one
can replace) is no reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvplan.cli.defaults import (
    AUTO,
    ENGINES,
    SGLANG,
    VLLM,
    default_keys,
    has_index,
    has_kv,
    items_of,
)
from kvplan.cli.model_files import EngineViews
from kvplan.cli.options import EngineOptions, Engines
from kvplan.models import Model
from kvplan.models.layouts import HEAD
from kvplan.models.tensors import Tensor


def _paged_tensors(model: Model) -> list[Tensor]:
    return [tensor for tensor in model.tensors if tensor.paged]


def _numbers_of_kv_heads(model: Model) -> list[int]:
    """Return the numbers of KV heads of attention layers; latents have none."""
    return sorted({tensor.shards for tensor in _paged_tensors(model) if tensor.sharded == HEAD})


def _check_query_heads(model: Model, options: EngineOptions) -> Iterator[str]:
    if model.query_heads is not None and model.query_heads % options.tp:
        yield f"tp={options.tp} does not divide {model.query_heads} query heads"


def _check_kv_heads(model: Model, options: EngineOptions) -> Iterator[str]:
    for heads in _numbers_of_kv_heads(model):
        if heads % options.tp and options.tp % heads:
            yield f"{heads} KV heads and tp={options.tp}, neither of which divides the other"


def _check_no_replicas(model: Model, options: EngineOptions) -> Iterator[str]:
    """Ranks of GPT-OSS share no KV head."""
    if model.model_type != "gpt_oss":
        return
    for heads in _numbers_of_kv_heads(model):
        if options.tp > heads:
            yield f"tp={options.tp}, more than the {heads} KV heads, which it does not replicate"


def _check_no_latents(model: Model, options: EngineOptions) -> Iterator[str]:
    if model.model_type == "minicpm3":
        yield "K and V of each head in its cache, not latents"


def _check_states(model: Model, options: EngineOptions) -> Iterator[str]:
    """A single group of Mamba-2 is replicated; everything else of a state is divided."""
    # a tensor with one shard is on every rank
    states = [tensor for tensor in model.tensors if not tensor.paged]
    for units in sorted({tensor.shards for tensor in states if tensor.shards > 1}):
        if units % options.tp:
            divided = f"the {units} heads, groups or channels of a state"
            yield f"tp={options.tp} does not divide {divided}"


def _check_contexts(model: Model, options: EngineOptions) -> Iterator[str]:
    # equal sizes stand once in the message, in their order
    sizes = dict.fromkeys((1, options.pcp, options.tp * options.pcp))
    if options.pcp > 1 and options.dcp not in sizes:
        expected = ", ".join(map(str, sizes))
        yield f"dcp={options.dcp} with pcp={options.pcp} is none of {expected}"
    if options.spread:
        yield "spread=1, which ended with vLLM 0.25"


def _check_division(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.tp % options.dcp and options.pcp == 1:
        yield f"dcp={options.dcp} does not divide tp={options.tp}"


def _check_replicas(model: Model, options: EngineOptions) -> Iterator[str]:
    """Decode context parallelism divides the positions of replicated KV heads."""
    tp = options.tp
    dcp = options.dcp
    if dcp == 1:
        return
    for heads in _numbers_of_kv_heads(model):
        # ranks beyond the number of KV heads hold copies of them
        replicas = tp // heads
        if tp <= heads:
            yield f"dcp={dcp} with tp={tp}, not more than the {heads} KV heads"
        elif dcp > replicas:
            yield f"dcp={dcp}, more than the {replicas} ranks that hold each of {heads} KV heads"
        elif model.query_heads is not None and model.query_heads // heads % dcp:
            query_heads = f"{model.query_heads // heads} query heads of a KV head"
            yield f"dcp={dcp} does not divide the {query_heads}"


def _check_latents_only(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.pcp > 1 and any(tensor.sharded is not None for tensor in model.tensors):
        yield f"pcp={options.pcp} in a model with other layers than MLA"


def _check_context_in_tp(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.pcp > 1:
        yield f"pcp={options.pcp}, whose ranks its tp_size counts too"


def _check_interleave(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.dcp > 1 and options.block is not None and options.block % options.interleave:
        yield f"interleave={options.interleave} does not divide block={options.block}"


def _check_blocks_of_16(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.block is not None and options.block % 16 and _paged_tensors(model):
        yield f"block={options.block}, no multiple of 16"


def _check_blocks_of_64(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.block is not None and options.block % 64 and has_index(model):
        yield f"block={options.block}, no multiple of 64, in a model with an indexer"


def _check_pages_of_64(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.block != 64 and has_index(model):
        yield f"block={options.block}, not 64, in a model with an indexer"


def _check_large_blocks(model: Model, options: EngineOptions) -> Iterator[str]:
    """Blocks of attention are made as large as a state, or larger."""
    block = options.block
    if block is not None and model.kernel_blocks(options.tp, block, options.kv) > 1:
        yield f"block={block}, smaller than a state, not {AUTO}"


def _check_shared_pool(model: Model, options: EngineOptions) -> Iterator[str]:
    if len(model.groups) > 1 and not options.shared:
        yield "shared=0, not 1"


def _check_own_pools(model: Model, options: EngineOptions) -> Iterator[str]:
    if len(model.groups) > 1 and options.shared:
        yield "shared=1, not 0"


def _check_kv_together(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.kv != "content" and has_kv(model):
        yield f"kv={options.kv}, not content"


def _check_kv_apart(model: Model, options: EngineOptions) -> Iterator[str]:
    if options.kv != "split" and has_kv(model):
        yield f"kv={options.kv}, not split"
    if options.layout not in ("LBNHC", "LBHNC"):
        yield f"layout={options.layout}, neither LBNHC nor LBHNC"


def _check_contiguous_blocks(model: Model, options: EngineOptions) -> Iterator[str]:
    """Layers of unequal shapes share memory block by block: a layer's block is contiguous."""
    # scales lie beside their tensors and have no shape of their own
    shapes = {tensor.axes for tensor in model.tensors if tensor.scale_of is None}
    if len(shapes) > 1 and options.layout in ("LHBNC", "BHLNC"):
        yield f"layout={options.layout}, which divides blocks, in a model whose layers differ"


def _check_scales(
    model: Model,
    place_of_dtype: Mapping[str, str],
    options: EngineOptions,
) -> Iterator[str]:
    """Yield a reason for scales that are not in the place of their dtype."""
    scales = [tensor for tensor in model.tensors if tensor.scale_of is not None]
    for dtype in sorted({tensor.dtype or "" for tensor in scales}):
        place = place_of_dtype.get(dtype)
        if place != options.scales:
            stored = "not stored" if place is None else f"not {place}"
            yield f"scales={options.scales} of {dtype}, {stored}"


def _check_scales_of_vllm(model: Model, options: EngineOptions) -> Iterator[str]:
    return _check_scales(model, {"float32": "inline", "float8_e4m3fn": "page"}, options)


def _check_scales_of_sglang(model: Model, options: EngineOptions) -> Iterator[str]:
    return _check_scales(model, {"float8_e4m3fn": "region"}, options)


Check = Callable[[Model, EngineOptions], Iterator[str]]

RULES: Final[tuple[tuple[str, str, Check], ...]] = (
    (VLLM, "vllm/config/model.py", _check_query_heads),
    (VLLM, "vllm/model_executor/layers/linear.py", _check_kv_heads),
    (VLLM, "vllm/model_executor/models/gpt_oss.py", _check_no_replicas),
    (VLLM, "vllm/model_executor/models/minicpm3.py", _check_no_latents),
    (VLLM, "vllm/model_executor/layers/mamba/mamba_mixer2.py", _check_states),
    (VLLM, "vllm/config/parallel.py", _check_contexts),
    (VLLM, "vllm/config/parallel.py", _check_division),
    (VLLM, "vllm/config/model.py", _check_replicas),
    (VLLM, "vllm/v1/attention/backend.py", _check_latents_only),
    (VLLM, "vllm/config/vllm.py", _check_interleave),
    (VLLM, "vllm/v1/attention/backends/flash_attn.py", _check_blocks_of_16),
    (VLLM, "vllm/v1/attention/backends/mla/indexer.py", _check_blocks_of_64),
    (VLLM, "vllm/platforms/interface.py", _check_large_blocks),
    (VLLM, "vllm/v1/core/kv_cache_planning.py", _check_shared_pool),
    (VLLM, "vllm/v1/kv_cache_interface.py", _check_kv_together),
    (VLLM, "vllm/v1/attention/backends/utils.py", _check_contiguous_blocks),
    (VLLM, "vllm/v1/kv_cache_interface.py", _check_scales_of_vllm),
    (SGLANG, "sglang/srt/models/llama.py", _check_query_heads),
    (SGLANG, "sglang/srt/models/llama.py", _check_kv_heads),
    (SGLANG, "sglang/srt/layers/attention/mamba/mamba.py", _check_states),
    (SGLANG, "sglang/srt/distributed/parallel_state.py", _check_division),
    (SGLANG, "sglang/srt/arg_groups/parallel_hook.py", _check_context_in_tp),
    (SGLANG, "sglang/srt/arg_groups/model_overrides/deepseek_v2.py", _check_pages_of_64),
    (SGLANG, "sglang/srt/mem_cache/memory_pool.py", _check_own_pools),
    (SGLANG, "sglang/srt/mem_cache/memory_pool.py", _check_kv_apart),
    (SGLANG, "sglang/srt/mem_cache/memory_pool.py", _check_scales_of_sglang),
)
"""Each rule: the engine, the file that has it, and a function that yields its reasons."""


def reasons(model: Model, options: EngineOptions) -> dict[str, list[str]]:
    """Return the reasons why each engine does not run a side, with the files that say so.

    An engine without a reason runs it.

    >>> phi = Model.from_config({"model_type": "phi3", "num_hidden_layers": 40,
    ...     "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10})
    >>> for reason in reasons(phi, EngineOptions(tp=4))["vLLM 0.33"]:
    ...     print(reason)
    10 KV heads and tp=4, neither of which divides the other (vllm/model_executor/layers/linear.py)
    """
    by_engine: dict[str, list[str]] = {engine: [] for engine in ENGINES.values()}
    for engine, source, check in RULES:
        by_engine[engine] += [f"{reason} ({source})" for reason in check(model, options)]
    return by_engine


def reasons_of(model: Model, side: str) -> dict[str, list[str]]:
    """Return the :func:`reasons` for the text of a side.

    Each engine has its :func:`default_keys` where the text has none.
    """
    by_engine = {}
    for engine, keys in default_keys(model).items():
        # what the side states counts before the default
        text = ",".join(f"{key}={value}" for key, value in (keys | items_of(side)).items())
        by_engine[engine] = reasons(model, EngineOptions.parse(text, "a side"))[engine]
    return by_engine


def reasons_by_side(engines: Engines) -> dict[str, dict[str, list[str]]]:
    """Return the :func:`reasons` of ``src`` and ``dst``, of the engines that are named alone.

    A side that names no engine is judged by that of the other side. Offers have no reasons.
    """
    if isinstance(engines.model, EngineViews):
        return {}
    named_anywhere = list(dict.fromkeys(engines.named.values()))
    sides = {}
    for side, options in (("src", engines.src), ("dst", engines.dst)):
        by_engine = reasons(engines.model, options)
        named = [engines.named[side]] if side in engines.named else named_anywhere
        sides[side] = {engine: by_engine[engine] for engine in named}
    return sides


def running_engines(by_engine: Mapping[str, list[str]]) -> str:
    """Return the engines that run a side, from the :func:`reasons` of it.

    >>> running_engines(reasons(Model.shipped("llama-3.1-8b"), EngineOptions(kv="split")))
    'SGLang 0.5.23'
    """
    return ", ".join(engine for engine, refusals in by_engine.items() if not refusals) or "none"


def lines(sides: Mapping[str, Mapping[str, list[str]]]) -> Iterator[str]:
    """Yield a line for each reason of a side, and one for each engine that runs all sides."""
    for engine in ENGINES.values():
        # a side is not judged by an engine that it does not name
        judged = {
            side: by_engine[engine] for side, by_engine in sides.items() if engine in by_engine
        }
        # a reason that holds for both sides has one line
        sides_of_reason: dict[str, list[str]] = {}
        for side, refusals in judged.items():
            for reason in refusals:
                sides_of_reason.setdefault(reason, []).append(side)
        for reason, names in sides_of_reason.items():
            yield f"{engine} does not run {' and '.join(names)}: {reason}"
        if judged and not sides_of_reason:
            yield f"{engine} runs {' and '.join(judged)}"
