"""MODEL on the command line: a shipped name, a config.json, sizes, or offers of two engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import integer
from kvplan._text import meant
from kvplan.cli.defaults import items_of
from kvplan.describe import Worker
from kvplan.errors import KVPlanError
from kvplan.handshake import decode
from kvplan.models import Model

MAX_TOKENS: Final = 1 << 24
"""The last position of a request, plus one, is at most this."""

ENGINE_IDS: Final = ("src", "dst")

BITS: Final[Mapping[int, tuple[Any, ...]]] = MappingProxyType(
    {8: (8,), 4: (4, "float8_e4m3fn", 16)}
)
"""Arguments of :meth:`Model.quantized` for each value of ``--bits``: 8 bits, and NVFP4."""

MODEL_FORMS: Final = "a config.json or its directory, or sizes: layers=40,kv_heads=10,head_dim=128"
"""The forms of MODEL on the command line, beside a shipped name."""


def quantize_model(model: Model, bits: int) -> Model:
    """Return the model with K and V quantized to ``bits``, a key of :data:`BITS`."""
    return model.quantized(*BITS[bits])


@attrs.frozen
class EngineViews:
    """The workers of two engines, ``src`` and ``dst``, from a file of their offers.

    Such a file, which ``kvplan explain --json`` writes, stands for a model that kvplan cannot read.
    """

    workers: Mapping[str, tuple[Worker, ...]]

    @classmethod
    def of(cls, offers: Any) -> EngineViews:
        """Return the engines that offers describe, which are lists by engine.

        Raises ``CONFIG`` if one engine has no list, and what ``decode`` raises.
        """
        by_engine = offers if isinstance(offers, dict) else {}
        if not all(isinstance(by_engine.get(name), list) for name in ENGINE_IDS):
            expected = "a list of offers for each of src and dst"
            got = f"{type(offers).__name__}"
            raise KVPlanError("CONFIG", "load offers", expected=expected, got=got)
        workers = {}
        for name in ENGINE_IDS:
            workers[name] = tuple(decode(json.dumps(offer).encode()) for offer in by_engine[name])
        return cls(workers)


def load(model: str, bits: str | None = None, like: str | None = None) -> Model:
    """Return the model of a shipped name, of a config.json or its directory, or of sizes.

    ``bits`` quantizes it. A file of an unknown type is read as one of the type ``like``. Raises
    ``CONFIG``.

    >>> print(load("layers=40,kv_heads=10,head_dim=128,window=4096"))
    layers=40,kv_heads=10,head_dim=128,window=4096: 40 layers, bfloat16, groups attn
    """
    return model_only(load_engines(model, bits, like), model)


def model_only(loaded: Model | EngineViews, name: str) -> Model:
    """Return what was loaded, which must be a model. Raises ``CONFIG`` for offers."""
    if isinstance(loaded, EngineViews):
        expected = "a model, since this command changes its engines"
        got = f"{name!r}: offers"
        raise KVPlanError("CONFIG", "load a model", expected=expected, got=got, model=name)
    return loaded


def load_engines(
    model: str,
    bits: str | None = None,
    like: str | None = None,
) -> Model | EngineViews:
    """Return the model, or the engines in a file with the key ``offers``, which takes no ``bits``.

    Raises ``CONFIG``.
    """
    if bits is not None:
        return quantize_model(load(model, None, like), int(bits))
    # a shipped name counts before a file of that name
    if model in Model.names():
        _check_no_like(model, like)
        return Model.shipped(model)
    path = Path(model)
    # a file may have = in its name
    if "=" in model and not path.exists():
        _check_no_like(model, like)
        return _load_sizes(model)
    if path.is_dir():
        path = Path(model, "config.json")
    try:
        config = json.loads(path.read_bytes())
        if isinstance(config, dict) and "offers" in config:
            _check_no_like(model, like)
            return EngineViews.of(config["offers"])
        # ModelOpt states the dtype of the cache in a file beside that of the model
        beside = path.with_name(path.name.replace("config.json", "hf_quant_config.json"))
        has_two = beside != path and beside.is_file()
        quantization = json.loads(beside.read_bytes()) if has_two else None
        return Model.from_config(config, model, like=like, quantization=quantization)
    except KVPlanError as error:
        raise error.in_file(f"{path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _cannot_load(model, error) from None


def _check_no_like(model: str, like: str | None) -> None:
    """Raise ``CONFIG`` if a model whose cache is known is to be read as one of another type."""
    if like is not None:
        action = f"read a model like {like!r}"
        expected = "the config.json of an unknown type"
        raise KVPlanError("CONFIG", action, expected=expected, got=repr(model), model=model)


def _cannot_load(model: str, error: Exception) -> KVPlanError:
    """Return the error for a model that could not be read, perhaps a mistyped name."""
    missing = isinstance(error, FileNotFoundError)
    reason = "no such file" if missing else getattr(error, "strerror", None) or str(error)
    got = f"{model!r}: {reason}"
    hint = ""
    # a text that is no path of a file is probably a mistyped name
    if missing and not model.endswith(".json"):
        if "/" not in model:
            got = repr(model)
        similar = meant(model.rpartition("/")[2], Model.names())
        hint = f"{similar} 'kvplan models' lists all".strip()
    expected = f"a shipped model, {MODEL_FORMS}"
    return KVPlanError("CONFIG", "load a model", expected=expected, got=got, hint=hint, model=model)


def _load_sizes(text: str) -> Model:
    """Return a model that keeps K and V of each head, of its sizes.

    The number of query ``heads`` only matters to the rules of engines.
    """
    # our short names of keys of a config.json
    required = {
        "layers": "num_hidden_layers",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
    }
    optional = {"window": "sliding_window", "heads": "num_attention_heads"}
    values = items_of(text)
    if not {*required} <= {*values} <= {*required, *optional}:
        expected = f"each of {', '.join(required)}, and maybe {' and '.join(optional)}"
        got = ", ".join(values)
        action = "read the sizes of a model"
        raise KVPlanError("CONFIG", action, expected=expected, got=got, model=text)
    # of the two families that keep K and V of each head, one has a window
    config: dict[str, Any] = {"model_type": "mistral" if "window" in values else "llama"}
    config_keys = required | optional
    for key, value in values.items():
        config[config_keys[key]] = read_decimal(value, f"{key} of the model", 1, MAX_TOKENS)
    return Model.from_config(config, text)


def read_decimal(text: str, subject: str, low: int, high: int) -> int:
    """Return the integer in ``[low, high)`` that ``text`` writes in ASCII digits.

    Raises ``TYPE`` or ``RANGE``.
    """
    # int() would read underscores, signs, spaces and digits of any script
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        expected = "an integer in decimal digits"
        got = repr(text)
        raise KVPlanError("TYPE", f"read {subject}", expected=expected, got=got, value=text)
    return integer(int(text), subject, low=low, high=high)
