"""Messages: the limits for any bytes from a peer, and the version, which is checked before all else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplan import KVPlanError, PeerError, decode, encode, problems
from kvplan.handshake.messages import MAX_BYTES, MAX_CONTAINERS, MAX_DEPTH, MAX_STRINGS
from tests.small import engine

GOLDEN = Path(__file__).parents[1] / "golden"
WORKER = engine()[0]
OFFER = encode(WORKER)


def extended(text: str | bytes) -> bytes:
    """The offer with an extension, given as JSON."""
    data = text if isinstance(text, bytes) else text.encode()
    return OFFER[:-1] + b',"extensions":{"example.org/x":' + data + b"}}"


def nested(depth: int) -> str:
    """Lists in lists."""
    return "[" * depth + "]" * depth


REFUSED = [
    (b"", "MESSAGE: cannot read a message: expected JSON, got Expecting value at character 0"),
    (OFFER[:3], "MESSAGE: cannot read a message: expected JSON, got Unterminated string starting at character 1"),
    (b"{", "MESSAGE: cannot read a message: expected JSON, got Expecting property name enclosed in double quotes at"),
    (b"\xef\xbb\xbf{}", "MESSAGE: cannot read a message: expected JSON, got Expecting value at character 0"),
    (OFFER.decode().encode("utf-16"), "MESSAGE: cannot read a message: expected UTF-8, got byte 0xff at 0"),
    (OFFER + b"\x00", "MESSAGE: cannot read a message: expected JSON, got Extra data at character"),
    (OFFER + OFFER, "MESSAGE: cannot read a message: expected JSON, got Extra data at character"),
    (b'{"kvplan":1,"engine_id":"\xff"}', "MESSAGE: cannot read a message: expected UTF-8, got byte 0xff at 25"),
    (b"[]", "TYPE: cannot read a message: expected a mapping, got a list of 0"),
    (b"null", "TYPE: cannot read a message: expected a mapping, got None"),
    (b" " * (MAX_BYTES + 1), "MESSAGE: cannot read a message: expected at most 1048576 bytes, got 1048577"),
    (extended(nested(15)), "MESSAGE: cannot read a message: expected lists and mappings at most 16 deep, got 17"),
    (b"[" * MAX_CONTAINERS, "MESSAGE: cannot read a message: expected lists and mappings at most 16 deep, got 32768"),
    (b"[]" * 32769, "MESSAGE: cannot read a message: expected at most 32768 lists and mappings, got 32769"),
    (b'""' * 131073, "MESSAGE: cannot read a message: expected at most 131072 strings, got 131073"),
    (extended("NaN"), "MESSAGE: cannot read a message: expected JSON, got NaN"),
    (extended("-Infinity"), "MESSAGE: cannot read a message: expected JSON, got -Infinity"),
    (extended("1" * 21), "RANGE: cannot read a message: expected integers of at most 20 digits, got one of 21"),
    (extended("-" + "1" * 20), "RANGE: cannot read a message: expected integers of at most 20 digits, got one of 21"),
    (
        extended("1e999"),
        "RANGE: cannot read a message: expected numbers of at most 32 characters, below 1.8e308, got '1e",
    ),
    (
        extended("0." + "1" * 31),
        "RANGE: cannot read a message: expected numbers of at most 32 characters, below 1.8e308",
    ),
    (extended('{"a":1,"b":2,"a":1}'), "KEY: cannot read a message: expected each key of a mapping once, got 'a' twice"),
    (extended("'a'"), "MESSAGE: cannot read a message: expected JSON, got Expecting value at character"),
    (extended('"\t"'), "MESSAGE: cannot read a message: expected JSON, got Invalid control character at"),
]


@pytest.mark.parametrize("data, text", REFUSED, ids=range(len(REFUSED)))
def test_bytes_that_are_no_message_have_one_problem(data, text):
    """Size, nesting, UTF-8, JSON, unique keys, short numbers: the first broken rule is the only problem."""
    (problem,) = problems(data)
    assert f"{problem.code}: {problem.text}".startswith(text)
    assert problem.path == ""


EXTENSIONS = [
    "{}",
    "null",
    "1.5",
    "-1.2345678901234567e-300",
    "9" * 20,
    nested(14),
    '"\\ud83d\\ude00 \\n"',
    "[" + "[]," * 30000 + "0]",
]


@pytest.mark.parametrize("text", EXTENSIONS, ids=range(len(EXTENSIONS)))
def test_an_extension_may_hold_anything(text):
    """Extensions up to the limits of a message do not change the worker, which passes them on."""
    worker = decode(extended(text))
    assert worker == WORKER
    assert json.loads(worker.extensions) == {"example.org/x": json.loads(text)}
    assert json.loads(decode(encode(worker)).extensions) == {"example.org/x": json.loads(text)}


def test_just_as_many_strings_as_there_may_be():
    """The limit of strings itself is allowed."""
    room = MAX_STRINGS - extended("[0]").count(b'"') // 2
    assert decode(extended('["a"' + ',"a"' * (room - 1) + "]")) == WORKER


def test_the_longest_message():
    """A message may be as long as the limit says, white space included."""
    assert decode(OFFER.ljust(MAX_BYTES)) == WORKER


def test_brackets_in_strings_do_not_nest():
    """Brackets in strings are not counted, also with escaped quotes."""
    text = json.dumps(['"' + "[" * MAX_CONTAINERS, "\\" + "{" * MAX_CONTAINERS, '\\"[', "}]" * 99])
    assert decode(extended(text)) == WORKER


def test_strings_do_not_hide_brackets():
    """An escaped backslash does not escape the quote behind it."""
    (problem,) = problems(extended(f'["\\\\",{nested(MAX_DEPTH)},"\\\\"]'))
    assert problem.text.endswith(f"at most {MAX_DEPTH} deep, got {MAX_DEPTH + 3}")


@pytest.mark.parametrize("text", ['"\\ud800"', '["\\udc00\\ud800"]', '{"\\udfff":0}'])
def test_half_a_surrogate_pair_is_no_character(text):
    """An escape that is not a character is refused, also in an extension."""
    (problem,) = problems(extended(text))
    assert str(problem) == (
        "extensions: MESSAGE: cannot read a message: expected Unicode characters, got half of a surrogate pair"
    )


@pytest.mark.parametrize("value", ["null", "[]", '"x"', "0"])
def test_extensions_are_a_mapping(value):
    """Each extension has a name."""
    (problem,) = problems(OFFER[:-1] + f',"extensions":{value}}}'.encode())
    assert str(problem).startswith("extensions: TYPE: cannot read extensions: expected a mapping, got ")


VERSIONS = {"2": "2", "0": "0", "-1": "-1", "true": "True", "1.0": "1.0", '"1"': "'1'", "null": "None", "[1]": "a list"}


@pytest.mark.parametrize("value, shown", VERSIONS.items())
def test_another_version_is_the_only_problem(value, shown):
    """Nothing else in a message of another version is checked."""
    (problem,) = problems(f'{{"engine_id": 7, "kvplan": {value}, "extensions": 3}}'.encode())
    assert str(problem).startswith(f"kvplan: VERSION: cannot read a message: expected version 1, got {shown}")


def test_a_message_without_version_is_of_none():
    """A message without a version is refused for that alone."""
    assert [problem.code for problem in problems(b'{"engine_id": "p"}')] == ["VERSION"]


def test_an_offer_of_a_later_version_is_refused_by_its_version():
    """A stored message of version 2 is refused for its version, not for keys that version 1 does not know."""
    with pytest.raises(PeerError, match=r"^VERSION: cannot read a message at kvplan: expected version 1, got 2$"):
        decode((GOLDEN / "offer-of-version-2.json").read_bytes())


@pytest.mark.parametrize("value", [OFFER.decode(), bytearray(OFFER), None, 7, WORKER], ids=type)
@pytest.mark.parametrize("call", [decode, problems])
def test_what_is_not_bytes_is_no_fault_of_a_peer(call, value):
    """Anything but bytes is the caller's mistake, and not a PeerError."""
    with pytest.raises(KVPlanError, match=r"^TYPE: cannot read a message: expected bytes, got ") as caught:
        call(value)
    assert not isinstance(caught.value, PeerError)
