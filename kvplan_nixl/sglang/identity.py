"""The identity of an SGLang engine: the facts of :mod:`kvplan_nixl.identity`, which vLLM's has too.

They are read from the model's folder with ``--json-model-override-args``, from the dtype of
activations, and from each option of ``ServerArgs`` that can change a value in a cache: it is the
fact ``sglang.NAME``, unless it has its default. ``options.toml`` lists the options that cannot, and
those whose effect another fact has.

What changes while the engine runs is in :mod:`kvplan_nixl.sglang.changes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.runtime_context import (
    get_server_args,
    get_serving,
    get_spec,
    process_model_config,
)

from kvplan_nixl.identity import (
    HF_CONFIG,
    KEPT_WHOLE,
    Facts,
    config_facts,
    difference,
    file_facts,
    folder_with,
    is_long_rope,
    merged,
    option_facts,
    options_without_facts,
    processor_facts,
    stated_config,
    without,
)
from kvplan_nixl.settings import ModelSettings
from kvplan_nixl.weights import folder_of, weights_of

FOREIGN_FORMATS: Final = ("dummy", "private", "remote", "remote_instance")
"""Values of ``load_format`` for which weights come from elsewhere than the model's folder."""

READ_FORMATS: Final = (
    "auto",
    "fastsafetensors",
    "instanttensor",
    "layered",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "safetensors",
)
"""Values of ``load_format`` for which the tensors of the folder are those that run."""

THREADS: Final = ("enable_multithread_load", "num_threads")
"""Keys of ``model_loader_extra_config`` that say how fast weights are read."""

NO_FACTS: Final = options_without_facts("kvplan_nixl.sglang")
"""Options that are no facts."""


def facts_of(names: ModelSettings, *, has_draft_cache: bool = False) -> Facts:
    """Return the facts that decide what is in the caches of this engine, as it starts.

    A draft counts if its cache moves with that of the model. Files are read, which takes seconds,
    and they may change later: call this once in each process.
    """
    arguments = get_server_args()
    config = process_model_config()
    overrides = json.loads(arguments.json_model_override_args)
    facts = _model_facts(config, arguments.load_format, overrides, names.weights)
    is_quantized = any(f"config.{key}" in fact for fact in facts for key in KEPT_WHOLE)
    if arguments.quantization and not is_quantized:
        # Each engine has a way of its own to quantize weights that are not.
        facts["quantization"] = f"{arguments.quantization} of SGLang"
    if names.model:
        facts["model"] = names.model
    facts["dtype"] = f"{config.dtype}".removeprefix("torch.")
    path = arguments.quantization_param_path
    facts.update(file_facts("kv_scales", "quantization_param_path", path))
    for field in record_fields(type(arguments)):
        value = getattr(arguments, field.name)
        if field.name not in NO_FACTS and value != field.default:
            facts.update(option_facts(f"sglang.{field.name}", value))
    loader = without(json.loads(arguments.model_loader_extra_config or "{}"), THREADS)
    if loader:
        facts.update(option_facts("sglang.model_loader_extra_config", loader))
    facts.update(_length_facts(config))
    if has_draft_cache:
        facts.update(_draft_facts(config, overrides))
    return without(facts, names.ignored_facts)


def _model_facts(config: Any, load_format: str, overrides: Any, weights: str = "") -> Facts:
    facts = Facts()
    folder = folder_of(config.model_path, config.revision)
    is_read = load_format in READ_FORMATS
    if not is_read:
        facts["load_format"] = str(load_format)
    if weights:
        facts["weights"] = weights
    elif load_format not in FOREIGN_FORMATS:
        facts["weights"] = weights_of(config.model_path, config.revision)
    if facts.get("weights") in (None, "unknown", config.revision):
        facts["model"] = get_serving().served_model_name
    stated = None if folder is None else stated_config(folder)
    if folder is None or stated is None:
        facts.update(config_facts(config.hf_config.to_dict()))
        return facts
    facts.update(_config_facts(config, folder, stated, overrides))
    facts.update(processor_facts(folder))
    return facts


