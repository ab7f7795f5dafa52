"""A fuzzer of decode: ``python -m property_tests.fuzz_offers --count 1000000 --seed 7``.

Changes valid offers by bytes and by values, and decodes the result. For any input, decode must raise a PeerError or
return a worker that encodes and decodes to itself. Prints the number of each outcome; any other outcome stops the
fuzzer with exit status 1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Final

from kvplan import Axis, Context, Group, PeerError, Region, View, Worker, decode, encode
from tests.small import engine

DIM = Axis("dim", 0, 4, 4, 2)
STATE = Worker("s", 0, [Region("ssm", 64, 800)], [Group("ssm")], [View("ssm", "ssm", "ssm", "bfloat16", (DIM,), 9, 80)])
TURN = Group("kv", 2, Context(1, 2, 3))
KV = (Axis("head", 4, 8, 8, 32), Axis("token", 0, 2, 2, 16), Axis("kv", 0, 2, 2, 8), DIM)
APART = Worker(
    "turn",
    1,
    [Region("kv.0", (1 << 64) - 4096, 2048, "VRAM", 3), Region("kv.1", 4096, 2048)],
    [TURN],
    [View("layers.1", "kv", f"kv.{i}", "bfloat16", (*KV[:2], Axis("kv", i, i + 1, 2, 0), DIM), 5, 160) for i in (0, 1)],
    "tiny",
    {"example.org/x": [1.5, {"a": "b"}]},
)
OFFERS: Final = tuple(encode(worker) for worker in (STATE, APART, engine(layers=1)[0], engine(tp=2, layers=2)[1]))

EDGES: Final = (0, 1, 2, 3, 7, 8, 15, 16, 17, 64, 255, 256, 4096, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 53, 1 << 62)
ODD: Final = (
    "null",
    "true",
    '""',
    '"x"',
    '"layers."',
    '"attn"',
    '"\\u00e9"',
    '"\\n"',
    "1.5",
    "[]",
    "{}",
    "[0]",
    '{"": 0}',
)
TOKENS: Final = (
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b",",
    b":",
    b"\\",
    b"null",
    b"true",
    b"NaN",
    b"1e9",
    b"-1",
    b"0",
    b"9" * 30,
)
"""What is put between bytes of a message."""


def bytes_changed(random: Random) -> bytes:
    """A valid offer with a few bytes replaced, removed, doubled or inserted, or cut off."""
    data = bytearray(OFFERS[int(random.random() * len(OFFERS))])
    for _ in range(1 + int(random.random() ** 3 * 8)):
        at, kind = int(random.random() * (len(data) + 1)), int(random.random() * 6)
        if kind == 0:
            data[at : at + 1] = bytes((int(random.random() * 256),))
        elif kind == 1:
            data[at:at] = TOKENS[int(random.random() * len(TOKENS))]
        elif kind == 2:
            del data[at : at + 1 + int(random.random() * 9)]
        elif kind == 3:
            data[at:at] = data[at : at + int(random.random() * 60)]
        elif kind == 4:
            data[at : at + 1] = b"0123456789"[int(random.random() * 10) :][:1]
        else:
            data = data[:at]
    return bytes(data)


def values_changed(random: Random) -> bytes:
    """A valid offer, still JSON, with a few values, keys or items changed."""
    message = json.loads(OFFERS[int(random.random() * len(OFFERS))])
    for _ in range(1 + int(random.random() ** 3 * 4)):
        if not message:
            break
        _change(random, *_somewhere(random, message), message)
    return json.dumps(message).encode()


def _somewhere(random: Random, container: Any) -> tuple[Any, Any]:
    """A list or mapping within, and one of its indices or keys."""
    while True:
        keys = list(container) if isinstance(container, dict) else range(len(container))
        key = keys[int(random.random() * len(keys))]
        if not (isinstance(container[key], dict | list) and container[key]) or random.random() < 0.1:
            return container, key
        container = container[key]


def _change(random: Random, container: Any, key: Any, message: Any) -> None:
    value, kind = container[key], int(random.random() * 8)
    if kind == 0:
        del container[key]
    elif kind == 1:
        container[key] = json.loads(ODD[int(random.random() * len(ODD))])
    elif kind == 2:
        other, index = _somewhere(random, message)
        container[key] = json.loads(json.dumps(other[index]))
    elif kind == 3 and isinstance(container, list):
        container.insert(key, value)
    elif kind == 4 and isinstance(container, dict):
        container[f"{key}s"] = value
    elif type(value) is int and kind < 6:
        container[key] = value + int(random.random() * 5) - 2
    else:
        container[key] = EDGES[int(random.random() * len(EDGES))] - (random.random() < 0.3)


def bytes_made_up(random: Random) -> bytes:
    """Bytes that were never an offer: any, or pieces of JSON."""
    if random.random() < 0.5:
        return random.randbytes(int(random.random() * 40))
    return b"".join(TOKENS[int(random.random() * len(TOKENS))] for _ in range(int(random.random() * 20)))


MAKERS: Final[tuple[Callable[[Random], bytes], ...]] = (bytes_changed,) * 6 + (values_changed,) * 3 + (bytes_made_up,)


def outcome(data: bytes) -> str:
    """The result of decoding: a code, or ``decoded``. Raises AssertionError for a wrong worker."""
    try:
        worker = decode(data)
    except PeerError as error:
        return error.code
    again = encode(worker)
    assert decode(again) == worker, "a worker that does not decode as itself"
    assert encode(decode(again)) == again, "an offer with two forms"
    return "decoded"


def fuzz(count: int, seed: int) -> Counter[str]:
    """The number of each outcome for ``count`` inputs. Any other one raises an ExceptionGroup that names the input."""
    random, outcomes = Random(seed), Counter[str]()
    for _ in range(count):
        data = MAKERS[int(random.random() * len(MAKERS))](random)
        try:
            outcomes[outcome(data)] += 1
        except Exception as error:
            raise ExceptionGroup(f"decode({data!r})", [error]) from None
    return outcomes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fuzz decode.")
    parser.add_argument("--count", type=int, default=100_000, help="how many inputs")
    parser.add_argument("--seed", type=int, default=0, help="which inputs: the same for the same seed")
    options = parser.parse_args()
    outcomes, start = Counter[str](), time.perf_counter()
    for part in range(0, options.count, 100_000):
        outcomes += fuzz(min(100_000, options.count - part), options.seed * 1_000_003 + part)
        rate = outcomes.total() / (time.perf_counter() - start)
        print(f"{outcomes.total()} inputs, {rate:.0f} a second: {dict(outcomes.most_common())}", flush=True)


if __name__ == "__main__":
    main()
