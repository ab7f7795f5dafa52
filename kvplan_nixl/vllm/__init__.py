"""vLLM's connectors: ``"kv_connector": "KvplanConnector"`` is its setting, or ``"KvplanStore"``.

vLLM finds :func:`register` by an entry point and calls it in each of its processes. Where it loads
no plugins, ``"kv_connector_module_path": "kvplan_nixl.vllm"`` finds the connector too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvplan_nixl.vllm.registration import MODULES, register

if TYPE_CHECKING:
    from kvplan_nixl.vllm.connector import KvplanConnector
    from kvplan_nixl.vllm.store import KvplanStore

__all__ = ["KvplanConnector", "KvplanStore", "register"]


def __getattr__(name: str) -> Any:
    """Return a connector, whose module loads when it is first asked for."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
