"""Models: whose cache a worker has, as one text, and how two of them differ.

A model is a name in any words that engines agree on, or *facts*: a mapping of names to JSON values,
each of which decides what is in the cache. Facts are kept as canonical JSON text, so two models are
equal where their texts are, and no reader needs to understand them. Only to explain a difference
are the texts read: :func:`differing` returns the facts that differ, so an operator sees
``config.rope_theta`` with both values, where two long texts would say nothing.

The text of a peer is untrusted. What is too long or too deep to be read, or no JSON object, is a
text like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvplan._checks import instance, name, wrong_type
from kvplan._text import few

MAX_MODEL: Final = 1 << 16
"""Characters of a model's text in an offer. Longer texts are not read for their facts."""

MAX_SHOWN: Final = 80
"""Characters of a fact's name, and of its value, in a message."""

FEW_FACTS: Final = 4
"""The differing facts that an error names. It counts the others."""

NO_FACT: Final = "none"
"""The value of a fact that one of two models lacks."""


def model_text(value: Mapping[str, Any] | str) -> str:
    """Return the text of a model: a name as it is, or facts as canonical JSON.

    Raises ``TYPE`` or ``NAME``.

    >>> model_text({"weights": "5f1a", "config.rope_theta": 10000})
    '{"config.rope_theta":10000,"weights":"5f1a"}'
    >>> model_text("llama"), model_text({})
    ('llama', '')
    """
    if isinstance(value, str):
        return name(value, "model of a worker") if value else ""
    if not isinstance(value, Mapping):
        raise wrong_type("model of a worker", "a text, or a mapping of JSON values", value)
    facts = dict(value)
    if not all(isinstance(fact, str) and fact for fact in facts):
        raise wrong_type("model of a worker", "a mapping of JSON values", value)
    text = json_text(facts, "model of a worker")
    return text if facts else ""


def json_text(value: Any, subject: str) -> str:
    """Return a mapping as canonical JSON text. Raises ``TYPE`` if it has other values."""
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
        # half of a surrogate pair is no text that could be sent
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        text = ""
    if not text.startswith("{"):
        raise wrong_type(subject, "a mapping of JSON values", value)
    return text


def model_facts(text: str) -> dict[str, Any] | None:
    """Return the facts of a model's text, None of one that has none.

    >>> model_facts('{"weights":"5f1a"}'), model_facts("llama"), model_facts("{broken")
    ({'weights': '5f1a'}, None, None)
    """
    if not text.startswith("{") or len(text) > MAX_MODEL:
        return None
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def differing(first: str, second: str) -> dict[str, tuple[str, str]]:
    """Return the facts in which two models differ: name, and both values as messages show them.

    There are none where one of the models is a plain text, or both have the same facts.

    >>> differing('{"a":1,"b":[2],"c":3}', '{"a":1,"b":[4]}')
    {'b': ('[2]', '[4]'), 'c': ('3', 'none')}
    """
    facts = model_facts(first)
    others = model_facts(second)
    if facts is None or others is None:
        return {}
    differences = {}
    for fact in sorted(facts.keys() | others.keys()):
        # JSON text tells 1 from True, which Python does not
        values = tuple(_value(side[fact]) if fact in side else NO_FACT for side in (facts, others))
        if values[0] != values[1]:
            differences[_brief(fact if fact.isprintable() else json.dumps(fact))] = (
                _brief(values[0]),
                _brief(values[1]),
            )
    return differences


def _value(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except RecursionError:
        return "a value that is nested too deeply"


def _brief(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def model_values(first: str, second: str) -> tuple[str, str]:
    """Return what an error says of two models that differ: their differing facts, or their texts.

    >>> model_values('{"rope":1,"weights":"5f1a"}', '{"rope":2,"weights":"5f1a"}')
    ('rope 1', 'rope 2')
    >>> model_values("llama", "qwen")
    ("model 'llama'", "'qwen'")
    """
    differences = differing(instance(str, first, "a model"), instance(str, second, "a model"))
    if not differences:
        return f"model {_text(first)}", _text(second)
    own, other = (
        few([f"{fact} {values[side]}" for fact, values in differences.items()], ", ", FEW_FACTS)
        for side in (0, 1)
    )
    return own, other


def _text(model: str) -> str:
    return repr(model) if model_facts(model) is None else f"of facts {_brief(model)}"
