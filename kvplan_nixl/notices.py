"""Notices on their way: the message by which a transfer tells its remote worker that all bytes have moved.

It is a JSON list: the local worker's engine id and rank, and the request's name.
"""

from __future__ import annotations

import json

from kvplan.describe.worker import Key
from kvplan.executor import Notice


def opening(key: Key) -> bytes:
    """How all messages of a worker begin."""
    return json.dumps([*key]).encode()[:-1] + b", "


def message(begun: bytes, request: str) -> bytes:
    """The message of a worker, whose :func:`opening` is given, for one request.

    >>> message(opening(("decode", 0)), "request 1")
    b'["decode", 0, "request 1"]'
    """
    return begun + json.dumps(request).encode() + b"]"


def notice_of(message: bytes) -> Notice | None:
    """The notice that a message is, if it is one.

    >>> notice_of(b'["decode", 0, "request 1"]')
    Notice(engine_id='decode', rank=0, request='request 1')
    """
    try:
        engine_id, rank, request = json.loads(message)
    except (ValueError, TypeError, RecursionError):
        return None
    if not (isinstance(engine_id, str) and type(rank) is int and isinstance(request, str)):
        return None
    return Notice(engine_id, rank, request)
