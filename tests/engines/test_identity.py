"""A walk over vLLM's configuration: each field changes the identity of an engine, or has a reason why it need not."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pkgutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import save_file
from vllm import config as vllm_config
from vllm.config.diffusion import DiffusionConfig
from vllm.engine.arg_utils import EngineArgs

from kvplan import KVPlanError
from kvplan.describe.model import model_text
from kvplan_nixl.vllm.engine_hooks import watch_adapters, watch_engine
from kvplan_nixl.vllm.identity import NO_FACTS, check_models, identity_of
from kvplan_nixl.vllm.settings import ConnectorSettings
from tests.pages import ROOT

SETTINGS = ConnectorSettings()

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}

WALKED: dict[str, type[Any]] = {
    name: getattr(vllm_config, name, DiffusionConfig)
    for name in (
        "VllmConfig",
        "ModelConfig",
        "CacheConfig",
        "LoadConfig",
        "LoRAConfig",
        "MultiModalConfig",
        "SpeculativeConfig",
        "MambaConfig",
        "AttentionConfig",
        "DiffusionConfig",
    )
}

TABLES = tomllib.loads((ROOT / "kvplan_nixl" / "vllm" / "options.toml").read_text())
HARMLESS, STATED = (
    [tuple(field.split(".")) for field in " ".join(TABLES[name].values()).split()] for name in ("harmless", "stated")
)
"""The class and the name of each field that is no fact."""

NEW_IN_033 = {
    "VllmConfig": {"watchdog_config"},
    "CacheConfig": {"simple_cpu_offload_num_blocks"},
    "AttentionConfig": {"trtllm_ragged_backend", "indexer_tp_shard_min_rows", "minimax_m3_indexer_cp"},
    "SpeculativeConfig": {
        "disable_lookahead_block_hashes",
        "draft_lm_head_quantization",
        "xpress_topc",
        "fly_window_size",
        "fly_entropy_threshold",
        "fly_entropy_top_k",
    },
}
"""Fields that vLLM 0.33 has and 0.32 lacks."""


def write_model(folder: Path, weights: float = 0.0, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file({"weights": torch.full((4,), weights)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("identity") / "model")


def config_of(model: Path, **options: Any) -> Any:
    return EngineArgs(model=str(model), skip_tokenizer_init=True, **options).create_engine_config()


def facts_of(model: Path, **options: Any) -> dict[str, Any]:
    return identity_of(config_of(model, **options), SETTINGS)


def fields_of(kind: str) -> Iterator[str]:
    for field in dataclasses.fields(WALKED[kind]):
        yield field.name


@pytest.mark.parametrize("kind", WALKED)
def test_each_field_has_one_place(kind: str) -> None:
    """A reason why it is harmless, the fact that has its effect, or a value that counts. No list has other fields."""
    listed = [name for owner, name in (*HARMLESS, *STATED) if owner == kind]
    assert len(listed) == len({*listed})
    known = {*fields_of(kind), *NEW_IN_033.get(kind, ())}
    assert {*listed} - known == set()
    assert {*fields_of(kind)} - {*listed} == COUNTED.get(kind, set())


def test_the_list_is_that_of_these_parts() -> None:
    """A class of vLLM's with a wrong name would have no field in the list."""
    listed = (*HARMLESS, *STATED)
    assert {owner for owner, _ in listed} <= WALKED.keys()
    assert {f"{owner}.{name}" for owner, name in listed} == NO_FACTS


COUNTED = {
    "VllmConfig": {"additional_config"},
    "ModelConfig": {"quantization_config", "code_revision", "model_class_overrides"},
    "CacheConfig": {"replayssm_buffer_len", "use_replayssm"},
    "LoadConfig": {"model_loader_extra_config", "ignore_patterns"},
    "LoRAConfig": {"target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras"},
    "MultiModalConfig": {
        "media_io_kwargs",
        "mm_processor_kwargs",
        "mm_hasher_algorithm",
        "mm_encoder_attn_dtype",
        "video_pruning_rate",
        "video_pruning_method",
        "allow_missing_mm_embeddings",
    },
    "SpeculativeConfig": {
        "code_revision",
        "index_share_for_mtp_iteration",
        "use_heterogeneous_vocab",
        "parallel_drafting",
    },
    "MambaConfig": {"enable_stochastic_rounding", "stochastic_rounding_philox_rounds"},
    "AttentionConfig": {"use_non_causal"},
    "DiffusionConfig": {"canvas_length", "max_denoising_steps"},
}
"""Fields whose values are facts. A field of a release to come counts too, and fails the test until somebody looks."""