def _config_facts(config: Any, folder: Path, stated: dict[str, Any], overrides: Any) -> Facts:
    """Return the facts of a configuration with its overrides.

    An override counts as part of the file if SGLang reads such a file to the same configuration.
    It does not where it sets a key that SGLang does not read, such as one that reading renames.
    Then the override's effect is the fact.
    """
    if not overrides:
        return config_facts(stated)
    new = with_overrides(stated, overrides)
    changed = _read(config, folder, overrides)
    with folder_with(folder, HF_CONFIG, new) as other:
        if changed == _read(config, other, {}):
            return config_facts(new)
    return {**config_facts(stated), **difference(changed, _read(config, folder, {}))}


def with_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with overrides in it, as SGLang reads both.

    Parameters of rotary embeddings are added to those of the file, of which transformers makes one
    mapping (``get_config`` of sglang/srt/utils/hf_transformers/config.py).

    >>> file = {"rope_theta": 1e6, "rope_scaling": None}
    >>> with_overrides(file, {"rope_scaling": {"rope_type": "yarn", "factor": 4}})
    {'rope_parameters': {'rope_theta': 1000000.0, 'rope_type': 'yarn', 'factor': 4}}
    """
    new = dict(overrides)
    for key in ("rope_scaling", "rope_parameters"):
        value = new.pop(key, None)
        if isinstance(value, Mapping):
            theta = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
            old = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
            new["rope_parameters"] = {**theta, **old[0], **old[1], **value}
    return merged(config, new)


def _read(config: Any, folder: Path, overrides: Any) -> dict[str, Any]:
    from sglang.srt.utils.hf_transformers.config import get_config

    # ``ModelConfig`` reads remote code too, unless it is told not to
    read = get_config(
        f"{folder}",
        trust_remote_code=get_server_args().trust_remote_code,
        model_override_args=overrides,
        model_config_parser=config.model_config_parser,
    )
    facts: dict[str, Any] = read.to_dict()
    facts.pop("_name_or_path", None)
    return _without_type(facts)


def _without_type(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the older name of ``rope_type``, which SGLang adds."""
    new = {}
    for key, value in config.items():
        if key != "type" or "rope_type" not in config:
            new[key] = _without_type(value) if isinstance(value, Mapping) else value
    return new


def _length_facts(config: Any) -> Facts:
    """Return the facts that the longest request decides, of the models that ask for it.

    ``Phi3LongRoPEScaledRotaryEmbedding`` of sglang/srt/layers/rotary_embedding takes the factors of
    long requests where one of a batch is long, and vLLM where the engine accepts long ones.
    """
    facts = Facts()
    text_config = config.hf_text_config
    is_long = is_long_rope(text_config, config.context_len)
    if is_long is not None:
        facts["rope.is_long"] = "by batch" if is_long else False
    if f"{getattr(text_config, 'model_type', '')}".startswith("llama4"):
        facts["attn_temperature_tuning"] = bool(text_config.attn_temperature_tuning)
    return facts


def _draft_facts(config: Any, overrides: Any) -> Facts:
    arguments = get_server_args()
    # as SGLang has resolved them: a draft in the model's own files has their path
    spec = get_spec()
    path = spec.speculative_draft_model_path
    is_own = path in (None, config.model_path)
    facts: Facts = {"method": "mtp" if is_own else f"{spec.speculative_algorithm}".lower()}
    if not is_own:
        from sglang.srt.configs.model_config import ModelConfig

        revision = spec.speculative_draft_model_revision
        draft = ModelConfig.from_server_args(arguments, path, revision, is_draft_model=True)
        load_format = arguments.speculative_draft_load_format or arguments.load_format
        facts.update(_model_facts(draft, load_format, overrides))
    options = {
        "quantization": arguments.speculative_draft_model_quantization,
        "window_size": arguments.speculative_draft_window_size,
        "sink_size": arguments.speculative_draft_sink_size,
    }
    facts.update({name: value for name, value in options.items() if value is not None})
    return {f"draft.{name}": value for name, value in facts.items()}
