"""The identity of a model on SGLang's own configuration: facts that a vLLM engine of the same folder has too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvplan import KVPlanError
from kvplan_nixl.settings import Settings
from tests.engines.models import build
from tests.pages import ROOT

OPTIONS = ROOT / "kvplan_nixl" / "sglang" / "options.toml"
STANDINS = Path(__file__).with_name("standins")
sys.path.append(str(STANDINS))
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

arg_utils = pytest.importorskip("sglang.srt.arg_groups.arg_utils", reason="needs SGLang")
runtime_context = pytest.importorskip("sglang.srt.runtime_context")
Scheduler = pytest.importorskip("sglang.srt.managers.scheduler").Scheduler
updates_module = pytest.importorskip("sglang.srt.managers.scheduler_components.weight_updater")
WeightUpdater = pytest.importorskip("sglang.srt.model_executor.model_runner_components.weight_updater").WeightUpdater
ServerArgs = pytest.importorskip("sglang.srt.server_args").ServerArgs
changes = pytest.importorskip("kvplan_nixl.sglang.changes")
identity = pytest.importorskip("kvplan_nixl.sglang.identity")

NAMES = Settings()

VLLM = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from kvplan_nixl.vllm.identity import identity_of
from kvplan_nixl.vllm.settings import ConnectorSettings as Settings
config = EngineArgs(model=sys.argv[1], dtype="float32", skip_tokenizer_init=True, **json.loads(sys.argv[2]))
print(json.dumps(identity_of(config.create_engine_config(), Settings())))
"""

