"""NIXL's backends, by name with their options, as settings have them. NIXL is not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from kvplan.support import instance, wrong_type

Backends = Mapping[str, Mapping[str, str]]

UCX_OPTIONS: Final = "TCP_CONN_NB=y,TCP_SYN_CNT=3,CUDA_IPC_ENABLE_GET_ZCOPY=on"

UCX: Final[Backends] = MappingProxyType({"UCX": MappingProxyType({"engine_config": UCX_OPTIONS})})
"""The default backend: UCX, with some settings.

It connects over TCP in the background and gives up after 15 s. With UCX's own settings
:meth:`~kvplan_nixl.NixlExecutor.connect` waits, for minutes where no worker answers. GPUs of one
host are read from by CUDA IPC: on a host without NVLinks UCX leaves it to writes, and reads over
TCP. ``UCX_TCP_CONN_NB``, ``UCX_TCP_SYN_CNT`` and ``UCX_CUDA_IPC_ENABLE_GET_ZCOPY`` in the
environment take precedence.
"""


def checked_backends(value: Any) -> dict[str, dict[str, str]]:
    """Return options by the names of backends.

    Raises ``TYPE`` for anything else; NIXL's own errors would vary.
    """
    if not isinstance(value, Mapping) or not all(
        isinstance(options, Mapping) for options in value.values()
    ):
        raise wrong_type("backends", "a mapping of options by name", value)
    backends = dict[str, dict[str, str]]()
    for backend, options in value.items():
        settings = backends.setdefault(instance(str, backend, "name of a backend"), {})
        for option, setting in options.items():
            name = instance(str, option, "option of a backend")
            settings[name] = instance(str, setting, "option of a backend")
    return backends
