"""Stand-ins for engines' objects have nothing that the engines' own classes lack.

They are in ``tests/nixl/sglang_objects.py``, ``tests/bridges/sglang_pools.py``, ``tests/bridges/vllm_objects.py`` and
``tests/simulation/vllm_objects.py``.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
from array import array
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.bridges import sglang_pools, vllm_objects
from tests.engines.models import build
from tests.nixl import sglang_objects as ours
from tests.simulation import vllm_objects as scheduler_objects

sys.path.append(str(Path(__file__).with_name("standins")))
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.runtime_context", reason="needs SGLang")
interface = pytest.importorskip("vllm.v1.kv_cache_interface", reason="needs vLLM")

CLASSES = {
    "configs.model_config": "ModelConfig",
    "disaggregation.base.conn": "KVArgs",
    "disaggregation.decode": "DecodeRequest DecodeTransferQueue",
    "disaggregation.utils": "MetadataBuffers",
    "distributed.parallel_state": "GroupCoordinator",
    "environ": "Envs",
    "layers.radix_attention": "RadixAttention",
    "lora.lora_registry": "LoRARef",
    "managers.schedule_batch": "Req",
    "managers.scheduler": "Scheduler",
    "managers.tp_worker": "TpModelWorker",
    "mem_cache.hicache_storage": "HiCacheStorage HiCacheStorageConfig HiCacheStorageExtraInfo PoolTransfer "
    "PoolTransferResult",
    "mem_cache.radix_cache": "RadixKey",
    "mem_cache.unified_cache.unified_tree_core": "StorageBackupSpec",
    "model_executor.model_runner": "ModelRunner",
    "server_args": "ServerArgs",
}
"""SGLang's classes that have a stand-in of their name, by module."""

POOLS = {
    "mem_cache.deepseek_v4_memory_pool": "DeepSeekV4TokenToKVPool",
    "mem_cache.memory_pool": "MHATokenToKVPool MHATokenToKVPoolFP4 MLATokenToKVPool DSATokenToKVPool MambaPool "
    "HybridLinearKVPool MiniMaxSparseKVPool",
    "mem_cache.pool_host.mha": "MHATokenToKVPoolHost",
    "mem_cache.pool_host.mla": "MLATokenToKVPoolHost",
    "mem_cache.swa_memory_pool": "SWAKVPool",
}

ENUMS = {
    "disaggregation.base.conn": "KVTransferDestination StateType",
    "disaggregation.utils": "DisaggregationMode",
    "mem_cache.hicache_storage": "PoolName",
    "plugins.hook_registry": "HookType",
    "speculative.spec_info": "SpeculativeAlgorithm",
}


def named(table: dict[str, str]) -> list[Any]:
    """SGLang's classes and the stand-ins for them."""
    pairs = [(module, name) for module, names in table.items() for name in names.split()]
    return [pytest.param(module, name, id=name) for module, name in pairs]


def of_sglang(module: str, name: str) -> Any:
    return getattr(import_module(f"sglang.srt.{module}"), name)


def attributes(cls: type) -> set[str]:
    """What objects of a class have: its members, its fields, and what its methods set."""
    found = {*dir(cls)}
    for base in cls.__mro__[:-1]:
        found |= {*vars(base).get("__annotations__", {})}
        if base.__module__.startswith(("sglang", "vllm", "tests")):
            nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base))))
            found |= {
                node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            }
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize(("module", "name"), named(CLASSES))
def test_a_stand_in_has_what_its_class_has(module: str, name: str) -> None:
    assert attributes(getattr(ours, name)) <= attributes(of_sglang(module, name))


@pytest.mark.parametrize(("module", "name"), named(POOLS))
def test_a_pool_has_what_its_class_has(module: str, name: str) -> None:
    assert attributes(getattr(sglang_pools, name)) <= attributes(of_sglang(module, name))


def test_parts_of_pools() -> None:
    """A pool's states, and its index keys."""
    memory_pool = import_module("sglang.srt.mem_cache.memory_pool")
    assert attributes(sglang_pools.State) <= attributes(memory_pool.MambaPool.State)
    assert attributes(sglang_pools.IndexKeyPool) <= attributes(memory_pool.MHATokenToKOnlyPool)


VLLM = """
    KVCacheSpec AttentionSpec FullAttentionSpec SlidingWindowSpec MLAAttentionSpec CircularBufferSpec MambaSpec
    UniformTypeKVCacheSpecs KVCacheGroupSpec KVCacheTensor KVCacheConfig
"""


@pytest.mark.parametrize("name", VLLM.split())
def test_a_stand_in_has_what_vllm_s_class_has(name: str) -> None:
    assert attributes(getattr(vllm_objects, name)) <= attributes(getattr(interface, name))


@pytest.mark.parametrize("name", ["KVQuantMode", "SparseCacheRole", "MambaAttentionBackendEnum"])
def test_members_of_an_enum_of_vllm_s(name: str) -> None:
    theirs = getattr(interface, name).__members__
    for member in getattr(vllm_objects, name):
        assert member.name in theirs
        assert name == "MambaAttentionBackendEnum" or theirs[member.name].value == member.value


@pytest.mark.parametrize("name", ["AttentionSpec", "MLAAttentionSpec", "CircularBufferSpec"])
@pytest.mark.parametrize("fields", [{}, {"tokens_per_state": 4}, {"head_size_v": 0}, {"state_content_bytes": 24}])
def test_sizes_of_a_spec(name: str, fields: dict[str, Any]) -> None:
    """Those of a block, and whether it has slots of tokens, are the same of the same fields."""
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, **fields}
    theirs = getattr(interface, name)(**fields, dtype=torch.float32)
    own = getattr(vllm_objects, name)(**fields, dtype="torch.float32")
    sizes = ("num_heads", "num_states", "state_content_size_bytes", "head_size_v", "uses_slot_mapping")
    for each in (*sizes, "has_layer_views", "dcp_sharded", "max_tp_shards", "tokens_per_state"):
        assert getattr(own, each) == getattr(theirs, each), each


