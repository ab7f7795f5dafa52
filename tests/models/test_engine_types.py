"""Types that transformers does not have are held to what engines compute of real files.

State shapes are the return values of the calculators of vLLM 0.33 (vllm/model_executor/layers/mamba/mamba_utils.py),
called with the arguments that the named source passes; layers and heads are counted by hand from that source.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import pytest

from kvplan import Model


@attrs.frozen
class Fact:
    """A real file, and by its source: layers of each kind, K and V of a token in a layer, shapes of a state by TP.

    Shapes have steps before channels, as the calculators return them.
    """

    source: str
    config: dict[str, Any]
    kinds: dict[tuple[str, ...], int]
    heads: tuple[int, int]
    shapes: dict[int, tuple[tuple[int, ...], ...]]


FACTS = [
    Fact(
        "bailing_moe_linear: Ring-mini-linear-2.0; linear_attention_state_shape(16 heads of 2048 // 16)",
        {
            "model_type": "bailing_moe_linear",
            "hidden_size": 2048,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "layer_group_size": 5,
        },
        {("attn",): 4, ("ssm",): 16},
        (4, 128),
        {1: ((16, 128, 128),), 2: ((8, 128, 128),)},
    ),
    Fact(
        # Its file states no sizes of Mamba: they are defaults of configuration_phi4flash.py.
        "phi4flash: Phi-4-mini-flash-reasoning; phi4flash.py of vLLM 0.10: 32 // 2 // 2 + 1 states of 5120 channels",
        {
            "model_type": "phi4flash",
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 40,
            "num_key_value_heads": 20,
            "mb_per_layer": 2,
            "sliding_window": 512,
        },
        {("conv.x", "ssm"): 9, ("attn",): 9, (): 14},
        (20, 64),
        {1: ((3, 5120), (5120, 16)), 2: ((3, 2560), (2560, 16))},
    ),
    Fact(
        "phi4mm: Phi-4-multimodal-instruct; the text model of phi4mm.py of vLLM 0.33 is LlamaModel",
        {
            "model_type": "phi4mm",
            "hidden_size": 3072,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
        },
        {("attn",): 32},
        (8, 128),
        {},
    ),
    Fact(
        # No published file has use_cla under this type.
        "hunyuan_v1_moe with use_cla: hunyuan.py of SGLang 0.5.23 has a RadixAttention in each layer",
        {
            "model_type": "hunyuan_v1_moe",
            "hidden_size": 6400,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "use_cla": True,
            "cla_share_factor": 2,
        },
        {("attn",): 64},
        (8, 80),
        {},
    ),
    Fact(
        "longcat_flash: LongCat-Flash-Chat; longcat_flash.py of vLLM 0.33 has two latents in each of 28 layers",
        {
            "model_type": "longcat_flash",
            "hidden_size": 6144,
            "num_layers": 28,
            "num_attention_heads": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
        {("attn",): 56},
        (1, 576),
        {},
    ),
]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.source.partition(":")[0])
def test_a_type_caches_what_engines_compute(fact: Fact) -> None:
    """Layers of each kind, heads and their size, and each state's shape on every rank of TP 1 and 2."""
    model = Model.from_config(fact.config)
    assert Counter(tuple(tensor.kind for tensor in layer) for layer in model.layers) == fact.kinds
    tensors = {tensor.kind: tensor for layer in model.layers for tensor in layer}
    sizes = dict(tensors["attn"].axes)
    assert (sizes.get("head", 1), sizes.get("dim")) == fact.heads
    for tp, shapes in fact.shapes.items():
        for worker in model.engine("engine", tp, num_blocks=4):
            views = {view.name.partition(".")[2].partition(".")[2]: view for view in worker.views}
            by_kind = {kind: tuple(axis.extent for axis in view.axes) for kind, view in views.items() if kind != "attn"}
            assert sorted(map(sorted, by_kind.values())) == sorted(map(sorted, shapes))
