"""Identity: the facts that decide what is in a cache, as an engine runs its model.

Two engines may share a cache if every number in it comes out the same on both. Some of it comes
with each request: tokens, a LoRA adapter, images. The rest is decided when the engine
starts, and later by updates of its weights. The identity is a mapping of these facts, names to JSON
values:

==========================  ======================================================================
``weights``                 a fingerprint of the tensors, and of Python code in their folder
``config.KEY``              the model's ``config.json``, key by key, with the engine's overrides
``processor.FILE.KEY``      how images, audio and videos become inputs of the model
``dtype``, ``quantization`` options of the engine that change values, where the files do not say so
``draft.FACT``              the same of a model that drafts tokens, if its layers have a cache
``model``                   a name, where the operator gives one, or weights have no fingerprint
``weights_version``         since when other weights than those of the files are loaded
==========================  ======================================================================

The configuration is read as *the file states it*. What a library makes of the file (defaults, keys
renamed, numbers padded) depends on its version, and engines of two versions run the same model. An
override counts as if it were in the file: an engine with ``rope_theta`` in its ``config.json`` and
one that was started with the same value as an override are the same model. Engines read overrides
in their own ways, so a bridge compares two configurations: the file read with the overrides next to
it, and a file that has them in it. Where they differ, the effect of the override is a fact.

What may differ harmlessly has no fact: parallel sizes, blocks, memory, scheduling, kernels, limits
of length, and names. :data:`HARMLESS_KEYS` are those of a ``config.json``, and the ``options.toml``
of each connector lists the harmless options of its engine, with a reason for each. What is not
listed is a fact.

A worker has the facts as its model (:class:`kvplan.Worker`), so a handshake names those that
differ, with both values. A handoff has the version of the weights, since that may change after the
handshake. A store's keys have the digest of all facts, so a difference is a miss there. An operator
who knows that a fact is harmless names it in the setting ``ignored_facts``, on both engines.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib import resources
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final

from kvplan import KVPlanError
from kvplan_nixl.serving.fingerprint import read_config

Facts = dict[str, Any]
"""Names of facts, and JSON values."""

DIGEST_BYTES: Final = 16

MAX_VALUE: Final = 200
"""Characters of a value in a fact. A longer one is replaced by its digest."""

MAX_KEYS: Final = 64
"""Keys of a nested mapping that are separate facts. More of them are one fact."""

HF_CONFIG: Final = "config.json"
MISTRAL_CONFIG: Final = "params.json"

HARMLESS_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "_name_or_path": "the folder or repository that it was loaded from, before it was saved",
        "_commit_hash": "the revision of that repository",
        "transformers_version": "the version that wrote the file",
        "torch_dtype": "the dtype of the weights, which their fingerprint has; activations have "
        "the engine's dtype, which is a fact",
        "dtype": "the new name of torch_dtype",
        "use_cache": "trainers switch it off; an engine has a cache either way",
        "_attn_implementation": "an engine has its own attention",
        "_attn_implementation_autoset": "the same",
        "bos_token_id": "a token's number; requests have their tokens",
        "eos_token_id": "it ends an answer, and changes no token of it",
        "max_new_tokens": "of generation",
        "do_sample": "of generation",
        "temperature": "of generation",
        "top_k": "of generation",
        "top_p": "of generation",
        "repetition_penalty": "of generation",
        "output_attentions": "what a library returns",
        "output_hidden_states": "what a library returns",
        "return_dict": "what a library returns",
        "id2label": "names of classes",
        "label2id": "names of classes",
        "attention_dropout": "of training",
        "attn_dropout": "of training",
        "embd_dropout": "of training",
        "embd_pdrop": "of training",
        "hidden_dropout": "of training",
        "resid_pdrop": "of training",
        "resid_dropout": "of training",
        "attn_pdrop": "of training",
        "initializer_range": "of training",
        "router_aux_loss_coef": "of training",
        "aux_loss_alpha": "of training",
        "gradient_checkpointing": "of training",
    }
)
"""Keys of a model's configuration, and of those that it nests, which change no cache; and why."""

KEPT_WHOLE: Final = ("quantization_config", "compression_config")
"""Mappings whose keys are no configuration's: there ``dtype`` and others of these names count."""

QUANTIZATION_FILES: Final = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files that say how weights are quantized, where ``config.json`` does not."""

PROCESSOR_FILES: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of the processors of images, audio and videos. Requests know an input by its raw bytes."""

HARMLESS_PROCESSOR_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "processor_class": "the name of a Python class, which wraps the processor",
        "_valid_processor_keys": "names of arguments",
        "auto_map": "code of the folder, which has a fingerprint",
    }
)


