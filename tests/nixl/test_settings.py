"""Settings of connectors: each is read in its type, and none that is unknown or unsupported is ignored.

vLLM's few names that are needed are made here. Real engines start with settings in tests/engines.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import attrs
import pytest

from kvplan import KVPlanError
from kvplan.protocol.keys import SharedKey
from kvplan.staging import CUDA_IPC, Rates
from kvplan_nixl import UCX
from kvplan_nixl.serving.host_key import host_key
from kvplan_nixl.settings import Settings, read_rates
from kvplan_nixl.sglang.settings import settings_of as plugin_settings
from tests.pages import ROOT
from tests.simulation.vllm_objects import AuxOutputConfig, ModelConfig, ParallelConfig, VllmConfig


@dataclasses.dataclass
class Transfer:
    """vLLM's configuration for connectors, with a field of a version to come."""

    kv_connector: str | None = None
    engine_id: str | None = None
    kv_buffer_device: str = dataclasses.field(default_factory=lambda: "cuda")
    kv_role: str | None = None
    kv_port: int = 14579
    kv_connector_extra_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: str = "fail"
    kv_of_tomorrow: int = 0


class Environment(NamedTuple):
    """Variables of vLLM's, in ``vllm.envs``."""

    VLLM_NIXL_SIDE_CHANNEL_HOST: str = "localhost"
    VLLM_NIXL_SIDE_CHANNEL_PORT: int = 5600


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our module of settings, and a vLLM that has a configuration and an environment."""
    for name, contents in (("vllm", {"envs": Environment()}), ("vllm.config", {"VllmConfig": object})):
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    # the package's __init__ imports all of vLLM
    package = ModuleType("kvplan_nixl.vllm")
    package.__path__ = [str(ROOT / "kvplan_nixl" / "vllm")]
    monkeypatch.setitem(sys.modules, "kvplan_nixl.vllm", package)
    monkeypatch.delitem(sys.modules, "kvplan_nixl.vllm.settings", raising=False)
    yield importlib.import_module("kvplan_nixl.vllm.settings")
    sys.modules.pop("kvplan_nixl.vllm.settings")


def read(vllm: Any, extra: Any = None, data_parallel_index: int = 0, **fields: Any) -> Any:
    """Our settings in vLLM's configuration."""
    transfer = Transfer(kv_role="kv_producer", kv_connector_extra_config=extra or {}, **fields)
    parallel = ParallelConfig(data_parallel_index=data_parallel_index)
    return vllm.settings_of(VllmConfig(transfer, parallel_config=parallel))


def settings_error(vllm: Any, extra: Any = None, **fields: Any) -> KVPlanError:
    """The error of a configuration."""
    with pytest.raises(KVPlanError) as refusal:
        read(vllm, extra, **fields)
    return refusal.value


def test_without_settings_the_listener_is_where_nixl_connector_would_be(vllm: Any) -> None:
    """It is on loopback, at a port for each rank of data parallelism."""
    settings = read(vllm, data_parallel_index=3)
    assert (settings.host, settings.bind, settings.port) == ("localhost", "", 5603)
    assert settings == vllm.ConnectorSettings(host="localhost", port=5603)


def test_an_ipv6_address_may_have_brackets(vllm: Any) -> None:
    """As in a URL, in each engine's settings."""
    settings = read(vllm, {"host": "[fd00::7]", "bind": "[::]"})
    assert (settings.host, settings.bind) == ("fd00::7", "::")
    assert plugin_settings({"KVPLAN_HOST": "[fd00::7]"}).host == "fd00::7"


def test_settings_come_before_the_environment(vllm: Any) -> None:
    """A port counts from the rank of data parallelism, and 0 is any free one."""
    extra = {"host": "10.0.0.7", "bind": "0.0.0.0", "port": 9000}
    settings = read(vllm, extra, data_parallel_index=2)
    assert (settings.host, settings.bind, settings.port) == ("10.0.0.7", "0.0.0.0", 9002)
    assert read(vllm, {"port": 0}, data_parallel_index=2).port == 0


def test_an_unknown_setting_is_refused_by_name(vllm: Any) -> None:
    """The hint has the nearest name, or all."""
    error = settings_error(vllm, {"staging_byte": 1})
    assert (error.code, error.got, error.hint) == ("SETTING", "'staging_byte'", "did you mean 'staging_bytes'?")
    assert settings_error(vllm, {"zzz": 1}).hint.startswith("they are model, weights, ignored_facts, ")


@pytest.mark.parametrize(
    "extra",
    [{"port": 65536}, {"port": "x"}, {"port": True}, {"verify": "false"}, {"lease_s": -1}, {"key": ""}, {"model": 3}],
    ids=str,
)
def test_a_value_of_another_type_is_refused(vllm: Any, extra: Any) -> None:
    """The message has the name of the setting."""
    error = settings_error(vllm, extra)
    assert error.code in ("TYPE", "RANGE")
    assert f"{next(iter(extra))} in kv_connector_extra_config" in str(error)