SCHEDULER = {
    "config": "AuxOutputConfig CacheConfig KVTransferConfig ModelConfig ParallelConfig VllmConfig",
    "lora.request": "LoRARequest",
    "multimodal.inputs": "MultiModalFeatureSpec PlaceholderRange",
    "sampling_params": "SamplingParams",
    "v1.core.block_pool": "BlockPool",
    "v1.core.kv_cache_manager": "KVCacheBlocks",
    "v1.core.kv_cache_utils": "KVCacheBlock",
    "v1.core.sched.output": "CachedRequestData NewRequestData SchedulerOutput",
    "v1.core.single_type_kv_cache_manager": "SingleTypeKVCacheManager",
    "v1.engine": "EngineCoreOutput EngineCoreOutputs",
    "v1.outputs": "KVConnectorOutput ModelRunnerOutput",
    "v1.request": "Request",
}
"""vLLM's classes of a scheduler that have a stand-in of their name, by module."""


@pytest.mark.parametrize(("module", "name"), named(SCHEDULER))
def test_a_stand_in_has_what_vllm_s_scheduler_has(module: str, name: str) -> None:
    """A pool of blocks counts those that are free in another way."""
    theirs = getattr(import_module(f"vllm.{module}"), name)
    assert attributes(getattr(scheduler_objects, name)) - {"num_free"} <= attributes(theirs)


def test_statuses_of_a_request() -> None:
    statuses = import_module("vllm.v1.request").RequestStatus.__members__
    assert {status.name for status in scheduler_objects.RequestStatus} <= {*statuses}


def test_a_queue_has_what_both_of_sglang_s_have() -> None:
    """Decode's alone has the queue of transfers."""
    prefill = attributes(of_sglang("disaggregation.prefill", "PrefillBootstrapQueue"))
    decode = attributes(of_sglang("disaggregation.decode", "DecodePreallocQueue"))
    assert attributes(ours.Queue) - {"transfer_queue"} <= prefill & decode
    assert "transfer_queue" in decode


@pytest.mark.parametrize(("module", "name"), named(ENUMS))
def test_members_of_an_enum(module: str, name: str) -> None:
    theirs = of_sglang(module, name)
    for member in getattr(ours, name):
        assert member.name in theirs.__members__
        assert isinstance(member.value, int) or theirs[member.name].value == member.value


def test_states_of_a_request() -> None:
    assert public(ours.KVPoll) == public(of_sglang("disaggregation.base", "KVPoll"))


def public(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


def test_settings_have_sglang_s_defaults(tmp_path: Path) -> None:
    """Those of a command line, and where the engine keeps what it has made of them."""
    context = import_module("sglang.srt.runtime_context")
    arguments = of_sglang("server_args", "ServerArgs")
    defaults = {field.name: field.default for field in of_sglang("arg_groups.arg_utils", "record_fields")(arguments)}
    build("llama", tmp_path)
    engine = ours.Runtime({})
    for field in attrs.fields(ours.ServerArgs):
        assert defaults[field.name] in (field.default, None)
    context.publish(
        arguments(f"{tmp_path}", served_model_name="tiny", device="cpu", attention_backend="torch_native"),
        role="scheduler",
    )
    assert attributes(ours.ParallelContext) <= context._parallel_fields()
    for bag in ("serving", "memory", "disagg", "model", "spec"):
        own, theirs = getattr(engine, bag), getattr(context, f"get_{bag}")()
        for field in attrs.fields(type(own)):
            assert getattr(theirs, field.name) == getattr(own, field.name), field.name
    features = context.get_exec().features
    assert {name: getattr(features, name) for name in attrs.asdict(engine.exec.features)} == attrs.asdict(
        engine.exec.features
    )


def test_prompts_and_their_hashes() -> None:
    """Whole pages of a prompt, each with a hash that those before decide, and the namespace."""
    theirs = of_sglang("mem_cache.radix_cache", "RadixKey"), of_sglang("mem_cache.utils", "get_storage_hash_str")
    for key_of, hashes_of in (theirs, (ours.RadixKey, ours.get_storage_hash_str)):
        key = key_of(array("q", range(37)), extra_key="a", cache_salt="b").page_aligned(16)
        hashes = hashes_of(key, page_size=16)
        assert ([*key.token_ids], key.extra_key, key.cache_salt) == ([*range(32)], "a", "b")
        assert len(hashes) == 2
        longer = key_of(array("q", range(48)), extra_key="a", cache_salt="b")
        assert hashes_of(longer, page_size=16)[:2] == hashes
        for other in (
            key_of(array("q", [5, *range(1, 32)]), extra_key="a", cache_salt="b"),
            key_of(array("q", range(32)), cache_salt="b"),
            key_of(array("q", range(32)), extra_key="a"),
        ):
            assert not {*hashes_of(other, page_size=16)} & {*hashes}
    assert of_sglang("managers.schedule_batch", "MM_PAD_SHIFT_VALUE") == ours.IMAGE


def test_rows_of_first_tokens() -> None:
    """A request's row has its first token first."""
    theirs = of_sglang("disaggregation.utils", "MetadataBuffers")(4, 8, torch.float32, 1)
    own = ours.MetadataBuffers(4)
    for name in ("output_ids", "bootstrap_room"):
        assert getattr(theirs, name).shape == getattr(own, name).shape