def stated_config(folder: Path | str, file: str = "") -> dict[str, Any] | None:
    """Return a model's configuration as its folder states it, None where the folder has none.

    It is read from ``file``, by default from ``config.json`` or Mistral's ``params.json``. Some
    folders describe the quantization in another file, which is added. Raises ``CONFIG`` for a file
    that cannot be read.
    """
    config = None
    for name in (file,) if file else (HF_CONFIG, MISTRAL_CONFIG):
        path = Path(folder, name)
        if os.path.lexists(path):
            config = read_config(path)
            break
    if config is None or any(config.get(key) for key in KEPT_WHOLE):
        return config
    for name in QUANTIZATION_FILES:
        path = Path(folder, name)
        if os.path.lexists(path):
            return {**config, "quantization_config": read_config(path)}
    return config


def processor_facts(folder: Path | str) -> Facts:
    """Return the facts of the processors in a model's folder: none of a model for text alone."""
    facts = Facts()
    for name in PROCESSOR_FILES:
        path = Path(folder, name)
        if os.path.lexists(path):
            values = _without(read_config(path), HARMLESS_PROCESSOR_KEYS)
            prefix = f"processor.{name.removesuffix('.json')}"
            facts.update(_flat(prefix, values))
    return facts


def file_facts(fact: str, option: str, path: str | None) -> Facts:
    """Return a digest of the file that an engine's option names, as a fact: none without a path.

    Raises ``CONFIG`` for a file that cannot be read.
    """
    if not path:
        return {}
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        action = f"read {option} {path!r}"
        raise KVPlanError("CONFIG", action, expected="a file", got=f"{error}") from None
    return {fact: hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()}


