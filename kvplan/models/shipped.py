"""Shipped models: the config.json files that come with this package, the keys that count of each."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from kvplan._text import meant
from kvplan.errors import KVPlanError


def configs() -> dict[str, Any]:
    """The configuration of each shipped model, by its name in lower case.

    >>> configs()["llama-3.1-8b"]["num_key_value_heads"]
    8
    """
    found: dict[str, Any] = json.loads(resources.files("kvplan.models").joinpath("shipped.json").read_bytes())
    return found


def unknown(model_name: Any) -> KVPlanError:
    """The error for a name that no shipped model has, with those that are like it."""
    hint = meant(str(model_name), configs())
    got = repr(model_name)
    return KVPlanError(
        "NAME", "load a shipped model", expected="one of Model.names()", got=got, hint=hint, name=model_name
    )