def another(value: Any) -> Any:
    """A value of the same kind, as far as there is one."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case list():
            return [*value, "x"]
        case dict():
            return {**value, "x": 1}
    return "x"


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    """A configuration with each part that is walked: adapters, inputs other than text, and a draft."""
    config = config_of(folder, enable_lora=True)
    config.model_config.multimodal_config = vllm_config.MultiModalConfig()
    config.diffusion_config = DiffusionConfig(canvas_length=8)
    draft = write_model(folder.parent / "draft", 1.0)
    fields: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(vllm_config.SpeculativeConfig)}
    speculative = object.__new__(vllm_config.SpeculativeConfig)
    for name, value in fields.items():
        default = value.get_default(call_default_factory=True) if hasattr(value, "get_default") else value
        object.__setattr__(speculative, name, None if default is dataclasses.MISSING else default)
    speculative.method = "draft_model"
    speculative.draft_model_config = config_of(draft).model_config
    config.speculative_config = speculative
    return config


def part_of(config: Any, kind: str) -> Any:
    if kind == "VllmConfig":
        return config
    if kind == "MultiModalConfig":
        return config.model_config.multimodal_config
    return next(value for value in vars(config).values() if type(value).__name__ == kind)


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in COUNTED.items() for name in sorted(names)])
def test_a_field_that_counts_changes_the_identity(whole: Any, kind: str, name: str) -> None:
    part = part_of(whole, kind)
    before, value = identity_of(whole, SETTINGS), getattr(part, name)
    object.__setattr__(part, name, another(value))
    try:
        after = identity_of(whole, SETTINGS)
    finally:
        object.__setattr__(part, name, value)
    changed = [fact for fact in {*before, *after} if before.get(fact) != after.get(fact)]
    assert changed
    assert all(name in fact for fact in changed)
    assert identity_of(whole, SETTINGS) == before


@pytest.mark.parametrize("kind, name", HARMLESS)
def test_a_harmless_field_does_not(whole: Any, kind: str, name: str) -> None:
    """Where the release has it. Parts of the whole, and what other fields are made of, keep their types."""
    part = part_of(whole, kind)
    value = getattr(part, name, None)
    if name not in fields_of(kind) or dataclasses.is_dataclass(value):
        return
    before = identity_of(whole, SETTINGS)
    object.__setattr__(part, name, another(value))
    try:
        assert identity_of(whole, SETTINGS) == before
    finally:
        object.__setattr__(part, name, value)


# Fields whose effect other facts have


def with_theta(config: Any) -> Any:
    config.rope_parameters = {"rope_theta": 5.0, "rope_type": "default"}
    return config


STATED_OPTIONS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "dtype": ({"dtype": "float32"}, {"dtype"}),
    "quantization": ({"quantization": "fp8"}, {"quantization"}),
    "load_format": ({"load_format": "dummy"}, {"load_format", "weights"}),
    "hf_overrides": ({"hf_overrides": {"rms_norm_eps": 1e-3}}, {"config.rms_norm_eps"}),
    "hf_overrides, function": ({"hf_overrides": with_theta}, {"config.rope_parameters.rope_theta"}),
    "hf_overrides, window": ({"hf_overrides": {"sliding_window": 64}}, {"config.sliding_window"}),
    "lora_dtype": ({"enable_lora": True, "lora_dtype": "float16"}, {"lora_dtype"}),
}


@pytest.mark.parametrize("name", STATED_OPTIONS)
def test_an_option_that_is_stated_elsewhere_changes_the_identity(folder: Path, name: str) -> None:
    options, facts = STATED_OPTIONS[name]
    before, after = facts_of(folder), facts_of(folder, **options)
    assert {fact for fact in {*before, *after} if before.get(fact) != after.get(fact)} == facts


def test_files_change_the_identity(folder: Path) -> None:
    """Weights, configuration, that of another folder, and processors; not the folder's name."""
    before = facts_of(folder)
    assert facts_of(write_model(folder.parent / "same")) == before
    changed = write_model(folder.parent / "weights", 2.0)
    assert {**facts_of(changed), "weights": before["weights"]} == before
    assert facts_of(changed)["weights"] != before["weights"]
    other = write_model(folder.parent / "config", rms_norm_eps=1e-2)
    assert facts_of(other)["config.rms_norm_eps"] == 0.01
    assert facts_of(folder, hf_config_path=str(other))["config.rms_norm_eps"] == 0.01
    (other / "preprocessor_config.json").write_text('{"max_pixels": 7}')
    assert facts_of(other)["processor.preprocessor_config.max_pixels"] == 7


