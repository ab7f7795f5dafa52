"""The names of the connectors in vLLM, and the modules that have their classes."""

from __future__ import annotations

from contextlib import suppress
from types import MappingProxyType
from typing import Final

MODULES: Final = MappingProxyType({"KvplanConnector": "connector", "KvplanStore": "store"})


def register() -> None:
    """Register the connectors' names with vLLM, which loads a class when it is asked for.

    vLLM's ``MultiConnector`` finds the class of statistics by this name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # They are registered already if a module path has loaded a class before.
    for connector in MODULES:
        with suppress(ValueError):
            KVConnectorFactory.register_connector(connector, __package__, connector)