def test_no_message_shows_a_secret(vllm: Any) -> None:
    """Neither an error nor the settings as they are printed."""
    assert "12345" not in str(settings_error(vllm, {"key": 12345}))
    assert "12345" not in repr(read(vllm, {"key": "12345"}))


@pytest.mark.parametrize(
    "name, value",
    [("kv_buffer_device", "xpu"), ("kv_port", 5), ("enable_permute_local_kv", True), ("kv_of_tomorrow", 1)],
)
def test_what_vllm_offers_and_kvplan_lacks_is_refused(vllm: Any, name: str, value: Any) -> None:
    """Each field of vLLM's configuration is, also one of a version to come."""
    error = settings_error(vllm, **{name: value})
    assert (error.code, error.details) == ("SETTING", {name: value})
    assert name in error.action
    assert error.hint


def test_vllms_own_defaults_pass(vllm: Any) -> None:
    """They say what kvplan does anyway."""
    read(vllm, kv_buffer_device="cuda", kv_port=14579, kv_load_failure_policy="recompute")


def test_bytes_may_move_through_main_memory(vllm: Any) -> None:
    """Where the device is no CPU, whose cache NIXL reaches."""
    read(vllm, kv_buffer_device="cpu")
    assert vllm.uses_host_cache(Transfer(kv_buffer_device="cpu"))
    assert not vllm.uses_host_cache(Transfer())


def test_nixl_connectors_settings_are_read_or_refused(vllm: Any) -> None:
    """Those that mean the same have their own names too; others pass only with their defaults."""
    settings = read(vllm, {"kv_lease_duration": 60, "backends": ["UCX", "LIBFABRIC"]})
    assert settings.lease_s == 60
    assert settings.backends == {**UCX, "LIBFABRIC": {}}
    turns = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 600, "kv_recompute_threshold": 0}
    assert turns.items() <= attrs.asdict(read(vllm, turns)).items()
    assert settings_error(vllm, {"lease_s": 60, "kv_lease_duration": 60}).code == "SETTING"
    for name, unsupported in vllm.UNSUPPORTED.items():
        read(vllm, {name: unsupported.default})
        assert name in settings_error(vllm, {name: "other"}).action


def test_options_of_backends_are_passed_on(vllm: Any) -> None:
    """Those that are not set stay as kvplan sets them."""
    settings = read(vllm, {"backends": {"UCX": {"ucx_error_handling_mode": "peer"}, "POSIX": {}}})
    assert settings.backends == {"UCX": {**UCX["UCX"], "ucx_error_handling_mode": "peer"}, "POSIX": {}}


def test_rates_are_those_of_a_file(vllm: Any, tmp_path: Path) -> None:
    """Of a calibration. Without one decode takes those of its memory; a file that has none is refused at start."""
    rates = Rates("here", 1e-4, 2e-6, 3e-10, 4e-5, 5e-10)
    (tmp_path / "rates.json").write_text(json.dumps(attrs.asdict(rates)))
    assert read(vllm, {"rates": f"{tmp_path}/rates.json"}).measured_rates() == rates
    assert plugin_settings({"KVPLAN_RATES": f"{tmp_path}/rates.json"}).measured_rates() == rates
    assert read(vllm).measured_rates() is None
    with pytest.raises(KVPlanError, match=r"MESSAGE: cannot read rates from .*: expected a file"):
        read(vllm, {"rates": f"{tmp_path}/none.json"}).measured_rates()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "MESSAGE: cannot read rates from .*: expected JSON, got "),
        ("[]", "KEY: cannot read rates from .*: expected the keys measured, transfer_s, "),
        (json.dumps({**attrs.asdict(CUDA_IPC), "more": 1}), "KEY"),
        (json.dumps({**attrs.asdict(CUDA_IPC), "byte_s": "1"}), "TYPE"),
    ],
)
def test_a_file_of_something_else_has_no_rates(tmp_path: Path, text: str, error: str) -> None:
    """No JSON, another object, and rates that are not numbers."""
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(KVPlanError, match=f"^{error}"):
        read_rates(str(path))


@pytest.mark.parametrize("backends", ["UCX", 7, [["UCX"]], {"UCX": 1}, {"UCX": {"a": 1}}], ids=str)
def test_backends_of_another_form_are_refused(vllm: Any, backends: Any) -> None:
    assert settings_error(vllm, {"backends": backends}).code == "TYPE"


