"""Which engines run a side: the rules of sizes and layouts of vLLM 0.33 and SGLang 0.5.23, each with its source.

kvplan plans more than engines run: ten KV heads on four ranks, say. A rule here is a function of a model and one
engine's options that yields a reason for each thing that the engine refuses at start, or stores in another way. What
depends on the hardware (an attention backend that another one can replace) is no reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvplan.cli.options import AUTO, EngineOptions
from kvplan.models import Model
from kvplan.models.layouts import HEAD, KV
from kvplan.models.tensors import Tensor


def _paged(model: Model) -> list[Tensor]:
    return [tensor for tensor in model.tensors if tensor.paged]


def _kv_heads(model: Model) -> list[int]:
    """The numbers of KV heads of attention layers; latents have none."""
    return sorted({tensor.shards for tensor in _paged(model) if tensor.sharded == HEAD})


def _query_heads(model: Model, side: EngineOptions) -> Iterator[str]:
    if model.query_heads is not None and model.query_heads % side.tp:
        yield f"tp={side.tp} does not divide {model.query_heads} query heads"


def _heads(model: Model, side: EngineOptions) -> Iterator[str]:
    for heads in _kv_heads(model):
        if heads % side.tp and side.tp % heads:
            yield f"{heads} KV heads and tp={side.tp}, neither of which divides the other"


def _no_replicas(model: Model, side: EngineOptions) -> Iterator[str]:
    """Ranks of GPT-OSS share no KV head."""
    for heads in _kv_heads(model) if model.name.startswith(("gpt_oss", "gpt-oss")) else []:
        if side.tp > heads:
            yield f"tp={side.tp}, more than the {heads} KV heads, which it does not replicate"


def _no_latents(model: Model, side: EngineOptions) -> Iterator[str]:
    if model.name == "minicpm3":
        yield "K and V of each head in its cache, not latents"


def _states(model: Model, side: EngineOptions) -> Iterator[str]:
    """A single group of Mamba-2 is replicated; everything else of a state is divided."""
    for units in sorted(
        {tensor.shards for tensor in model.tensors if not tensor.paged and tensor.shards > 1}
    ):
        if units % side.tp:
            yield f"tp={side.tp} does not divide the {units} heads, groups or channels of a state"


def _contexts(model: Model, side: EngineOptions) -> Iterator[str]:
    sizes = (1, side.pcp, side.tp * side.pcp)
    if side.pcp > 1 and side.dcp not in sizes:
        yield f"dcp={side.dcp} with pcp={side.pcp} is none of {', '.join(map(str, dict.fromkeys(sizes)))}"
    if side.spread:
        yield "spread=1, which ended with vLLM 0.25"


def _divided(model: Model, side: EngineOptions) -> Iterator[str]:
    if side.tp % side.dcp and side.pcp == 1:
        yield f"dcp={side.dcp} does not divide tp={side.tp}"


def _replicas(model: Model, side: EngineOptions) -> Iterator[str]:
    """Decode context parallelism divides the positions of replicated KV heads."""
    for heads in _kv_heads(model) if side.dcp > 1 else []:
        if side.tp <= heads:
            yield f"dcp={side.dcp} with tp={side.tp}, not more than the {heads} KV heads"
        elif side.dcp > side.tp // heads:
            yield f"dcp={side.dcp}, more than the {side.tp // heads} ranks that hold each of {heads} KV heads"
        elif model.query_heads is not None and model.query_heads // heads % side.dcp:
            yield f"dcp={side.dcp} does not divide the {model.query_heads // heads} query heads of a KV head"


def _latents_only(model: Model, side: EngineOptions) -> Iterator[str]:
    if side.pcp > 1 and any(tensor.sharded is not None for tensor in model.tensors):
        yield f"pcp={side.pcp} in a model with other layers than MLA"


def _context_in_tp(model: Model, side: EngineOptions) -> Iterator[str]:
    if side.pcp > 1:
        yield f"pcp={side.pcp}, whose ranks its tp_size counts too"


def _interleaved(model: Model, side: EngineOptions) -> Iterator[str]:
    if side.dcp > 1 and side.block is not None and side.block % side.interleave:
        yield f"interleave={side.interleave} does not divide block={side.block}"


def _blocks_of_16(model: Model, side: EngineOptions) -> Iterator[str]:
    if side.block is not None and side.block % 16 and _paged(model):
        yield f"block={side.block}, no multiple of 16"


def _blocks_of_64(model: Model, side: EngineOptions) -> Iterator[str]:
    if (
        side.block is not None
        and side.block % 64
        and any(tensor.kind == "index" for tensor in model.tensors)
    ):
        yield f"block={side.block}, no multiple of 64, in a model with an indexer"


def _pages_of_64(model: Model, side: EngineOptions) -> Iterator[str]:
    if side.block != 64 and any(tensor.kind == "index" for tensor in model.tensors):
        yield f"block={side.block}, not 64, in a model with an indexer"


def _large_blocks(model: Model, side: EngineOptions) -> Iterator[str]:
    """Blocks of attention are made as large as a state, or larger."""
    if side.block is not None and model.kernel_blocks(side.tp, side.block, side.kv) > 1:
        yield f"block={side.block}, smaller than a state, not {AUTO}"


def _one_pool(model: Model, side: EngineOptions) -> Iterator[str]:
    if len(model.groups) > 1 and not side.shared:
        yield "shared=0, not 1"


def _own_pools(model: Model, side: EngineOptions) -> Iterator[str]:
    if len(model.groups) > 1 and side.shared:
        yield "shared=1, not 0"


def _side_by_side(model: Model, side: EngineOptions) -> Iterator[str]:
    if side.kv != "content" and any(KV in dict(tensor.axes) for tensor in model.tensors):
        yield f"kv={side.kv}, not content"


def _apart(model: Model, side: EngineOptions) -> Iterator[str]:
    if side.kv != "split" and any(KV in dict(tensor.axes) for tensor in model.tensors):
        yield f"kv={side.kv}, not split"
    if side.layout not in ("LBNHC", "LBHNC"):
        yield f"layout={side.layout}, neither LBNHC nor LBHNC"


def _compact(model: Model, side: EngineOptions) -> Iterator[str]:
    """Layers of unequal shapes share memory block by block, so that a layer's block is contiguous."""
    shapes = {tensor.axes for tensor in model.tensors if tensor.scale_of is None}
    if len(shapes) > 1 and side.layout in ("LHBNC", "BHLNC"):
        yield f"layout={side.layout}, which divides blocks, in a model whose layers differ"


