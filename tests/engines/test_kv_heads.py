"""How many KV heads a layer has in all, where a rank has one: what the connector asks of vLLM, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
description = pytest.importorskip("kvplan_nixl.vllm.description", reason="needs vLLM")


class Projection(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Stands in for QKVParallelLinear, which needs a process for each rank."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.total_num_kv_heads = heads


class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
    """The module around an attention layer."""

    def __init__(self, *projections: Any) -> None:
        super().__init__()
        self.attn = torch.nn.Identity()
        self.projections = torch.nn.ModuleList(projections)


@pytest.fixture(autouse=True)
def projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector looks for the stand-in."""
    monkeypatch.setattr(description, "QKVParallelLinear", Projection)


def config_of(layers: dict[str, Any], tp: int = 2) -> Any:
    """An engine whose effective configuration has one number of heads for all layers."""
    architecture = SimpleNamespace(total_num_hidden_layers=0, total_num_kv_heads=1)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        model_config=SimpleNamespace(model_arch_config=architecture),
        speculative_config=None,
    )


def test_the_projection_beside_a_layer_counts_before_the_configuration() -> None:
    """Layers of Nemotron-NAS differ, and vLLM's configuration has one number; an adapter may be around a projection."""
    blocks = [Block(Projection(2)), Block(torch.nn.Sequential(Projection(4))), Block()]
    layers = {f"layers.{number}": block.attn for number, block in enumerate(blocks)}
    kv_heads = description.kv_heads_of(config_of(layers), SimpleNamespace(kv_heads=0))
    assert [kv_heads(name, 0, False) for name in layers] == [2, 4, 1]
    kv_heads = description.kv_heads_of(config_of(layers), SimpleNamespace(kv_heads=8))
    assert [kv_heads(name, 0, False) for name in layers] == [8, 8, 8]


def test_projections_that_differ_say_nothing() -> None:
    """Two projections of one layer are not asked."""
    block = Block(Projection(2), Projection(4))
    layers = {"layers.0": block.attn}
    assert description.kv_heads_of(config_of(layers), SimpleNamespace(kv_heads=0))("layers.0", 0, False) == 1
