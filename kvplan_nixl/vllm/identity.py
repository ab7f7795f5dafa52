"""The identity of a vLLM engine: the facts of :mod:`kvplan_nixl.identity`, from its configuration.

Each field of vLLM's configuration that can change a value in a cache is a fact, unless it has its
default. ``options.toml`` lists the fields that cannot, and those whose effect another fact has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from vllm.config import VllmConfig

from kvplan import KVPlanError
from kvplan.describe import model_text, model_values
from kvplan_nixl.identity import (
    HF_CONFIG,
    KEPT_WHOLE,
    MISTRAL_CONFIG,
    Facts,
    changes,
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
from kvplan_nixl.vllm.drafts import WITH_CACHE
from kvplan_nixl.weights import folder_of, weights_of

SAME_FILES: Final = ("auto", "hf", "safetensors", "instanttensor", "ipc_cache", "runai_streamer")
"""Formats that load the weights of the model's folder, whose fingerprint is a fact."""

NO_FACTS: Final = options_without_facts("kvplan_nixl.vllm")
"""Fields that are no facts, as CLASS.FIELD."""


def identity_of(config: VllmConfig, settings: ModelSettings, draft: str = "") -> Facts:
    """Return the facts that decide what is in the caches of an engine, as it starts.

    ``draft`` replaces vLLM's name of the model that drafts tokens, unless it is empty.

    It reads files, which takes seconds, and they may change later: call it once in each process.
    """
    model = config.model_config
    facts = _model_facts(model, config.load_config, model.hf_overrides, settings.weights)
    if settings.model:
        facts["model"] = settings.model
    facts["dtype"] = _dtype(model.dtype)
    for part in (model, config.cache_config, config.attention_config, config.mamba_config, config):
        facts.update(_field_facts(part))
    for part in (config.diffusion_config, model.multimodal_config):
        if part is not None:
            facts.update(_field_facts(part))
    if model.multimodal_config is not None:
        option = "mm_encoder_fp8_scale_path"
        path = getattr(model.multimodal_config, option)
        facts.update(file_facts("mm_encoder_fp8_scales", option, path))
    if config.lora_config is not None:
        facts.update(_field_facts(config.lora_config))
        if config.lora_config.lora_dtype not in ("auto", model.dtype):
            facts["lora_dtype"] = _dtype(config.lora_config.lora_dtype)
    facts.update(_length_facts(model))
    facts.update(_draft_facts(config, draft))
    return without(facts, settings.ignored_facts)


def check_models(started: Facts, models: Iterable[str]) -> None:
    """Refuse an engine whose files have changed between the start of its scheduler and its workers.

    Raises ``MODEL``.
    """
    own = model_text(started)
    for model in models:
        if model != own:
            expected, got = model_values(own, model)
            raise KVPlanError(
                "MODEL",
                "start an engine",
                expected=f"{expected} (its scheduler)",
                got=f"{got} (one of its workers)",
                hint="the model's files have changed while it started: start it again",
            )


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _model_facts(model: Any, load: Any, overrides: Any, weights: str = "") -> Facts:
    facts = Facts()
    loaded = model.model_weights or model.model
    folder = folder_of(model.model, model.revision)
    if load.load_format not in SAME_FILES:
        facts["load_format"] = str(load.load_format)
    facts.update(_field_facts(load))
    if weights:
        facts["weights"] = weights
    elif load.load_format == "dummy":
        facts["weights"] = "dummy"
    else:
        facts["weights"] = weights_of(loaded, model.revision)
        if facts["weights"] in ("unknown", model.revision):
            facts["model"] = loaded
    configured = _config_facts(model, overrides)
    facts.update(configured)
    if folder is not None:
        facts.update(processor_facts(folder))
    is_quantized = any(f"config.{key}" in name for name in configured for key in KEPT_WHOLE)
    if model.quantization and not is_quantized:
        facts["quantization"] = str(model.quantization)
    return facts


