"""The facts of a model: what its files state, with an engine's overrides, and what changes no cache."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from kvplan.describe.model import MAX_MODEL, model_text
from kvplan.errors import KVPlanError
from kvplan_nixl.identity import (
    HARMLESS_KEYS,
    config_facts,
    difference,
    digest_of,
    merged,
    processor_facts,
    short_model,
    stated_config,
    without,
)
from kvplan_nixl.serving.fingerprint import MAX_CONFIG_BYTES
from tests.serving.test_fingerprint import CONFIG


@pytest.mark.parametrize(
    "changes",
    [
        *({key: "another"} for key in HARMLESS_KEYS),
        {"torch_dtype": None, "dtype": "float32"},
        {"text_config": {"head_dim": 128, "dtype": "float16", "transformers_version": "5"}},
        {"text_config": {"head_dim": 128}},
        {"rope_theta": 500000},
    ],
)
def test_keys_that_change_no_cache_are_no_facts(changes: dict[str, Any]) -> None:
    """What saved or trained a model, or how a number is written, does not make it another."""
    assert config_facts({**CONFIG, **changes}) == config_facts(CONFIG)


@pytest.mark.parametrize(
    "changes, fact",
    [
        ({"rope_theta": 10000.0}, "config.rope_parameters.rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "config.rope_parameters.factor"),
        ({"architectures": ["MistralForCausalLM"]}, "config.architectures"),
        ({"sliding_window": 4096}, "config.sliding_window"),
        ({"text_config": {"head_dim": 64, "dtype": "bfloat16"}}, "config.text_config.head_dim"),
        (
            {"quantization_config": {"quant_method": "quark", "weight": {"dtype": "fp4"}}},
            "config.quantization_config.weight.dtype",
        ),
        ({"a key of a model to come": 1}, "config.a key of a model to come"),
    ],
)
def test_keys_that_change_a_cache_are_facts(changes: dict[str, Any], fact: str) -> None:
    """Positions, windows, code and quantization make another cache of the same weights."""
    before = config_facts(CONFIG)
    after = config_facts({**CONFIG, **changes})
    assert [name for name in after if after[name] != before.get(name)] == [fact]


def test_keys_of_quantization_count_under_any_name() -> None:
    """A dtype is harmless in a model's configuration, not where it says how layers are quantized."""
    first, second = ({"quantization_config": {"dtype": dtype}} for dtype in ("fp8", "fp4"))
    assert config_facts(first) != config_facts(second)


@pytest.mark.parametrize(
    "older, newer",
    [
        ({"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
        ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 1000000}}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4}},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
        ),
    ],
)
def test_rotary_embeddings_have_one_form(older: dict[str, Any], newer: dict[str, Any]) -> None:
    """Transformers has renamed their keys; files have either."""
    assert config_facts({"a": 1, **older}) == config_facts({"a": 1, **newer})


def test_a_file_with_both_forms_stays_as_it_is() -> None:
    """Which of them counts is for the engine to decide."""
    both = {"rope_theta": 1, "rope_parameters": {"rope_theta": 2}}
    assert config_facts(both) == {"config.rope_theta": 1, "config.rope_parameters.rope_theta": 2}


@pytest.mark.parametrize(
    "overrides, file",
    [
        ({"rms_norm_eps": 1e-3}, {**CONFIG, "rms_norm_eps": 1e-3}),
        ({"text_config": {"window": 8}}, {**CONFIG, "text_config": {"head_dim": 128, "window": 8}}),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2}},
            {**CONFIG, "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 2.0}},
        ),
    ],
)
def test_an_override_is_as_if_the_file_said_so(overrides: Any, file: Any) -> None:
    assert config_facts(merged(CONFIG, overrides)) == config_facts(file)


def test_a_difference_says_what_an_override_does() -> None:
    plain = {"a": 1, "b": {"c": 2}, "d": 3, "transformers_version": "5"}
    changed = {"a": 1.0, "b": {"c": True}, "e": None, "transformers_version": "6"}
    assert difference(changed, plain) == {"overrides.b.c": True, "overrides.d": None, "overrides.e": None}
    assert difference(plain, plain) == {}