THETA = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    "overrides, file",
    [
        (THETA, {"rope_theta": 5e5}),
        ({"rope_parameters": YARN}, {"rope_scaling": {key: YARN[key] for key in YARN if key != "rope_theta"}}),
        ({"rms_norm_eps": 1e-3}, {"rms_norm_eps": 1e-3}),
        (with_theta, {"rope_theta": 5}),
    ],
    ids=["theta", "YaRN", "epsilon", "function"],
)
def test_an_override_and_a_file_are_one_model(folder: Path, overrides: Any, file: dict[str, Any]) -> None:
    stated = write_model(folder.parent / "stated", **file)
    assert facts_of(folder, hf_overrides=overrides) == facts_of(stated) != facts_of(folder)


def test_an_override_that_vllm_reads_otherwise_is_a_fact_of_its_own(folder: Path) -> None:
    """With Transformers 5, theta has another name once the file is read: this override changes nothing."""
    stated = write_model(folder.parent / "stated", rope_theta=5e5)
    facts = facts_of(folder, hf_overrides={"rope_theta": 5e5})
    assert facts["overrides.rope_theta"] == 500000
    assert facts["config.rope_parameters.rope_theta"] == 10000
    assert facts != facts_of(stated)


def test_harmless_options_are(folder: Path) -> None:
    """Parallel sizes, blocks, memory and lengths: engines that differ in them are those that read from each other."""
    options: dict[str, Any] = {
        "block_size": 32,
        "max_model_len": 512,
        "seed": 7,
        "enforce_eager": True,
        "max_num_seqs": 3,
        "kv_cache_dtype": "fp8",
        "served_model_name": "a",
        "enable_lora": True,
    }
    assert facts_of(folder, **options) == facts_of(folder)


def changed_length(config: Any, length: int) -> dict[str, Any]:
    config.model_config.max_model_len = length
    return identity_of(config, SETTINGS)


def test_the_longest_request_counts_where_a_model_asks_for_it(folder: Path) -> None:
    """LongRoPE has factors for long and short requests; Llama 4 scales queries for long ones."""
    config = config_of(folder)
    assert changed_length(config, 512) == changed_length(config, 2048)
    text = config.model_config.hf_text_config
    text.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 1024}
    assert changed_length(config, 512)["rope.is_long"] is False
    assert changed_length(config, 1024)["rope.is_long"] is False
    assert changed_length(config, 1025)["rope.is_long"] is True
    config = config_of(folder)
    config.model_config.hf_text_config = SimpleNamespace(model_type="llama4_text")
    assert changed_length(config, 32768)["attn_temperature_tuning"] is False
    assert changed_length(config, 32769)["attn_temperature_tuning"] is True


def test_a_draft_with_a_cache_counts(whole: Any, folder: Path) -> None:
    """Its weights, configuration and method, each by a fact of its own; one without a cache does not."""
    facts = identity_of(whole, SETTINGS)
    draft = {name for name in facts if name.startswith("draft.")}
    assert {"draft.method", "draft.weights", "draft.config.rms_norm_eps"} <= draft
    speculative = whole.speculative_config
    model = speculative.draft_model_config.model
    try:
        speculative.draft_model_config.model = str(write_model(folder.parent / "draft 2", 5.0))
        assert identity_of(whole, SETTINGS)["draft.weights"] != facts["draft.weights"]
        speculative.draft_model_config.model = whole.model_config.model
        assert {name for name in identity_of(whole, SETTINGS) if name.startswith("draft.")} == {"draft.method"}
        speculative.method = "ngram"
        assert not {name for name in identity_of(whole, SETTINGS) if name.startswith("draft.")}
    finally:
        speculative.method = "draft_model"
        speculative.draft_model_config.model = model


def test_scales_of_an_encoder_count_by_content(whole: Any, tmp_path: Path) -> None:
    inputs, digests = whole.model_config.multimodal_config, []
    try:
        for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
            (tmp_path / name).write_bytes(content)
            inputs.mm_encoder_fp8_scale_path = str(tmp_path / name)
            digests.append(identity_of(whole, SETTINGS)["mm_encoder_fp8_scales"])
        assert digests[0] == digests[1] != digests[2]
        inputs.mm_encoder_fp8_scale_path = str(tmp_path / "gone")
        with pytest.raises(KVPlanError, match="CONFIG: cannot read mm_encoder_fp8_scale_path"):
            identity_of(whole, SETTINGS)
    finally:
        inputs.mm_encoder_fp8_scale_path = None


def test_operators_have_a_say(folder: Path) -> None:
    """A name, a fingerprint of their own, and facts that they know to be harmless."""
    config = config_of(folder, quantization="fp8")
    settings = ConnectorSettings(model="ours", weights="v1", ignored_facts=("config.*", "quantization"))
    assert identity_of(config, settings) == {"model": "ours", "weights": "v1", "dtype": "bfloat16"}