def _scales(model: Model, places: Mapping[str, str], side: EngineOptions) -> Iterator[str]:
    """``places`` is where scales are, by their dtype."""
    for dtype in sorted(
        {tensor.dtype or "" for tensor in model.tensors if tensor.scale_of is not None}
    ):
        if places.get(dtype) != side.scales:
            yield f"scales={side.scales} of {dtype}, " + (
                f"not {places[dtype]}" if dtype in places else "not stored"
            )


def _scales_in_vllm(model: Model, side: EngineOptions) -> Iterator[str]:
    return _scales(model, {"float32": "inline", "float8_e4m3fn": "page"}, side)


def _scales_in_sglang(model: Model, side: EngineOptions) -> Iterator[str]:
    return _scales(model, {"float8_e4m3fn": "region"}, side)


Reasons = Callable[[Model, EngineOptions], Iterator[str]]

RULES: Final[tuple[tuple[str, str, Reasons], ...]] = (
    ("vLLM 0.33", "vllm/config/model.py", _query_heads),
    ("vLLM 0.33", "vllm/model_executor/layers/linear.py", _heads),
    ("vLLM 0.33", "vllm/model_executor/models/gpt_oss.py", _no_replicas),
    ("vLLM 0.33", "vllm/model_executor/models/minicpm3.py", _no_latents),
    ("vLLM 0.33", "vllm/model_executor/layers/mamba/mamba_mixer2.py", _states),
    ("vLLM 0.33", "vllm/config/parallel.py", _contexts),
    ("vLLM 0.33", "vllm/config/parallel.py", _divided),
    ("vLLM 0.33", "vllm/config/model.py", _replicas),
    ("vLLM 0.33", "vllm/v1/attention/backend.py", _latents_only),
    ("vLLM 0.33", "vllm/config/vllm.py", _interleaved),
    ("vLLM 0.33", "vllm/v1/attention/backends/flash_attn.py", _blocks_of_16),
    ("vLLM 0.33", "vllm/v1/attention/backends/mla/indexer.py", _blocks_of_64),
    ("vLLM 0.33", "vllm/platforms/interface.py", _large_blocks),
    ("vLLM 0.33", "vllm/v1/core/kv_cache_planning.py", _one_pool),
    ("vLLM 0.33", "vllm/v1/kv_cache_interface.py", _side_by_side),
    ("vLLM 0.33", "vllm/v1/attention/backends/utils.py", _compact),
    ("vLLM 0.33", "vllm/v1/kv_cache_interface.py", _scales_in_vllm),
    ("SGLang 0.5.23", "sglang/srt/models/llama.py", _query_heads),
    ("SGLang 0.5.23", "sglang/srt/models/llama.py", _heads),
    ("SGLang 0.5.23", "sglang/srt/layers/attention/mamba/mamba.py", _states),
    ("SGLang 0.5.23", "sglang/srt/distributed/parallel_state.py", _divided),
    ("SGLang 0.5.23", "sglang/srt/arg_groups/parallel_hook.py", _context_in_tp),
    ("SGLang 0.5.23", "sglang/srt/arg_groups/model_overrides/deepseek_v2.py", _pages_of_64),
    ("SGLang 0.5.23", "sglang/srt/mem_cache/memory_pool.py", _own_pools),
    ("SGLang 0.5.23", "sglang/srt/mem_cache/memory_pool.py", _apart),
    ("SGLang 0.5.23", "sglang/srt/mem_cache/memory_pool.py", _scales_in_sglang),
)
"""Each rule: the engine, the file that has it, and why the engine doesn't run a side."""

