"""Rooms of vLLM: a router sends a request to prefill and to decode at once, with a transfer id.

Prefill publishes what it has computed of the request in the room of that name, at its listener,
whose address the router tells decode. The parameters are those of vLLM's MooncakeConnector:
``transfer_id`` for both engines, and ``remote_bootstrap_addr`` for decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
from vllm.v1.request import Request

from kvplan import KVPlanError
from kvplan._checks import at_most, name
from kvplan.protocol import Claims, Handoff
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.room_contents import MAX_ROOM_CHARACTERS, Published
from kvplan.protocol.system import System
from kvplan_nixl.vllm.engine_state import EngineState

ROOM: Final = "transfer_id"
"""The parameter that names a request's room."""

ADDRESS: Final = "remote_bootstrap_addr"
"""The parameter with the address of prefill's listener."""

SCHEMES: Final = ("http://", "https://")


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


@attrs.define(eq=False)
class RoomRequest:
    """A request of decode that prefill computes meanwhile, and what is published of it.

    Its lease is claimed as ``reader`` when its first part is taken, on the thread that has asked.
    Prefill has ``timeout_s`` for each part.
    """

    room: str
    request: Request
    state: EngineState
    reader: str
    claims: Claims
    key: SharedKey
    system: System
    timeout_s: float
    published: Published | None = None
    error: KVPlanError | None = None
    until: float = attrs.field(init=False)
    _seen: Published | None = None

    def __attrs_post_init__(self) -> None:
        self.until = self.system.monotonic() + self.timeout_s

    @property
    def handoff(self) -> Handoff | None:
        """Return the latest handoff of the request, whose lease is claimed, None before one."""
        published = self.published
        return None if published is None else published.handoff

    def take(self, entry: Any) -> bool:
        """Take an entry of the room, or the reason why the request fails.

        Returns whether nothing more is to come.
        """
        try:
            published = self._claim(entry)
        except KVPlanError as error:
            self.error = error
            return True
        except Exception as error:  # whatever it is, this request fails, and no others
            expected = "an entry of this request"
            self.error = KVPlanError(
                "MESSAGE", f"read room {self.room}", expected=expected, got=f"{error!r}"
            )
            return True
        self.until = self.system.monotonic() + self.timeout_s
        self.published = published
        return published.is_whole

    def _claim(self, entry: Any) -> Published:
        """Return what prefill has published, if it is of this prompt, and claim its lease."""
        published = Published.of_entry(self.room, entry, self.key, self.published)
        handoff = published.handoff
        handoff.check_weights(self.state.identity.version)
        # decode computes the last position itself
        num_wanted = self.request.num_prompt_tokens - 1
        if published.is_whole:
            num_shared = handoff.count_shared(self._prompt_of)
            is_right = num_shared >= num_wanted
        else:
            num_shared = handoff.num_tokens
            is_right = num_shared <= num_wanted
        if not is_right:
            quantity = "at least" if published.is_whole else "a part of"
            expected = f"{quantity} {num_wanted} positions"
            raise KVPlanError(
                "TOKENS", f"read transfer {self.room}", expected=expected, got=f"{num_shared}"
            )
        if not published.is_whole:
            handoff.check_prompt(self._prompt_of(num_shared))
        if self.published is None:
            self.claims.begin(handoff.source, handoff.lease, self.reader)
        return published

    def _prompt_of(self, num_tokens: int) -> str:
        return self.state.prompt_of(self.request, num_tokens)

    def take_new(self) -> Published | None:
        """Return what is published since the last call, None if nothing is.

        Raises the reason why the request fails.
        """
        self.check()
        published = self.published
        if published is self._seen:
            return None
        self._seen = published
        return published

    def check(self) -> None:
        """Raise the reason why the request fails, if there is one."""
        if self.error is not None:
            raise self.error
        is_whole = self.published is not None and self.published.is_whole
        if not is_whole and self.system.monotonic() > self.until:
            action = f"read transfer {self.room}"
            expected = f"prefill to compute it within {self.timeout_s:g} s"
            raise KVPlanError("PEER", action, expected=expected, got="nothing")