@contextmanager
def folder_with(folder: Path, name: str, config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a folder with another configuration in the file ``name``, and links to all else."""
    with TemporaryDirectory() as other:
        for path in folder.iterdir():
            if path.name != name:
                os.symlink(path.resolve(), Path(other, path.name))
        Path(other, name).write_text(json.dumps(config))
        yield Path(other)


def is_long_rope(text_config: Any, max_length: int) -> bool | None:
    """Return whether an engine's longest request has LongRoPE's factors for long ones.

    None: the model has no LongRoPE.
    """
    rope: Any = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    key = "original_max_position_embeddings"
    return bool(max_length > (rope.get(key) or getattr(text_config, key, 0)))


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with overrides in it, as if the file had them.

    Overrides of a nested configuration change the keys that they have; other mappings are replaced.
    New parameters of rotary embeddings replace all old ones, which a file may have under older
    names.

    >>> merged({"rope_theta": 1, "text_config": {"a": 1, "b": 2}}, {"text_config": {"a": 3}})
    {'rope_theta': 1, 'text_config': {'a': 3, 'b': 2}}
    >>> merged({"rope_theta": 1, "n": 2}, {"rope_parameters": {"rope_theta": 5}})
    {'n': 2, 'rope_parameters': {'rope_theta': 5}}
    """
    new = dict(config)
    if "rope_parameters" in overrides:
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            new.pop(key, None)
    for key, value in overrides.items():
        old = new.get(key)
        if _is_nested(key) and isinstance(value, Mapping) and isinstance(old, Mapping):
            new[key] = merged(old, value)
        else:
            new[key] = value
    return new


def config_facts(config: Mapping[str, Any], prefix: str = "config") -> Facts:
    """Return the facts of a model's configuration, each key of a nested one by its path.

    >>> config_facts({"model_type": "llama", "rope_theta": 1e4, "use_cache": True, "dtype": "half"})
    {'config.model_type': 'llama', 'config.rope_parameters.rope_theta': 10000}
    """
    return _flat(prefix, _in_one_form(_without_harmless(config)))


def option_facts(name: str, value: Any) -> Facts:
    """Return the facts of an option of an engine: one, or one for each key of a mapping.

    >>> option_facts("mm_processor_kwargs", {"max_pixels": 1280.0})
    {'mm_processor_kwargs.max_pixels': 1280}
    """
    return _flat(name, {"": value}) if not isinstance(value, Mapping) else _flat(name, value)


def options_without_facts(package: str) -> frozenset[str]:
    """Return the options of an engine that are no facts, by the ``options.toml`` of its package."""
    tables = tomllib.loads(resources.files(package).joinpath("options.toml").read_text("utf-8"))
    return frozenset(" ".join(chain.from_iterable(map(dict.values, tables.values()))).split())


def changes(changed: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides that make one configuration of another, as far as overrides can.

    >>> changes({"a": 1, "b_config": {"c": 2, "d": 3}}, {"a": 1, "b_config": {"c": 2, "d": 4}})
    {'b_config': {'d': 3}}
    """
    overrides = {}
    for key, value in changed.items():
        old = plain.get(key)
        if _is_nested(key) and isinstance(value, Mapping) and isinstance(old, Mapping):
            nested = changes(value, old)
            overrides.update({key: nested} if nested else {})
        elif key not in plain or _text(_canonical(old)) != _text(_canonical(value)):
            overrides[key] = value
    return overrides


def difference(changed: Mapping[str, Any], plain: Mapping[str, Any]) -> Facts:
    """Return the keys of a configuration that differ from those of a plain one, by path.

    They are the effect of an override that is Python code, or that the engine reads in another way
    than the same key of a file. A key that it removes is null.

    >>> difference({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 2, "d": 4}})
    {'overrides.b.d': 3}
    """
    changed_facts, plain_facts = (
        _flat("overrides", _without_harmless(config)) for config in (changed, plain)
    )
    return {
        key: changed_facts.get(key)
        for key in sorted(changed_facts.keys() | plain_facts.keys())
        if key not in changed_facts
        or key not in plain_facts
        or _text(changed_facts[key]) != _text(plain_facts[key])
    }


def without(facts: Facts, patterns: Iterable[str]) -> Facts:
    """Return the facts that no pattern names. ``*`` in a pattern stands for any text.

    >>> without({"config.a": 1, "config.b": 2, "weights": "5f"}, ["config.*"])
    {'weights': '5f'}
    """
    patterns = tuple(patterns)
    return {
        name: value
        for name, value in facts.items()
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def digest_of(facts: Mapping[str, Any]) -> str:
    """Return 32 hexadecimal digits that are equal for equal facts.

    >>> digest_of({"weights": "5f1a", "dtype": "bfloat16"})
    '77c487046ab6f62ca0faf5c5a24cb0e4'
    """
    return hashlib.blake2b(_text(dict(facts)).encode(), digest_size=DIGEST_BYTES).hexdigest()


def short_model(facts: Mapping[str, Any]) -> str:
    """Return the model's text for a store, whose files repeat it: the digest, after a name if any.

    >>> short_model({"model": "llama"}) == "llama " + digest_of({"model": "llama"})
    True
    """
    name = facts.get("model")
    digest = digest_of(facts)
    return f"{name} {digest}" if isinstance(name, str) and name.isprintable() else digest


FIRST_WEIGHTS: Final = "default"
"""Engines' name for the version of the weights that they started with."""


def _without_harmless(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = _without(config, HARMLESS_KEYS)
    for key, value in kept.items():
        if isinstance(value, Mapping) and _is_nested(key):
            kept[key] = _without_harmless(value)
    return kept


def _in_one_form(config: Mapping[str, Any]) -> dict[str, Any]:
    new = dict(config)
    for key, value in new.items():
        if isinstance(value, Mapping) and _is_nested(key):
            new[key] = _in_one_form(value)
    return _with_rope_parameters(new)


def _is_nested(key: str) -> bool:
    return key.endswith("_config") and key not in KEPT_WHOLE


def _without(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def _with_rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with ``rope_theta`` and ``rope_scaling`` as ``rope_parameters``.

    Transformers has renamed them, so files of one model have either. Parameters by kind of layer,
    and files that have both, stay as they are.
    """
    scaling = config.get("rope_scaling")
    parameters = config.get("rope_parameters")
    if scaling is None:
        config.pop("rope_scaling", None)
    if parameters is None:
        if not isinstance(scaling, Mapping | None):
            return config
        parameters = dict(scaling or {})
        if "rope_theta" in config:
            parameters.setdefault("rope_theta", config["rope_theta"])
    elif scaling is not None or "rope_theta" in config or not isinstance(parameters, Mapping):
        return config
    parameters = dict(parameters)
    # the older name of rope_type
    kind = parameters.pop("type", None)
    if parameters.get("rope_type", kind) != kind and kind is not None:
        parameters["type"] = kind
    elif kind is not None:
        parameters["rope_type"] = kind
    if parameters.get("rope_type") == "default":
        del parameters["rope_type"]
    others = {
        key: value
        for key, value in config.items()
        if key not in ("rope_theta", "rope_scaling", "rope_parameters")
    }
    return {**others, "rope_parameters": parameters} if parameters else others


def _flat(path: str, value: Any) -> Facts:
    return dict(_walk(path, value))


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if _has_paths(value):
        for key, each in value.items():
            yield from _walk(f"{path}.{key}" if key else path, each)
        return
    yield path, _brief(_canonical(value))


def _has_paths(value: Any) -> bool:
    """Return whether each value of a mapping is a separate fact."""
    if not isinstance(value, Mapping) or not 0 < len(value) <= MAX_KEYS:
        return False
    # a key with a dot could be mistaken for a path
    return all(isinstance(key, str) and "." not in key for key in value)


def _canonical(value: Any) -> Any:
    """Return the JSON form of a value: whole numbers are integers, unknown types their text."""
    match value:
        case float() if value.is_integer() and abs(value) < 1 << 53:
            return int(value)
        case float() if value != value or abs(value) == float("inf"):
            return repr(value)
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(key): _canonical(each) for key, each in value.items()}
        case list() | tuple():
            return [_canonical(each) for each in value]
        case set() | frozenset():
            return sorted((_canonical(each) for each in value), key=_text)
    return str(value)


def _brief(value: Any) -> Any:
    """Return a value, or its kind and digest if its text is long."""
    text = _text(value)
    if len(text) <= MAX_VALUE:
        return value
    kind = "a mapping" if isinstance(value, dict) else f"a {type(value).__name__}"
    return f"{kind} of {len(text)} characters, digest {digest_of({'': value})}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
