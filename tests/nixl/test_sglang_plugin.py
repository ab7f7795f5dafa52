"""SGLang's plugin acts only where it is asked for: its names are made here. tests/engines has SGLang's own."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvplan_nixl.sglang import register

QUEUES = {
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager",
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager",
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender",
}


class Registry:
    """SGLang's registry of hooks, which notes what it is told."""

    def __init__(self) -> None:
        self.hooks: dict[str, Any] = {}
        self.is_applied = False

    def register(self, target: str, hook: Any, kind: str) -> None:
        self.hooks[target] = hook

    def apply_hooks(self) -> None:
        self.is_applied = True


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's names that the plugin uses when it is registered."""
    registry, choices = Registry(), ["mooncake", "nixl"]
    backends = enum.Enum("TransferBackend", {"MOONCAKE": "mooncake", "NIXL": "nixl"})  # type: ignore[misc]
    kinds = SimpleNamespace(AROUND="around", AFTER="after", BEFORE="before")
    modules: dict[str, dict[str, Any]] = {
        "sglang.srt.arg_groups.choices": {"add_disagg_transfer_backend_choices": choices.extend},
        "sglang.srt.disaggregation.utils": {"TransferBackend": backends},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": kinds},
        "sglang.srt.runtime_context": {"get_serving": None},
    }
    monkeypatch.delitem(sys.modules, "kvplan_nixl.sglang.changes", raising=False)
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("sglang", "sglang.srt", *(name.rpartition(".")[0] for name in modules)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return SimpleNamespace(registry=registry, choices=choices, backends=backends)


def test_other_backends_stay_as_they_are(sglang: SimpleNamespace) -> None:
    """They are SGLang's own members, and nothing but the choice of classes is hooked."""
    mooncake, nixl = sglang.backends
    register()
    assert [*sglang.backends] == [mooncake, nixl]
    assert sglang.backends("nixl") is nixl
    with pytest.raises(ValueError, match="is not a valid TransferBackend"):
        sglang.backends("mori")
    assert {*sglang.registry.hooks} == {"sglang.srt.disaggregation.utils.get_kv_class"}
    get_kv_class = sglang.registry.hooks.popitem()[1]
    original = lambda backend, kind: (backend, kind)  # noqa: E731
    manager = SimpleNamespace(value="manager")
    assert get_kv_class(original, nixl, manager) == (nixl, manager)


def test_the_queues_are_hooked_once_for_whoever_asks(sglang: SimpleNamespace) -> None:
    """SGLang makes its queues after it has asked for the backend."""
    register()
    assert sglang.choices == ["mooncake", "nixl", "kvplan"]
    asked = sglang.backends("kvplan")
    assert (asked.name, asked.value, isinstance(asked, sglang.backends)) == ("KVPLAN", "kvplan", True)
    assert sglang.registry.is_applied
    assert sglang.registry.hooks.keys() > QUEUES
    updates = {target.rpartition(".")[2] for target in sglang.registry.hooks if "weight" in target}
    assert {"update_weights_from_disk", "begin_weight_update", "record_weight_version_change"} < updates
    sglang.registry.is_applied = False
    assert sglang.backends("kvplan") is asked
    assert not sglang.registry.is_applied
