"""SGLang's names, made where SGLang is not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def made(
    monkeypatch: pytest.MonkeyPatch, names: Mapping[str, Mapping[str, Any]], modules: Iterable[str]
) -> dict[str, ModuleType]:
    """The plugin's modules, which import SGLang's names from modules that are made of them."""
    for name, contents in names.items():
        module = ModuleType(name)
        vars(module).update(contents)
        parts = name.split(".")
        for i in range(1, len(parts)):
            parent = ".".join(parts[:i])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    found = {}
    for each in modules:
        monkeypatch.delitem(sys.modules, f"kvplan_nixl.sglang.{each}", raising=False)
        found[each] = importlib.import_module(f"kvplan_nixl.sglang.{each}")
    return found


class Field:
    """A field of ServerArgs."""

    def __init__(self, name: str, default: Any) -> None:
        self.name, self.default = name, default


OPTIONS = {
    "load_format": "auto",
    "json_model_override_args": "{}",
    "quantization": None,
    "quantization_param_path": None,
    "model_loader_extra_config": "{}",
    "speculative_draft_load_format": None,
    "speculative_draft_model_quantization": None,
    "speculative_draft_window_size": None,
    "speculative_draft_sink_size": None,
    "is_embedding": False,
}


def arguments() -> Any:
    """ServerArgs, of which each field has its default."""
    return SimpleNamespace(**OPTIONS)


def record_fields(_: type) -> list[Field]:
    """The fields of ServerArgs."""
    return [Field(name, default) for name, default in OPTIONS.items()]


def model_config(fields: Mapping[str, Any], path: str = "tiny") -> Any:
    """ModelConfig of a configuration that is in no folder here."""
    heads = fields["num_key_value_heads"]
    sliding = [i for i, kind in enumerate(fields.get("layer_types", ())) if kind == "sliding_attention"]
    return SimpleNamespace(
        model_path=path,
        revision=None,
        dtype="torch.float32",
        context_len=1024,
        hf_config=SimpleNamespace(to_dict=lambda: dict(fields)),
        hf_text_config=SimpleNamespace(**fields),
        swa_attention_layer_ids=sliding,
        full_attention_layer_ids=[i for i in range(fields["num_hidden_layers"]) if i not in sliding],
        get_total_num_kv_heads=lambda: heads,
        get_swa_num_kv_heads=lambda tp: heads,
    )


def runner(config: Any, layers: Iterable[Any] = ()) -> Any:
    """ModelRunner, whose model has some layers."""
    return SimpleNamespace(model_config=config, model=SimpleNamespace(modules=lambda: iter(layers)))