ENGINES: Final = tuple(dict.fromkeys(engine for engine, _, _ in RULES))


def reasons(model: Model, side: EngineOptions) -> dict[str, list[str]]:
    """Why each engine doesn't run a side, with the file that says so; no reason: it does.

    >>> phi = Model.from_config({"model_type": "phi3", "num_hidden_layers": 40, "hidden_size": 5120,
    ...     "num_attention_heads": 40, "num_key_value_heads": 10})
    >>> reasons(phi, EngineOptions(tp=4))["vLLM 0.33"]
    ['10 KV heads and tp=4, neither of which divides the other (vllm/model_executor/layers/linear.py)']
    """
    found: dict[str, list[str]] = {engine: [] for engine in ENGINES}
    for engine, source, rule in RULES:
        found[engine] += [f"{reason} ({source})" for reason in rule(model, side)]
    return found


def words(model: Model) -> dict[str, dict[str, str]]:
    """How each engine stores the model by default, as keys of ``--src``.

    >>> words(Model.shipped("qwen3-next-80b"))["vLLM 0.33"]
    {'layout': 'LBNHC', 'block': 'auto', 'kv': 'content', 'shared': '1'}
    """
    several, hybrid = len(model.groups) > 1, len({tensor.paged for tensor in model.tensors}) > 1
    index = any(tensor.kind == "index" for tensor in model.tensors)
    split = any(KV in dict(tensor.axes) for tensor in model.tensors)
    vllm = {"layout": "LBNHC", "block": AUTO if hybrid else "64" if index else "16"}
    sglang = {"layout": "LBNHC", "block": "64" if index else "1"}
    vllm |= ({"kv": "content"} if split else {}) | ({"shared": "1"} if several else {})
    return dict(zip(ENGINES, (vllm, sglang | ({"kv": "split"} if split else {})), strict=True))


def reasons_of(model: Model, side: str) -> dict[str, list[str]]:
    """As :func:`reasons`, but each engine has its :func:`words` for the keys that the text of a side leaves out."""
    given = dict(item.partition("=")[::2] for item in side.split(","))
    texts = {
        engine: ",".join(f"{k}={v}" for k, v in (own | given).items())
        for engine, own in words(model).items()
    }
    return {
        engine: reasons(model, EngineOptions.parse(text, "a side"))[engine]
        for engine, text in texts.items()
    }


def engines(why: Mapping[str, list[str]]) -> str:
    """The engines that run a side, from the :func:`reasons` of it.

    >>> engines(reasons(Model.shipped("llama-3.1-8b"), EngineOptions(kv="split")))
    'SGLang 0.5.23'
    """
    return ", ".join(engine for engine, found in why.items() if not found) or "none"


def lines(sides: Mapping[str, Mapping[str, list[str]]]) -> Iterator[str]:
    """From the reasons of each side: a line for each reason, and one for each engine that runs all sides."""
    for engine in ENGINES if sides else ():
        every = dict.fromkeys(reason for why in sides.values() for reason in why[engine])
        for reason in every:
            names = [name for name, why in sides.items() if reason in why[engine]]
            yield f"{engine} does not run {' and '.join(names)}: {reason}"
        if not every:
            yield f"{engine} runs {' and '.join(sides)}"
