"""A plugin of pytest with which vLLM's own tests run with another connector in place of NixlConnector.

It is imported where ``tests`` are vLLM's, so nothing of kvplan's tests is at hand. ``JUDGED`` in the environment has
the connector's settings and the folder of a model, as JSON.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from types import ModuleType
from typing import Any

import pytest

# One file imports Ray, for tests that are not run.
sys.modules.setdefault("ray", ModuleType("ray"))

utils: Any = importlib.import_module("tests.v1.kv_connector.unit.utils")

SETTINGS = json.loads(os.environ["JUDGED"])

# What only NixlConnector has: its metadata, its classes, its scheduler inside the connector.
OWN = re.compile(r"connector_scheduler|connector_worker|Nixl\w+")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that look into NixlConnector, or make its workers."""
    for item in items:
        if isinstance(item, pytest.Function):
            makes_workers = "dist_init" in item.fixturenames
            if makes_workers or OWN.search(inspect.getsource(item.function)):
                item.add_marker(pytest.mark.skip(reason="looks into NixlConnector"))


def create_vllm_config(*arguments: Any, **settings: Any) -> Any:
    """Make a configuration as vLLM's tests do, with the judged connector and its settings."""
    return _create_vllm_config(*arguments, **{**settings, **SETTINGS})


def create_scheduler(*arguments: Any, **settings: Any) -> Any:
    """Make a scheduler as vLLM's tests do, and hand it its workers' envelopes, as an engine does."""
    scheduler = _create_scheduler(*arguments, **settings)
    if "kv_connector_module_path" in SETTINGS:
        from kvplan_nixl.vllm.metadata import KvplanHandshakeMetadata

        metadata = {(0, 0): KvplanHandshakeMetadata(b"an envelope")}
        scheduler.connector.set_xfer_handshake_metadata_pp_aware(metadata)
    return scheduler


_create_vllm_config = utils.create_vllm_config
_create_scheduler = utils.create_scheduler
utils.create_vllm_config = create_vllm_config
utils.create_scheduler = create_scheduler
