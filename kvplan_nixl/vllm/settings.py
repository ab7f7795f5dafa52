"""The settings of vLLM's connector, read once, from vLLM's configuration.

Some of vLLM's settings for connectors, and of NixlConnector's, have no meaning in kvplan or are not
supported. They are refused by name, unless they have the default value, which describes what kvplan
does.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs
from vllm import envs
from vllm.config import VllmConfig

from kvplan import KVPlanError
from kvplan.support import integer, name, seconds, shown
from kvplan_nixl.settings import Settings, secrets_of_environment, setting, switch

OPTION: Final = "kv_connector_extra_config"

HONOURED: Final = frozenset(
    {
        "engine_id",
        "kv_connector",
        "kv_connector_extra_config",
        "kv_connector_module_path",
        "kv_load_failure_policy",
        "kv_role",
    }
)
"""The fields of vLLM's configuration for connectors that may have any value."""

HINTS: Final = MappingProxyType(
    {
        "kv_buffer_device": "leave it out; KvplanConnector alone takes cpu instead",
        "kv_port": f"the listener's port is VLLM_NIXL_SIDE_CHANNEL_PORT, or port in {OPTION}",
        "enable_permute_local_kv": "leave it out: kvplan reads caches of any layout",
    }
)
"""What to do about other fields, by name."""

OTHER_NAMES: Final = MappingProxyType({"kv_lease_duration": "lease_s"})
"""NixlConnector's names of kvplan's settings."""


@attrs.frozen
class Unsupported:
    """A setting of NixlConnector that kvplan lacks: its default, and what to do instead."""

    default: Any
    hint: str


UNSUPPORTED: Final = MappingProxyType(
    {
        "engine_ttl": Unsupported(3600.0, "leave it out: kvplan forgets idle engines after 1 h"),
        "enforce_handshake_compat": Unsupported(
            True, "set model and weights, where engines differ on purpose"
        ),
        "num_threads": Unsupported(
            4, "leave it out: threads of NIXL may write after a read has failed"
        ),
        "push_registration_timeout": Unsupported(480, "leave it out: kvplan does not push"),
    }
)
"""NixlConnector's settings in vLLM 0.32 and 0.33 that kvplan lacks, by name."""


@attrs.frozen(kw_only=True)
class ConnectorSettings(Settings):
    """The settings of vLLM's connector. With ``verify`` decode compares digests.

    With ``bidirectional_kv_xfer`` decode keeps each answer for the next turn, for
    ``decoder_kv_blocks_ttl`` seconds, and prefill reads it; fewer than ``kv_recompute_threshold``
    positions it computes. These three have NixlConnector's names. ``draft`` replaces vLLM's name of
    the model that drafts tokens. A request with a transfer id waits ``prefill_timeout_s`` for each
    part that prefill computes.
    """

    verify: bool = setting(switch, False)
    bidirectional_kv_xfer: bool = setting(switch, False)
    decoder_kv_blocks_ttl: float = setting(seconds, 480.0)
    kv_recompute_threshold: int = setting(integer, 64)
    draft: str = setting(name, "")
    prefill_timeout_s: float = setting(seconds, 300.0)


def settings_of(config: VllmConfig) -> ConnectorSettings:
    """Return the settings of an engine. The port is that of its rank of data parallelism.

    The listener is where NixlConnector's would be unless settings say otherwise. Raises
    ``SETTING``, ``TYPE`` and ``RANGE``.
    """
    transfer = config.kv_transfer_config
    assert transfer is not None
    has_host_cache = uses_host_cache(transfer)
    check_transfer(transfer, HONOURED | {"kv_buffer_device"} if has_host_cache else HONOURED)
    values = {
        **secrets_of_environment(transfer.kv_connector_extra_config, os.environ),
        "host": envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        "port": envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
        **_renamed(transfer.kv_connector_extra_config),
    }
    settings = ConnectorSettings.read(values, OPTION)
    port = settings.port and settings.port + config.parallel_config.data_parallel_index
    return attrs.evolve(settings, port=port)


def check_transfer(transfer: Any, honoured: Collection[str] = HONOURED) -> None:
    """Refuse fields of vLLM's configuration that mean nothing here, unless they are default."""
    for field in dataclasses.fields(transfer):
        if field.name not in honoured:
            default = _default(field)
            hint = HINTS.get(field.name, "leave it out: kvplan has no use for it")
            _check_default(field.name, getattr(transfer, field.name), default, hint)


def uses_host_cache(transfer: Any) -> bool:
    """Return whether bytes move through main memory: NIXL cannot reach this device."""
    fields = {field.name: field for field in dataclasses.fields(transfer)}
    default = _default(fields["kv_buffer_device"])
    return bool(transfer.kv_buffer_device == "cpu" != default)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _renamed(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under kvplan's names, without those of NixlConnector that are default."""
    values = dict[str, Any]()
    for given_name, value in extra.items():
        unsupported = UNSUPPORTED.get(given_name)
        if unsupported is not None:
            _check_default(given_name, value, unsupported.default, unsupported.hint)
            continue
        label = OTHER_NAMES.get(given_name, given_name)
        if label in values:
            raise KVPlanError(
                "SETTING",
                f"read {OPTION}",
                expected=f"{label} once",
                got=f"another name of it too, {shown(given_name)}",
            )
        values[label] = value
    return values


def _check_default(label: str, value: Any, default: Any, hint: str) -> None:
    if value != default:
        raise KVPlanError(
            "SETTING",
            f"set {label}",
            expected=f"{default!r}, vLLM's default",
            got=shown(value),
            hint=hint,
            **{label: value},
        )


UNSUPPORTED_BY_ENGINE: Final = MappingProxyType(
    {
        ("aux_output_config", "enable_return_routed_experts"): (
            "decode would return the experts only of tokens that it computes itself"
        ),
        ("model_config", "enable_sleep_mode"): (
            "an engine that wakes up has other memory than it had registered"
        ),
    }
)
"""Options of vLLM that are refused, by the part of its configuration that has them, and why."""


def check_engine(config: VllmConfig) -> None:
    """Refuse options with which answers may be wrong. Raises ``SETTING``.

    vLLM itself refuses some of them with NixlConnector, which it recognises by name.
    """
    for (part, label), reason in UNSUPPORTED_BY_ENGINE.items():
        # a release may lack the part
        if getattr(getattr(config, part, None), label, False):
            raise KVPlanError("SETTING", f"set {label}", expected="False", got="True", hint=reason)
