"""The plugin in SGLang itself: what is installed beside kvplan stays as it is until somebody asks for the backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).with_name("standins")))

pytest.importorskip("sglang.srt.plugins", reason="needs SGLang")

PROBE = """
import inspect, json, sys
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES as choices
from sglang.srt.disaggregation import decode, prefill, utils
from sglang.srt.managers import disagg_service
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.plugins import load_plugins

def everything():
    found = {}
    for module in (decode, prefill, utils, disagg_service, weight_updater):
        for name, value in vars(module).items():
            found[f"{module.__name__}.{name}"] = value
            if inspect.isclass(value) and value.__module__ == module.__name__:
                found |= {f"{value.__qualname__}.{member}": part for member, part in vars(value).items()}
    return found

def changed(before):
    now = everything()
    return sorted(name.rpartition("sglang.srt.")[2] for name in now if before.get(name) is not now[name])

def classes(backend):
    return [utils.get_kv_class(backend, kind).__name__ for kind in utils.KVClassType if kind.name != "BOOTSTRAP_SERVER"]

before = everything()
members, fake = [*utils.TransferBackend], classes(utils.TransferBackend.FAKE)
load_plugins()
loaded = changed(before)
same = [*utils.TransferBackend] == members and classes(utils.TransferBackend.FAKE) == fake
imported = sorted(name for name in sys.modules if name.startswith(("nixl", "kvplan")))
try:
    utils.TransferBackend("another")
except ValueError:
    unknown = changed(before)
asked = utils.TransferBackend("kvplan")
print(json.dumps({
    "loaded": loaded, "same": same, "imported": imported, "unknown": unknown, "choice": choices[-1],
    "asked": [asked.name, asked.value, asked is utils.TransferBackend("kvplan")],
    "hooked": changed(before), "classes": classes(asked),
}))
"""


def test_the_plugin_waits_until_it_is_asked() -> None:
    """Only the choice of classes is wrapped before, and neither NIXL nor the core of kvplan is imported."""
    standins = Path(__file__).with_name("standins")
    path = os.pathsep.join([str(standins), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}
    run = subprocess.run([sys.executable, "-c", PROBE], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    probed = json.loads(run.stdout.splitlines()[-1])
    wrapped = ["decode", "prefill", "utils"]
    assert probed["loaded"] == [
        "TransferBackend._missing_",
        *(f"disaggregation.{module}.get_kv_class" for module in wrapped),
        "managers.disagg_service.get_kv_class",
    ]
    assert probed["same"]
    assert probed["imported"] == ["kvplan_nixl", "kvplan_nixl.sglang"]
    assert probed["unknown"] == probed["loaded"]
    assert probed["choice"] == "kvplan"
    assert probed["asked"] == ["KVPLAN", "kvplan", True]
    assert probed["classes"] == ["KVArgs", "Manager", "Sender", "Receiver"]
    hooked = {*probed["hooked"]} - {*probed["loaded"]}
    assert {name for name in hooked if not name.startswith("WeightUpdater.")} == {
        "DecodePreallocQueue._create_receiver_and_enqueue",
        "DecodePreallocQueue._init_kv_manager",
        "PrefillBootstrapQueue._init_kv_manager",
        "PrefillBootstrapQueue.create_sender",
    }
    assert {"WeightUpdater.update_weights_from_disk", "WeightUpdater.begin_weight_update"} < hooked


def test_the_control_of_the_proxies_replaces_what_they_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's control has to serve handoffs of blocks that nobody has written, not to end with an error."""
    from kvplan.protocol import rooms
    from kvplan_nixl.sglang import proxy
    from tests.engines.sglang_judge import UNWRITTEN

    replaced = ((proxy, "publish"), (rooms, "poll_rooms"))
    for module, name in replaced:
        monkeypatch.setattr(module, name, getattr(module, name))
    called: list[str] = []
    monkeypatch.setattr(proxy, "main", lambda: called.extend(getattr(*each).__name__ for each in replaced))
    exec(UNWRITTEN, {})
    assert called == ["publish_unwritten", "poll_unwritten"]
