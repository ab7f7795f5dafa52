"""The message that carries a :class:`kvplan.Notice`: NIXL sends it when all bytes of a transfer have moved.

It is a JSON list of the sender's engine id, its rank, and the request's name.
"""

from __future__ import annotations

import json

from kvplan import Notice
from kvplan.describe.worker import Key


def opening(key: Key) -> bytes:
    """The beginning of all messages of a worker, which its executor encodes once."""
    return json.dumps([*key]).encode()[:-1] + b", "


def message(opened: bytes, request: str) -> bytes:
    """The message for one request, with the worker's :func:`opening`.

    >>> message(opening(("decode", 0)), "request 1")
    b'["decode", 0, "request 1"]'
    """
    return opened + json.dumps(request).encode() + b"]"


def notice_of(message: bytes) -> Notice | None:
    """The notice in a message, or None for any other message.

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
