"""Loads the peers' planners: some of their modules as released, and stand-ins for what those need and lack here.

Everything that computes a rank, an offset, a length or an id runs as it was released.
"""

from __future__ import annotations

import importlib
import logging
import re
import traceback
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.peers import stand_ins
from benchmarks.peers.environment import SOURCES
from kvplan.testing import conformance

CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector"
VLLM: Final = (
    f"{CONNECTOR}.utils",
    f"{CONNECTOR}.v1.mooncake.mooncake_connector",
    f"{CONNECTOR}.v1.moriio.moriio_common",
    f"{CONNECTOR}.v1.moriio.moriio_connector",
    f"{CONNECTOR}.v1.moriio.moriio_engine",
    f"{CONNECTOR}.v1.moriio.moriio_layout",
    f"{CONNECTOR}.v1.moriio.moriio_tp_mapping",
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
DISAGGREGATED: Final = "megatron.core.inference.disaggregation"
MEGATRON: Final = (f"{DISAGGREGATED}.kv_reshard", f"{DISAGGREGATED}.utils")
ABSENT: Final = ("aiohttp", "prometheus_client", "requests", "triton")
"""Packages that SGLang's modules import and its planners never call."""

ABSENT_FROM_VLLM: Final = ("huggingface_hub", "mooncake", "mori", "msgpack")


class RefusedError(conformance.RefusedError):
    """A peer refuses a pair: the first line of its reason, or the function of a check that gives none."""

    def __init__(self, reason: object) -> None:
        text = str(reason).strip().splitlines()
        if not text and isinstance(reason, Exception):
            text = [f"a check of {traceback.extract_tb(reason.__traceback__)[-1].name}"]
        super().__init__(re.sub(r"\s+", " ", text[0]))


def module(name: str) -> Any:
    """A peer's module."""
    return importlib.import_module(name)


class Log(logging.Logger):
    """A silent logger with the methods that the peers add to theirs."""

    info_once = warning_once = debug_once = logging.Logger.debug


def load() -> dict[str, Any]:
    """Load the peers' modules, by name. From here on calling a stand-in is an error."""
    stand_ins.only("vllm", SOURCES, VLLM, ABSENT_FROM_VLLM)
    stand_ins.only("megatron", SOURCES, MEGATRON)
    importlib.import_module("torch")  # before triton gets a stand-in
    stand_ins.only("sglang", SOURCES, SGLANG, ABSENT)
    found: dict[str, Any] = {name: importlib.import_module(name) for name in (*VLLM, *SGLANG, *MEGATRON)}
    for module in found.values():
        if hasattr(module, "logger"):
            module.logger = Log("peer", logging.CRITICAL)
    found["vllm.utils.torch_utils"].PIN_MEMORY = False
    _set_up_nixl(found[f"{CONNECTOR}.v1.nixl.base_worker"])
    # in a module that imports the engine's layers
    found[f"{CONNECTOR}.v1.mooncake.mooncake_connector"].extract_layer_index = lambda name: int(name.split(".")[2])
    memory = SimpleNamespace(enable_unified_memory=False)
    for name in ("mooncake.conn", "common.conn"):
        found[f"{DISAGGREGATION}.{name}"].get_memory = lambda: memory
    stand_ins.close()
    return found


def _set_up_nixl(module: Any) -> None:
    """Set what the connector's worker reads from its process: the platform, hashes and specs."""
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
