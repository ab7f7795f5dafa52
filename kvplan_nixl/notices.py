"""The message that carries a :class:`kvplan.Notice`.

It is a JSON list of the request's name, its attempt and its status. It does not name its sender:
NIXL does.
"""

from __future__ import annotations

import json
from typing import Final

from kvplan import KVPlanError, Notice, Status
from kvplan.describe.worker import Key
from kvplan.executor import MAX_REQUEST

MAX_MESSAGE_BYTES: Final = 12 * MAX_REQUEST + 64
"""JSON takes up to 12 bytes for a character, and some for the rest."""


def message(notice: Notice) -> bytes:
    """Return the message for a notice.

    >>> message(Notice("decode", 0, "request 1"))
    b'["request 1", 0, "done"]'
    """
    return json.dumps([notice.request, notice.attempt, notice.status.value]).encode()


def notice_of(sender: Key, data: bytes) -> Notice | None:
    """Return the notice in a message of a worker, or None for any other message.

    >>> notice_of(("decode", 0), b'["request 1", 0, "done"]')
    Notice(engine_id='decode', rank=0, request='request 1', attempt=0, status=<Status.DONE: 'done'>)
    """
    # the message is untrusted data, so it may be large, and any JSON or none
    if len(data) > MAX_MESSAGE_BYTES:
        return None
    try:
        request, attempt, status = json.loads(data)
        return Notice(*sender, request, attempt, Status(status))
    except (ValueError, TypeError, RecursionError, KVPlanError):
        return None
