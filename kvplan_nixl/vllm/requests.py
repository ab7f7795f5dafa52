"""The parameters of vLLM's requests: from which engine, or for which, a request is computed.

A router may send a request to prefill and to decode at once, with a transfer id: prefill publishes
what it has computed of it in the *room* of that name, at its listener, whose address the router
tells decode. The parameters are those of vLLM's MooncakeConnector: ``transfer_id`` for both
engines, and ``remote_bootstrap_addr`` for decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm.v1.request import Request

from kvplan import KVPlanError
from kvplan.protocol.room_contents import MAX_ROOM_CHARACTERS
from kvplan.support import at_most, name

ROOM: Final = "transfer_id"
"""The parameter that names a request's room."""

ADDRESS: Final = "remote_bootstrap_addr"
"""The parameter with the address of prefill's listener."""

SCHEMES: Final = ("http://", "https://")


def params_of(request: Request) -> Mapping[str, Any]:
    """Return the ``kv_transfer_params`` of a request, none if it has none."""
    return request.kv_transfer_params or {}


def is_computed(request: Request) -> bool:
    """Return whether an engine is asked to compute a request for another engine."""
    return bool(params_of(request).get("do_remote_decode"))


def is_computed_whole(request: Request) -> bool:
    """Return whether decode begins with the token that this engine generates, as SGLang does.

    vLLM's decode computes the last token of a prompt again, and generates that token itself.
    """
    return bool(params_of(request).get("whole_prompt"))


def has_handoff(request: Request) -> bool:
    """Return whether the parameters of a request have a handoff."""
    return bool(params_of(request).get("remote_block_ids"))


def room_of(params: Mapping[str, Any]) -> str:
    """Return the room of a request. Raises ``TYPE``, ``NAME`` or ``RANGE`` for what is no name."""
    room = name(params[ROOM], ROOM)
    at_most(MAX_ROOM_CHARACTERS, len(room), f"characters of {ROOM}", "open a room")
    return room


def address_of(params: Mapping[str, Any]) -> str:
    """Return HOST:PORT of prefill's listener. Raises ``KEY``, ``TYPE`` or ``NAME``."""
    if ADDRESS not in params:
        raise KVPlanError(
            "KEY",
            f"read transfer {params[ROOM]!r}",
            expected=f"a key {ADDRESS!r}",
            got="none",
            hint="a router names the host and the port of prefill's listener",
        )
    address = name(params[ADDRESS], ADDRESS)
    for scheme in SCHEMES:
        address = address.removeprefix(scheme)
    return address.removesuffix("/")