def _config_facts(model: Any, overrides: Any) -> Facts:
    """Return the facts of a configuration with its overrides.

    An override counts as part of the file if vLLM reads such a file to the same configuration. It
    does not, for instance, where reading renames a key. Then the override's effect is the fact.
    """
    folder = folder_of(model.hf_config_path or model.model, model.revision)
    name = MISTRAL_CONFIG if _is_mistral(model, folder) else HF_CONFIG
    stated = None if folder is None else stated_config(folder, name)
    # a configuration that is in no folder here is as vLLM has made it
    if folder is None or stated is None:
        return config_facts(model.hf_config.to_dict())
    if not overrides:
        return config_facts(stated)
    read = _read(folder, model, overrides)
    plain = _read(folder, model, {})
    if read is not None:
        # what was given, or what a function has changed, as if the file had it
        texts = [] if callable(overrides) else [overrides]
        texts += [] if plain is None else [changes(read, plain)]
        for text in texts:
            new = merged(stated, text)
            with folder_with(folder, name, new) as other:
                if _read(other, model, {}) == read:
                    return config_facts(new)
    effect = difference(read or model.hf_config.to_dict(), plain or stated)
    return {**config_facts(stated), **effect}


def _read(folder: Path, model: Any, overrides: Any) -> dict[str, Any] | None:
    """Read a configuration as ``ModelConfig.__post_init__`` does, None if vLLM cannot read it."""
    from vllm.transformers_utils.config import get_config

    texts: dict[str, Any] = {}
    mappings: dict[str, Any] = {}
    if not callable(overrides):
        texts = {key: value for key, value in overrides.items() if not isinstance(value, dict)}
        mappings = {key: value for key, value in overrides.items() if isinstance(value, dict)}
    try:
        config = get_config(
            str(folder),
            model.trust_remote_code,
            code_revision=model.code_revision,
            config_format=model.config_format,
            hf_overrides_kw=texts,
            hf_overrides_fn=overrides if callable(overrides) else None,
        )
        model._apply_dict_overrides(config, mappings)
    except Exception:  # an override may be what makes a file readable at all
        return None
    read: dict[str, Any] = config.to_dict()
    return {key: value for key, value in read.items() if key != "_name_or_path"}


def _is_mistral(model: Any, folder: Path | None) -> bool:
    """Decide as ``get_config`` of vLLM does whether a configuration is in Mistral's format."""
    from vllm.transformers_utils.repo_utils import is_mistral_model_repo

    kind = str(getattr(model.config_format, "value", model.config_format))
    if kind != "auto" or folder is None:
        return kind == "mistral"
    has_file = Path(folder, MISTRAL_CONFIG).is_file()
    return has_file and bool(is_mistral_model_repo(model_name_or_path=str(folder), revision=None))


def _length_facts(model: Any) -> Facts:
    """Return the facts that the longest request decides, of the models that ask for it.

    ``Phi3LongRoPEScaledRotaryEmbedding`` and ``Llama4ForCausalLM`` in vllm/model_executor.
    """
    facts = Facts()
    text_config = model.hf_text_config
    is_long = is_long_rope(text_config, model.max_model_len)
    if is_long is not None:
        facts["rope.is_long"] = is_long
    if str(getattr(text_config, "model_type", "")).startswith("llama4"):
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        is_default = model.max_model_len > 32768
        facts["attn_temperature_tuning"] = generation.get("attn_temperature_tuning", is_default)
    return facts


def _draft_facts(config: VllmConfig, name: str) -> Facts:
    speculative: Any = config.speculative_config
    if speculative is None or speculative.method not in WITH_CACHE:
        return {}
    facts = {"method": str(speculative.method), **_field_facts(speculative)}
    draft = speculative.draft_model_config
    # a draft in the model's own files, and weights, has their facts
    if draft.model != config.model_config.model:
        load = speculative.draft_load_config or config.load_config
        # its overrides are what vLLM makes of the model's, which are facts of the model
        facts.update(_model_facts(draft, load, {}))
        if name:
            facts["model"] = name
    return {f"draft.{name}": value for name, value in facts.items()}


def _field_facts(config: Any) -> Facts:
    """Return the fields of a configuration that are facts, unless they have their defaults."""
    facts = Facts()
    for field in dataclasses.fields(config):
        if f"{type(config).__name__}.{field.name}" in NO_FACTS:
            continue
        value = getattr(config, field.name, None)
        if not _is_default(field, value):
            is_plain = not dataclasses.is_dataclass(value)
            given = value if is_plain else dataclasses.asdict(value)  # type: ignore[arg-type]
            facts.update(option_facts(field.name, given))
    return facts


def _is_default(field: Any, value: Any) -> bool:
    default = field.default
    if hasattr(default, "get_default"):  # of pydantic
        default = default.get_default(call_default_factory=True)
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return bool(value == default)
