"""Loads the peers' planners: which of their modules run as they are, and what is set by hand because it is not there.

Everything that computes a rank, an offset, a length or an id runs as it was released.
"""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any, Final

from tests.second_opinion import stand_ins
from tests.second_opinion.environment import SOURCES

CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector"
VLLM: Final = (
    f"{CONNECTOR}.utils",
    f"{CONNECTOR}.v1.nixl.base_worker",
    f"{CONNECTOR}.v1.nixl.metadata",
    f"{CONNECTOR}.v1.nixl.pull_worker",
    f"{CONNECTOR}.v1.nixl.tp_mapping",
    f"{CONNECTOR}.v1.nixl.utils",
    f"{CONNECTOR}.v1.offloading.canonical_mapping",
    f"{CONNECTOR}.v1.ssm_conv_transfer_utils",
    "vllm.utils.math_utils",
    "vllm.utils.torch_utils",
    "vllm.v1.attention.backends.registry",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.kv_offload.base",
)
DISAGGREGATION: Final = "sglang.srt.disaggregation"
SGLANG: Final = (
    "sglang.srt.environ",
    f"{DISAGGREGATION}.base",
    f"{DISAGGREGATION}.base.conn",
    f"{DISAGGREGATION}.common.conn",
    f"{DISAGGREGATION}.common.staging_buffer",
    f"{DISAGGREGATION}.common.staging_handler",
    f"{DISAGGREGATION}.common.utils",
    f"{DISAGGREGATION}.mooncake.conn",
    f"{DISAGGREGATION}.nixl.conn",
    f"{DISAGGREGATION}.utils",
)
ABSENT: Final = ("aiohttp", "prometheus_client", "requests", "triton")
"""Packages that SGLang's modules import and planning never calls."""


class Log(logging.Logger):
    """A logger with what the peers add to theirs; says nothing."""

    info_once = warning_once = debug_once = logging.Logger.debug


def load() -> dict[str, Any]:
    """The peers' modules, by name. Nothing that is missing in them can be called from here on."""
    stand_ins.only("vllm", SOURCES, VLLM)
    importlib.import_module("torch")  # before there is a stand-in for triton
    stand_ins.only("sglang", SOURCES, SGLANG, ABSENT)
    found: dict[str, Any] = {name: importlib.import_module(name) for name in (*VLLM, *SGLANG)}
    for module in found.values():
        if hasattr(module, "logger"):
            module.logger = Log("peer", logging.CRITICAL)
    found["vllm.utils.torch_utils"].PIN_MEMORY = False
    _set_up_nixl(found[f"{CONNECTOR}.v1.nixl.base_worker"])
    memory = SimpleNamespace(enable_unified_memory=False)
    for name in ("mooncake.conn", "common.conn"):
        found[f"{DISAGGREGATION}.{name}"].get_memory = lambda: memory
    stand_ins.close()
    return found


def _set_up_nixl(module: Any) -> None:
    """What the connector's worker asks the process that it runs in: a platform, a log of failures, no version check."""
    module.check_nixl_version = lambda version: None
    module.nixl_agent_config = None
    module.current_platform = SimpleNamespace(
        device_type="cpu",
        discover_numa_topology=list,
        get_nixl_memory_type=lambda: "DRAM",
        is_rocm=lambda: False,
    )
    module._NIXL_SUPPORTED_DEVICE = {"cpu": ("cpu",)}
    module.compute_nixl_compatibility_hash = lambda *args, **kwargs: "equal"
    module.get_current_attn_backends = lambda config: [SimpleNamespace(get_name=lambda: "ATTENTION")]
    module.get_current_attn_backends_and_specs = lambda *args: ((), ())
    module.select_common_block_size = lambda tokens, *args: tokens
    module.KVConnectorTransferResults = SimpleNamespace
    module.NixlKVConnectorStats = lambda: SimpleNamespace(record_transfer=lambda telemetry: None)