def test_a_model_without_a_fingerprint_has_its_name(folder: Path) -> None:
    config = config_of(folder)
    assert "model" not in identity_of(config, SETTINGS)
    config.model_config.model = "someone/elsewhere"
    config.model_config.revision = "main"
    facts = identity_of(config, SETTINGS)
    assert (facts["model"], facts["weights"]) == ("someone/elsewhere", "main")
    # its configuration is as vLLM has made it
    assert facts["config.rms_norm_eps"] == 1e-5


CHECKS: list[Callable[[], list[str]]] = [list, lambda: [model_text({"weights": "5f1a"})] * 2]


@pytest.mark.parametrize("models", CHECKS)
def test_workers_that_agree_start(models: Callable[[], list[str]]) -> None:
    check_models({"weights": "5f1a"}, models())


def test_files_that_change_while_an_engine_starts_are_refused() -> None:
    models = [model_text({"weights": weights}) for weights in ("5f1a", "77aa")]
    with pytest.raises(KVPlanError) as caught:
        check_models({"weights": "5f1a"}, models)
    assert str(caught.value) == (
        'MODEL: cannot start an engine: expected weights "5f1a" (its scheduler), got weights "77aa" (one of its '
        "workers) (the model's files have changed while it started: start it again)"
    )


# What vLLM is asked to tell


WATCHED = {
    "vllm.v1.engine.core.EngineCore": (
        "collective_rpc",
        "set_weight_version",
        "reset_prefix_cache",
        "add_lora",
        "remove_lora",
        "sleep",
        "release_kv_cache_memory",
    ),
    "vllm.v1.core.sched.scheduler.Scheduler": ("update_from_output",),
    "vllm.lora.worker_manager.WorkerLoRAManager": ("_load_adapter",),
}
"""The methods of vLLM that are wrapped."""


@pytest.fixture
def methods() -> Iterator[dict[str, Any]]:
    """The methods that are wrapped, by class and name; they are as they were afterwards."""
    owners = {path: pkgutil.resolve_name(path) for path in WATCHED}
    before = {(path, name): vars(owners[path])[name] for path, names in WATCHED.items() for name in names}
    yield {name: owners[path] for path, name in before}
    for (path, name), method in before.items():
        setattr(owners[path], name, method)


def watch_both(config: Any) -> None:
    watch_engine(config)
    watch_adapters(config)


def test_this_release_tells_all_that_changes(folder: Path, methods: dict[str, Any]) -> None:
    """Each method is there, with the arguments that its wrapper passes on."""
    config = config_of(folder, enable_lora=True, weight_transfer_config={"backend": "nccl"})
    watch_both(config)
    for name, owner in methods.items():
        assert vars(owner)[name].is_watched_by_kvplan
        assert inspect.signature(vars(owner)[name]).parameters.keys() == ARGUMENTS[name]


ARGUMENTS = {
    "collective_rpc": {"self", "method", "timeout", "args", "kwargs"},
    "set_weight_version": {"self", "weight_version"},
    "reset_prefix_cache": {"self", "reset_running_requests", "reset_connector"},
    "add_lora": {"self", "lora_request"},
    "remove_lora": {"self", "lora_id"},
    "sleep": {"self", "level", "mode"},
    "release_kv_cache_memory": {"self"},
    "update_from_output": {"self", "scheduler_output", "model_runner_output"},
    "_load_adapter": {"self", "lora_request"},
}


@pytest.mark.parametrize(
    "name, options, label",
    [
        ("collective_rpc", {"weight_transfer_config": {"backend": "nccl"}}, "weight_transfer_config"),
        ("set_weight_version", {"weight_transfer_config": {"backend": "nccl"}}, "weight_transfer_config"),
        ("add_lora", {"enable_lora": True}, "enable_lora"),
        ("_load_adapter", {"enable_lora": True}, "enable_lora"),
    ],
)
def test_an_option_whose_changes_nobody_tells_is_refused(
    folder: Path, methods: dict[str, Any], name: str, options: dict[str, Any], label: str
) -> None:
    """With both values and the reason; without the option the engine starts."""
    delattr(methods[name], name)
    watch_both(config_of(folder))
    with pytest.raises(KVPlanError, match=f"^SETTING: cannot set {label}: expected .*, got .* .this release of vLLM"):
        watch_both(config_of(folder, **options))


def test_a_release_that_may_release_memory_unseen_is_refused(folder: Path, methods: dict[str, Any]) -> None:
    """No platform here has this allocator, so the option is set once the configuration is made."""
    config = config_of(folder)
    config.model_config.enable_cumem_allocator = True
    watch_engine(config)
    delattr(methods["release_kv_cache_memory"], "release_kv_cache_memory")
    with pytest.raises(KVPlanError, match=r"^SETTING: cannot set enable_cumem_allocator: .*, got True"):
        watch_engine(config)
