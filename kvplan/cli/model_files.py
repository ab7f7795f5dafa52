"""MODEL on the command line: a name, a config.json, or sizes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvplan._text import meant
from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.models.options import MAX_TOKENS, items_of, read_decimal

BITS: Final[Mapping[int, tuple[Any, ...]]] = MappingProxyType(
    {8: (8,), 4: (4, "float8_e4m3fn", 16)}
)
"""Arguments of :meth:`Model.quantized` for each value of ``--bits``: 8 bits, and NVFP4."""

MODEL_FORMS: Final = "a config.json or its directory, or sizes: layers=40,kv_heads=10,head_dim=128"
"""The forms of MODEL on the command line, other than a shipped name."""

SAME_CACHE: Final = r"(-(instruct|it|pt|base|chat|hf|thinking|reasoning|bf16|a\d+b|v\d\.\d|\d{4}))*"
"""What a name on Hugging Face may add to that of a model with the same cache.

Quantized files are others: they may state a dtype of the cache.
"""


def quantize_model(model: Model, bits: int) -> Model:
    """Return the model with K and V quantized to ``bits``, a key of :data:`BITS`."""
    return model.quantized(*BITS[bits])


def load(model: str, bits: str | None = None, like: str | None = None) -> Model:
    """Return the model of a name, of a config.json or its directory, or of sizes.

    ``bits`` quantizes it. A file of an unknown type is read as one of the type ``like``. Raises
    ``CONFIG``.

    >>> print(load("meta-llama/Llama-3.1-8B-Instruct"))
    llama-3.1-8b: 32 layers, bfloat16, groups attn
    """
    if bits is not None:
        return quantize_model(load(model, None, like), int(bits))
    path = Path(model)
    # a shipped name counts before a file of that name
    shipped = model if model in Model.names() else None
    if shipped is None and not _exists(path):
        shipped = shipped_name(model)
    if shipped is not None:
        _check_no_like(model, like)
        return Model.shipped(shipped)
    # a file may have = in its name
    if "=" in model and not _exists(path):
        _check_no_like(model, like)
        return _load_sizes(model)
    if not _exists(path):
        path = downloaded(model) or path
    if _exists(path) and path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_bytes())
        # ModelOpt states the dtype of the cache in another file of the same folder
        companion = path.with_name(path.name.replace("config.json", "hf_quant_config.json"))
        has_two = companion != path and companion.is_file()
        quantization = json.loads(companion.read_bytes()) if has_two else None
        return Model.from_config(config, model, like=like, quantization=quantization)
    except KVPlanError as error:
        raise error.in_file(f"{path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _cannot_load(model, error) from None


def shipped_name(model: str) -> str | None:
    """Return the shipped model that a name on Hugging Face means, if its cache is the same.

    >>> shipped_name("Qwen/Qwen3-32B"), shipped_name("google/gemma-3-27b-it")
    ('qwen3-32b', 'gemma-3-27b')
    >>> shipped_name("Qwen/Qwen3-32B-FP8"), shipped_name("./qwen3-32b")
    (None, None)
    """
    owner, _, name = model.rpartition("/")
    if "/" in owner or owner.startswith("."):
        return None
    name = re.sub("^(meta|nvidia)-", "", name.lower())
    fitting = [
        shipped for shipped in Model.names() if re.fullmatch(re.escape(shipped) + SAME_CACHE, name)
    ]
    return max(fitting, key=len, default=None)


def downloaded(model: str) -> Path | None:
    """Return the newest folder of a model in the cache of Hugging Face on this machine, if any."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        return None
    files = hub.glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json")
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    return None if newest is None else newest.parent


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # a name can be too long for a file
        return False


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
    if isinstance(error, json.JSONDecodeError):
        reason = f"not JSON at line {error.lineno}"
    got = f"{model!r}: {reason}"
    hint = ""
    # a text that is no path of a file is probably a mistyped name
    if missing and not model.endswith(".json"):
        owner, slash, name = model.rpartition("/")
        got = got if slash else repr(model)
        # a name of another family is no hint
        family = re.match("[a-z]*", name.lower())
        letters = family[0] if family else ""
        similar = [shipped for shipped in Model.names() if letters and shipped.startswith(letters)]
        hint = f"{meant(name, similar)} 'kvplan models' lists all".strip()
        if re.fullmatch(r"[\w-]+", owner):
            hint = f"hf download {model} --include '*config.json', then give that directory"
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
        action = "read the sizes of a model"
        got = ", ".join(values)
        raise KVPlanError("CONFIG", action, expected=expected, got=got, model=text)
    # of the two families that keep K and V of each head, one has a window
    config: dict[str, Any] = {"model_type": "mistral" if "window" in values else "llama"}
    config_keys = required | optional
    for key, value in values.items():
        config[config_keys[key]] = read_decimal(value, f"{key} of the model", 1, MAX_TOKENS)
    return Model.from_config(config, text)
