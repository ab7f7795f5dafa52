"""vLLM's connectors: ``"kv_connector": "KvplanConnector"`` is its setting, or ``"KvplanStore"``.

vLLM finds :func:`register` by an entry point and calls it in each of its processes. Where it loads
no plugins, ``"kv_connector_module_path": "kvplan_nixl.vllm"`` finds the connector too.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvplan_nixl.vllm.connector import KvplanConnector
    from kvplan_nixl.vllm.store import KvplanStore

__all__ = ["KvplanConnector", "KvplanStore", "register"]

MODULES: Final = MappingProxyType({"KvplanConnector": "connector", "KvplanStore": "store"})
"""The module of each connector."""


def register() -> None:
    """Register the connectors' names with vLLM, which loads a class when it is asked for.

    vLLM's ``MultiConnector`` finds the class of statistics by this name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # They are registered already if a module path has loaded a class before.
    for connector in MODULES:
        with suppress(ValueError):
            KVConnectorFactory.register_connector(connector, __name__, connector)


def __getattr__(name: str) -> Any:
    """Return a connector, whose module loads when it is first asked for."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