Facts = dict[str, Any]
Read = Callable[..., Facts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    path = tmp_path_factory.mktemp("models") / "llama"
    build("llama", path)
    return path


@pytest.fixture
def facts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """The facts of an engine with some options, of the Llama unless they name another model."""
    monkeypatch.setattr(changes, "WEIGHTS", changes.Weights())

    def read(names: Any = NAMES, **options: Any) -> Facts:
        has_draft_cache = "speculative_algorithm" in options
        options = {"model_path": f"{folder}", "device": "cpu", "dtype": "float32", **options}
        arguments = ServerArgs(attention_backend="torch_native", skip_tokenizer_init=True, **options)
        runtime_context.publish(arguments, role="scheduler")
        found: Facts = identity.facts_of(names, has_draft_cache=has_draft_cache)
        return found

    return read


def changed(folder: Path, to: Path, **keys: Any) -> Path:
    """The same weights with other values in the configuration."""
    shutil.copytree(folder, to)
    file = to / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return to


def of_vllm(folder: Path, **options: Any) -> Facts:
    """The facts of a vLLM engine, which is in a process of its own."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", VLLM, str(folder), json.dumps(options)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: Facts = json.loads(run.stdout.splitlines()[-1])
    return found


def test_both_engines_know_one_model(facts: Read, folder: Path, tmp_path: Path) -> None:
    """As its file states it, with an override on one side, and with another one."""
    longer = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert of_vllm(folder) == facts()
    ours = facts(json_model_override_args=json.dumps({"rope_scaling": longer}))
    assert ours != facts()
    old_names = {"rope_theta": 10000.0, "rope_scaling": longer, "rope_parameters": None}
    assert of_vllm(changed(folder, tmp_path / "longer", **old_names)) == ours
    assert of_vllm(folder, hf_overrides={"rope_parameters": {"rope_theta": 10000.0, **longer}}) == ours


@pytest.mark.parametrize(
    "override, stated",
    [
        ({"rms_norm_eps": 1e-5}, {}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5, "rope_parameters": None}),
        ({"num_hidden_layers": 3}, {}),
        ({"sliding_window": 32}, {}),
    ],
)
def test_an_override_counts_as_the_file(
    facts: Read, folder: Path, tmp_path: Path, override: Facts, stated: Facts
) -> None:
    """The same value has the same fact, wherever it comes from."""
    overridden = facts(json_model_override_args=json.dumps(override))
    assert overridden != facts()
    assert overridden == facts(model_path=f"{changed(folder, tmp_path / 'same', **(stated or override))}")


def test_an_override_that_sglang_does_not_read_so_is_a_fact_of_its_own(facts: Read) -> None:
    """Transformers keeps rope_theta in a mapping, which an override of the old name does not reach."""
    found = facts(json_model_override_args='{"rope_theta": 500000.0}')
    assert found.items() > facts().items()
    assert {name for name in found.keys() - facts().keys() if name.startswith("overrides.")}


def test_each_option_changes_the_identity_or_has_a_reason(facts: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that a release adds is in no list: then look it up, and say why it changes nothing, if so."""
    facts()
    fields = arg_utils.record_fields(ServerArgs)
    # SGLang's own record is read-only
    arguments = SimpleNamespace(
        **{field.name: getattr(runtime_context.get_server_args(), field.name) for field in fields}
    )
    monkeypatch.setattr(identity, "get_server_args", lambda: arguments)
    monkeypatch.setattr(identity, "record_fields", lambda _: fields)
    names = {field.name for field in fields}
    listed = [
        name for table in tomllib.loads(OPTIONS.read_text()).values() for name in " ".join(table.values()).split()
    ]
    assert len(listed) == len({*listed})
    assert {*listed} == identity.NO_FACTS
    assert {*listed} <= names, "SGLang has no such option any more"
    before = identity.facts_of(NAMES)
    counted = names - {*listed}
    assert counted == {*COUNTED.split()}
    for name in sorted(counted):
        kept = getattr(arguments, name)
        setattr(arguments, name, "another value")
        found = identity.facts_of(NAMES)
        assert {key for key in found if found[key] != before.get(key)} == {f"sglang.{name}"}, name
        setattr(arguments, name, kept)


COUNTED = """
    custom_weight_loader decrypted_config_file decrypted_draft_config_file deepep_dispatcher_output_dtype
    disable_fast_image_processor dllm_algorithm dllm_algorithm_config dsv4_prefill_backend
    enable_decoder_swa_bounded_replay enable_deepseek_v4_fp4_indexer enable_encoder_swa_bounded_replay
    enable_int8_mamba_checkpoint enable_mamba_cache_stochastic_rounding enable_mis
    enable_precise_embedding_interpolation enable_quant_communications enable_tf32_matmul
    enable_w4a4_mxfp4_megamoe experts_shared_outer_loras flashinfer_mxfp4_moe_precision forward_hooks
    image_processor_backend is_embedding kt_max_deferred_experts_per_token kt_method kt_num_gpu_experts
    kt_weight_path lora_target_modules mm_process_config model_config_parser model_impl modelexpress_config
    modelopt_checkpoint_restore_path modelopt_quant prefill_kv_cache_dequant_dtype qsa_indexer_dtype
    quantize_and_serve rl_on_policy_target rl_quant_profile speculative_enable_w4a4_mxfp4_megamoe uno_lora_path
    weight_cache_mode
"""
"""Options whose own value is a fact. One that a release adds would be one too: it fails here first."""


def test_what_other_facts_say(facts: Read, folder: Path, tmp_path: Path) -> None:
    """Each option that the list has by its fact."""
    plain = facts()
    scales = tmp_path / "scales.json"
    scales.write_text('{"k": 2.0}')
    copy = changed(folder, tmp_path / "copy")
    other = changed(folder, tmp_path / "other", rms_norm_eps=1e-5)
    nameless = changed(folder, tmp_path / "nameless")
    (nameless / "model.safetensors").unlink()
    assert facts(model_path=f"{copy}") == plain
    assert facts(model_path=f"{other}") != plain
    assert facts(dtype="bfloat16")["dtype"] == "bfloat16"
    assert facts(quantization="fp8")["quantization"] == "fp8 of SGLang"
    first = facts(quantization_param_path=f"{scales}")["kv_scales"]
    scales.write_text('{"k": 3.0}')
    assert facts(quantization_param_path=f"{scales}")["kv_scales"] != first
    with pytest.raises(KVPlanError, match=r"^CONFIG: cannot read quantization_param_path 'none': expected a file"):
        facts(quantization_param_path="none")
    assert facts(load_format="safetensors") == plain
    dummy = facts(load_format="dummy", served_model_name="tiny")
    assert dummy == {**{key: plain[key] for key in plain if key != "weights"}, "model": "tiny", "load_format": "dummy"}
    assert facts(model_loader_extra_config='{"num_threads": 8}') == plain
    assert facts(model_loader_extra_config='{"k": 8}') == {**plain, "sglang.model_loader_extra_config.k": 8}
    assert facts(served_model_name="tiny") == plain
    assert facts(model_path=f"{nameless}", served_model_name="tiny")["model"] == "tiny"
    assert facts(lora_paths=[], weight_version="7") == plain
    assert changes.WEIGHTS.version == "7"


def test_what_an_operator_says(facts: Read) -> None:
    """A name and a fingerprint in place of the engine's, and facts that do not count."""
    names = SimpleNamespace(model="mine", weights="5f", ignored_facts=("config.*", "dtype"))
    assert facts(names) == {"model": "mine", "weights": "5f"}


def test_a_draft_counts_if_its_cache_moves(facts: Read, folder: Path, tmp_path: Path) -> None:
    """Its weights, its configuration, and what changes its values."""
    plain = facts()
    draft = changed(folder, tmp_path / "draft", num_hidden_layers=1)
    speculative: Facts = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": f"{draft}"}
    speculative |= {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    found = facts(**speculative)
    assert found.items() > plain.items()
    assert found["draft.method"] == "standalone"
    assert found["draft.weights"] == found["weights"]
    assert found["draft.config.num_hidden_layers"] == 1
    sized = facts(**speculative, speculative_draft_window_size=64, speculative_draft_sink_size=4)
    assert sized == {**found, "draft.window_size": 64, "draft.sink_size": 4}


# Weights that change

LOADS_NO_WEIGHTS = {
    "init_weights_update_group": "a group of processes",
    "destroy_weights_update_group": "a group of processes",
    "receive_weights_from_distributed": "what load_weights_from_distributed loads",
}


@pytest.fixture
def weights(facts: Read, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The version of the weights, whose changes SGLang's own methods tell."""
    facts()
    changes.hook_changes()
    fresh = changes.Weights()
    for name in ("token", "before", "is_changing", "is_named", "is_flushed"):
        monkeypatch.setattr(changes.WEIGHTS, name, getattr(fresh, name))
    return changes.WEIGHTS


def scheduler() -> Any:
    """What two methods of SGLang's scheduler read of it."""
    nothing = lambda *_, **__: None  # noqa: E731
    pool = SimpleNamespace(clear=nothing, reset_aux_cache_allocator=nothing)
    return SimpleNamespace(
        collect_inflight_reqs=set,
        waiting_queue=[],
        chunked_req=None,
        hisparse_coordinator=None,
        is_fully_idle=lambda **_: True,
        _engine_paused=False,
        tree_cache=SimpleNamespace(reset=nothing),
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=pool,
        grammar_manager=pool,
        metrics_reporter=SimpleNamespace(reset_metrics=nothing, is_stats_logging_rank=False),
        draft_worker=None,
    )


def test_each_way_to_change_weights_is_hooked(weights: Any) -> None:
    """A method that a release adds fails here."""
    methods = {name for name, each in vars(WeightUpdater).items() if callable(each) and not name.startswith("_")}
    hooked = {name for name in methods if hasattr(getattr(WeightUpdater, name), "__wrapped__")}
    assert methods - hooked == LOADS_NO_WEIGHTS.keys()
    for name in sorted(hooked - {"begin_weight_update", "end_weight_update"}):
        weights.name(f"before {name}")
        weights.flush()
        before = weights.version
        with pytest.raises((AttributeError, TypeError)):
            getattr(WeightUpdater, name)(None, None, None)
        assert not weights.is_known
        assert weights.version not in ("", before)


def test_a_version_counts_when_it_has_a_name_and_sglangs_own_cache_is_empty(weights: Any) -> None:
    """An update without a name is no other engine's, nor is one that keeps what other weights have computed."""
    assert weights.version == ""
    weights.change()
    first = weights.version
    Scheduler.record_weight_version_change(scheduler(), None)
    Scheduler.flush_cache(scheduler(), empty_cache=False)
    assert weights.version == first
    weights.change()
    assert weights.version != first
    Scheduler.record_weight_version_change(scheduler(), "2")
    assert not weights.is_known
    Scheduler.flush_cache(scheduler(), empty_cache=False)
    assert (weights.is_known, weights.version) == (True, "2")
    weights.change()
    Scheduler.record_weight_version_change(scheduler(), "2")
    Scheduler.flush_cache(scheduler(), empty_cache=False)
    assert not weights.is_known, "other weights under the same name"


@pytest.mark.parametrize("flushes, is_known", [(True, True), (False, False)])
def test_an_update_that_empties_the_cache(weights: Any, *, flushes: bool, is_known: bool) -> None:
    """SGLang's request says whether it does."""
    weights.change()
    Scheduler.record_weight_version_change(scheduler(), "3")
    updates = SimpleNamespace(flush_cache=lambda empty_cache: True)
    request = SimpleNamespace(flush_cache=flushes, torch_empty_cache=False)
    updates_module.SchedulerWeightUpdaterManager.flush_cache_after_weight_update(updates, request, True, "")
    assert weights.is_known == is_known


@pytest.mark.parametrize("is_named", [False, True])
def test_an_update_of_several_parts(weights: Any, *, is_named: bool) -> None:
    """Between its begin and its end there are weights of two versions."""
    weights.begin()
    if is_named:
        weights.change()
        Scheduler.record_weight_version_change(scheduler(), "4")
        Scheduler.flush_cache(scheduler(), empty_cache=False)
    assert not weights.is_known
    with pytest.raises(AttributeError):
        WeightUpdater.end_weight_update(None, run_post_load=not is_named)
    weights.end(loads_now=not is_named)
    assert weights.is_known == is_named


def test_adapters_are_known_by_their_content_when_sglang_loads_them(tmp_path: Path) -> None:
    """The plugin hooks SGLang's manager of adapters before the process of a scheduler loads any."""
    probe = (
        "import sglang.srt.managers.scheduler; from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.lora.lora_manager import LoRAManager as M\n"
        "print(*(hasattr(getattr(M, f'_load_lora_adapter{part}'), '__wrapped__') for part in ('', '_from_tensors')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(STANDINS)}
    run = subprocess.run([sys.executable, "-c", probe], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.split()[-2:] == ["True", "True"]
