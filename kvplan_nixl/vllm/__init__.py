"""vLLM's connector: ``"kv_connector": "KvplanConnector"`` is its setting.

vLLM finds :func:`register` by an entry point and calls it in each of its processes. Where it loads
no plugins, ``"kv_connector_module_path": "kvplan_nixl.vllm"`` finds the connector too.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvplan_nixl.vllm.connector import KvplanConnector

__all__ = ["KvplanConnector", "register"]

CONNECTOR: Final = "KvplanConnector"


def register() -> None:
    """Register the connector's name with vLLM, which loads the class when it is asked for.

    vLLM's ``MultiConnector`` finds the class of statistics by this name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # It is registered already if a module path has loaded the class before.
    with suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR, __name__, CONNECTOR)


def __getattr__(name: str) -> Any:
    """Return the connector, whose module loads when it is first asked for."""
    if name != CONNECTOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvplan_nixl.vllm.connector import KvplanConnector

    return KvplanConnector