@pytest.mark.parametrize(
    ("section", "options", "name"),
    [
        ("aux_output_config", AuxOutputConfig, "enable_return_routed_experts"),
        ("model_config", ModelConfig, "enable_sleep_mode"),
    ],
)
def test_engines_whose_answers_may_be_wrong_are_refused(vllm: Any, section: str, options: Any, name: str) -> None:
    """vLLM refuses some with NixlConnector, by its name, and accepts them with others."""
    vllm.check_engine(VllmConfig())
    with pytest.raises(KVPlanError, match=f"SETTING: cannot set {name}: expected False, got True"):
        vllm.check_engine(VllmConfig(**{section: options(**{name: True})}))


def test_a_release_without_a_part_of_the_configuration_starts(vllm: Any) -> None:
    """What it does not have cannot be set."""
    vllm.check_engine(SimpleNamespace(model_config=ModelConfig()))


def test_sglangs_settings_are_in_the_environment() -> None:
    """Their names begin with KVPLAN_. Text stays text, and numbers and lists are JSON."""
    variables = {"KEY": "12", "LEASE_S": "12", "BACKENDS": '["UCX"]', "PORT": "9000", "STAGING_BYTES": "0"}
    settings = plugin_settings({f"KVPLAN_{name}": text for name, text in variables.items()})
    assert settings == Settings(key=b"12", lease_s=12, port=9000, staging_bytes=0)


KEY = "a secret of all engines"


def test_a_service_of_kubernetes_named_kvplan_sets_nothing() -> None:
    """Kubernetes sets variables for each service, one with the name of a setting. Others are still refused."""
    service = {
        "KVPLAN_SERVICE_HOST": "10.0.0.7",
        "KVPLAN_SERVICE_PORT": "8998",
        "KVPLAN_SERVICE_PORT_HTTP": "8998",
        "KVPLAN_PORT": "tcp://10.0.0.7:8998",
        "KVPLAN_PORT_8998_TCP": "tcp://10.0.0.7:8998",
        "KVPLAN_PORT_8998_TCP_ADDR": "10.0.0.7",
    }
    assert plugin_settings(service) == plugin_settings({})
    assert plugin_settings({"KVPLAN_PORT": "8998"}).port == 8998
    for variable in ("KVPLAN_SERVICE_HOSTS", "KVPLAN_PORT_X"):
        with pytest.raises(KVPlanError, match="SETTING"):
            plugin_settings({variable: "1"})


def test_a_key_is_in_settings_a_file_or_the_environment(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file keeps it out of logs and lists of processes. Settings come before the environment."""
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o640)
    key = SharedKey.of(KEY.encode())
    assert read(vllm, {"key": KEY}).access().key == key
    assert read(vllm, {"key_file": str(file)}).access().key == key
    monkeypatch.setenv("KVPLAN_KEY_FILE", str(file))
    assert read(vllm).access().key == key
    others = read(vllm, {"key": "another one, in the settings"})
    assert others.access().key == SharedKey.of(b"another one, in the settings")
    assert plugin_settings({"KVPLAN_KEY_FILE": str(file)}).access().key == key
    monkeypatch.undo()
    assert read(vllm).access().key == host_key()


@pytest.mark.parametrize(
    "settings, code",
    [
        ({"key": KEY, "key_file": "key"}, "SETTING"),
        ({"key_file": "no file"}, "SETTING"),
        ({"key_file": "/dev/null"}, "SETTING"),
        ({"key_file": "/etc/hostname"}, "SETTING"),
        ({"key": "short"}, "RANGE"),
        ({"key": " " * 32}, "RANGE"),
        ({"tls_certificate": "a.pem"}, "SETTING"),
        ({"tls_certificate": "a.pem", "tls_private_key": "a.key", "tls_authority": "a.pem"}, "PEER"),
    ],
    ids=str,
)
def test_settings_of_the_network_that_do_not_go_together(vllm: Any, settings: Any, code: str) -> None:
    """None of them leaves a door open that was meant to be locked."""
    with pytest.raises(KVPlanError) as refusal:
        read(vllm, settings).access()
    assert refusal.value.code == code


@pytest.mark.parametrize(
    "variable, code", [("KVPLAN_LEASES", "SETTING"), ("KVPLAN_LEASE_S", "TYPE"), ("KVPLAN_VERIFY", "SETTING")]
)
def test_sglangs_settings_are_checked(variable: str, code: str) -> None:
    with pytest.raises(KVPlanError) as refusal:
        plugin_settings({variable: "soon"})
    assert refusal.value.code == code


def test_the_guides_name_all_settings(vllm: Any) -> None:
    """Their tables have a row for each."""
    for page, kind, form in (
        ("vllm", vllm.ConnectorSettings, str),
        ("sglang", Settings, lambda name: f"KVPLAN_{name.upper()}"),
    ):
        guide = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
        first_cells = " ".join(re.findall(r"^\| (`[^|]*) \|", guide, re.MULTILINE))
        for field in attrs.fields(kind):
            assert f"`{form(field.name)}`" in first_cells