def test_long_configurations_fit_an_offer() -> None:
    """Long lists and large mappings are digests, which differ where they do."""
    layers = {f"model.layers.{i}.q_proj": {"bits": 4} for i in range(5000)}
    config = {**CONFIG, "quantization_config": {"layers": layers}, "ignore": [f"layer{i}" for i in range(5000)]}
    facts = config_facts(config)
    assert len(model_text(facts)) < MAX_MODEL // 16
    layers["model.layers.7.q_proj"] = {"bits": 8}
    changed = config_facts(config)
    assert [name for name in facts if facts[name] != changed[name]] == ["config.quantization_config.layers"]


def test_keys_with_dots_are_no_paths() -> None:
    assert config_facts({"x": {"a.b": 1}}) != config_facts({"x": {"a": {"b": 1}}})


def test_what_is_no_json_is_its_text() -> None:
    """A configuration that an engine has made may have any values."""
    facts = config_facts({"a": float("inf"), "b": {3, 1}, "c": object, "d": {1: 2}, "e": 10**300})
    json.dumps(facts, allow_nan=False)
    assert facts["config.b"] == [1, 3]


def test_a_folder_states_its_configuration(tmp_path: Any) -> None:
    """Mistral's own file counts where there is no other; quantization may be in a file of its own."""
    assert stated_config(tmp_path) is None
    (tmp_path / "params.json").write_text('{"dim": 8}')
    assert stated_config(tmp_path) == {"dim": 8}
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert stated_config(tmp_path) == {"hidden_size": 8}
    (tmp_path / "hf_quant_config.json").write_text('{"quant_algo": "FP8"}')
    assert stated_config(tmp_path) == {"hidden_size": 8, "quantization_config": {"quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    assert stated_config(tmp_path) == {"quantization_config": {"bits": 4}}


def test_processors_count(tmp_path: Any) -> None:
    """How an image becomes the model's input is decided by files beside the weights."""
    assert processor_facts(tmp_path) == {}
    text = '{"max_pixels": 1280.0, "processor_class": "A", "image_mean": [0.5]}'
    (tmp_path / "preprocessor_config.json").write_text(text)
    assert processor_facts(tmp_path) == {
        "processor.preprocessor_config.max_pixels": 1280,
        "processor.preprocessor_config.image_mean": [0.5],
    }


@pytest.mark.parametrize("name", ["config.json", "params.json"])
@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b'{"a":' * 100_000, b"9" * 5000])
def test_a_broken_configuration_is_refused(tmp_path: Any, name: str, text: bytes) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(KVPlanError, match=f"^CONFIG: cannot read '.*{name}' of a model"):
        stated_config(tmp_path)


def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Any) -> None:
    """A file that is too long, a link to nothing, and a pipe, which could be read forever."""
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, MAX_CONFIG_BYTES + 1)
    with pytest.raises(KVPlanError, match=r"^CONFIG: .* at most 67108864 bytes, got 67108865$"):
        stated_config(tmp_path)
    path.unlink()
    path.symlink_to("gone")
    with pytest.raises(KVPlanError, match=r"^CONFIG: .*a link to a file that is gone"):
        stated_config(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(KVPlanError, match=r"^CONFIG: .* a regular file, got none$"):
        stated_config(tmp_path)


def test_an_operator_may_leave_facts_out() -> None:
    facts = {"config.a": 1, "config.b.c": 2, "weights": "5f"}
    assert without(facts, ["config.b.*", "unknown"]) == {"config.a": 1, "weights": "5f"}
    assert without(facts, []) == facts


def test_digests_are_the_same_everywhere() -> None:
    """Engines of several releases compare digests, so that a change of this one is a break."""
    facts = {"weights": "5f1a", "config.rope_theta": 10000}
    assert digest_of(facts) == digest_of(dict(reversed(facts.items())))
    assert short_model({**facts, "model": "llama"}).startswith("llama ")
    assert short_model(facts) == digest_of(facts) == "90a5749aee141c9e47b31af0539ba34e"
