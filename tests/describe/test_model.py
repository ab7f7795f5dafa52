"""The text of a model: names and facts, and how two of them differ. Texts of peers are untrusted."""

from __future__ import annotations

import json
import time

import pytest

from kvplan import KVPlanError, Worker, decode, encode
from kvplan.describe.model import MAX_MODEL, differing, model_facts, model_values


def worker(model):
    return Worker("engine", 0, (), (), (), model)


def test_facts_are_canonical_text():
    """Equal facts are equal models in any order of keys, and come back from an offer."""
    first = worker({"b": [1, None], "a": {"d": 1, "c": "é"}})
    second = worker({"a": {"c": "é", "d": 1}, "b": [1, None]})
    assert first == second
    assert decode(encode(first)).model == second.model
    assert model_facts(first.model) == {"a": {"c": "é", "d": 1}, "b": [1, None]}


@pytest.mark.parametrize("model", [{1: 2}, {"": 1}, {"a": object()}, {"a": float("nan")}, {"a": "\ud800"}, [], None, 7])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(KVPlanError, match=r"^TYPE: cannot read model of a worker"):
        worker(model)


def test_true_and_one_differ():
    assert differing('{"a":1}', '{"a":true}') == {"a": ("1", "true")}


HOSTILE = {
    "broken": '{"a":',
    "deep": '{"a":' + "[" * 30000 + "]" * 30000 + "}",
    "long": '{"a":"' + "x" * MAX_MODEL + '"}',
    "digits": '{"a":' + "9" * 60000 + "}",
    "list": "[1]",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_read_is_a_text(text):
    """A peer's text that is no JSON object, or too large to read, is a plain text, soon and in few words."""
    began = time.thread_time()
    assert model_facts(text) is None
    values = model_values('{"a":1}', text)
    assert time.thread_time() - began < 1
    assert values[0].startswith("model of facts")


def test_messages_are_bounded():
    """Long names and values are cut, and many facts are counted: no text of a peer fills a log."""
    facts = {f"{i}" + "n" * 1000: "v" * 50 for i in range(60)}
    values = model_values('{"a":1}', json.dumps(facts))
    assert max(map(len, values)) < 1000
    assert values[1].endswith("and 57 more")


def test_names_of_facts_are_shown_on_one_line():
    (own, _) = model_values('{"a\\nb":1}', '{"c":2}')
    assert own.isprintable()
    assert "a\\nb" in own


def test_a_repeated_key_hides_nothing():
    """Two texts that read as the same facts are still two models, shown as texts."""
    assert differing('{"a":1}', '{"a":2,"a":1}') == {}
    assert model_values('{"a":1}', '{"a":2,"a":1}')[1] == 'of facts {"a":2,"a":1}'


def test_a_model_too_long_for_an_offer_is_refused():
    with pytest.raises(KVPlanError, match=r"^RANGE: cannot encode worker engine/0: expected at most 65536 characters"):
        encode(worker({"a": "x" * MAX_MODEL}))
