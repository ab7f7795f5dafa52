"""What engines send each other: whatever a stranger puts in the place of any part, the reader gets a KVPlanError."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvplan import Blocks, Context, KVPlanError
from kvplan.protocol import Handoff, Leases, Source
from kvplan.protocol.claims import ClaimAnswer, ClaimMessage, answer_claims
from kvplan.protocol.digest import Positions, TensorDigests, joined, mismatch, of_json, to_json
from kvplan.protocol.digest_requests import DigestRequest
from kvplan.protocol.listener import Offers
from kvplan_nixl.serving import Driver
from tests.blocking import KEY
from tests.protocol.test_handoff import signed

WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 40,
    1 << 70,
    1.5,
    float("nan"),
    "",
    "x",
    "\ud800",
    [],
    [None],
    [[]],
    [1, 2],
    {},
    {"a": 1},
)

SOURCE = Source("p", "a", "127.0.0.1", 1)
HANDOFF = Handoff(SOURCE, "r", 7, "a1", {"attn": Blocks([1, 2])}, kept={"attn": 3}, prefixes={3: "aa"})
MESSAGE = ClaimMessage("a", (("l", "r"),), (("l", "r"),), ("q",))
POSITIONS = Positions(Context(1, 2, 2), Context(), ((0, 3),))
ARRAYS = np.array([0, 1]), np.ones(2, np.uint64), np.arange(2, dtype=np.uint64)
DIGESTS = to_json([TensorDigests("layers.0", POSITIONS, {"head": 2}, *ARRAYS)])
LEASES = Leases(Driver())
DIGEST_REQUEST = {"start": "a", "lease": LEASES.grant("r"), "tokens": {"attn": [0, 4]}}

READERS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "claims": (lambda fields: answer_claims(Leases(Driver()), "a", ClaimMessage.of_fields(fields)), MESSAGE.fields()),
    "answer": (
        lambda fields: ClaimAnswer.of_fields(MESSAGE, fields),
        {"claims": [True], "done": [True], "asks": [True], "wanted": ["l"]},
    ),
    "handoff": (lambda params: Handoff.of_params(signed(params), KEY), HANDOFF.params(KEY)),
    "signed handoff": (lambda params: Handoff.of_params(params, KEY), HANDOFF.params(KEY)),
    "offers": (
        lambda fields: Offers.decode(json.dumps(fields).encode()),
        {"engine_id": "p", "start": "a", "workers": ["AAAA"]},
    ),
    "request for digests": (lambda body: DigestRequest.of_fields("a", body), DIGEST_REQUEST),
    "digests": (of_json, DIGESTS),
    "joined digests": (lambda record: joined([record]), DIGESTS),
    "expected digests": (lambda record: mismatch([record], [DIGESTS]), DIGESTS),
    "actual digests": (lambda record: mismatch([DIGESTS], [record]), DIGESTS),
}


def changed(value: Any) -> Iterator[Any]:
    """The message with another value in the place of each part, and without each part."""
    yield from WRONG
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        without = copy.copy(value)
        del without[key]
        yield without
        for part in changed(value[key]):
            whole = copy.copy(value)
            whole[key] = part
            yield whole


@pytest.mark.parametrize("reader", READERS)
def test_a_message_of_a_stranger_ends_in_a_typed_error(reader: str) -> None:
    """Each part in turn is of another type, out of range, or missing; without a change the message is read."""
    read, message = READERS[reader]
    message = json.loads(json.dumps(message))
    read(message)
    num_refused = 0
    for other in changed(message):
        try:
            read(other)
        except KVPlanError:
            num_refused += 1
    assert num_refused > len(WRONG)
