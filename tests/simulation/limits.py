"""Fleets whose lists, questions and queues hold few: what does not fit comes later, as it would in large fleets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest.mock import patch

from kvplan.protocol import claims, leases, peer_engines, read, room_contents, rooms
from tests.simulation.sglang_connector import BOOTSTRAP, PREFILL

SMALL_LIMITS: tuple[tuple[ModuleType, str, int], ...] = (
    # one claim, two rooms, and about two entries of rooms
    (claims, "MAX_LIST_BYTES", 140),
    (rooms, "MAX_ASKED", 2),
    (room_contents, "MAX_ANSWER_BYTES", 6000),
    (room_contents, "MAX_WAITING", 1),
    (peer_engines, "MAX_HANDSHAKES", 1),
    # longer than a transfer takes by the fastest clock, where none is lost
    (peer_engines, "MAX_AGE_S", 130),
    (read, "MAX_TRANSFER_BYTES", 64),
    (leases, "MAX_READERS", 2),
    # the newest attempt, and the server of all rooms of an engine
    (BOOTSTRAP, "MAX_ATTEMPTS", 1),
    (PREFILL, "MAX_PUBLISHERS", 1),
)


@contextmanager
def small_limits() -> Iterator[None]:
    """Have limits of the protocol that a fleet reaches, for a while."""
    with ExitStack() as limits:
        for module, name, value in SMALL_LIMITS:
            limits.enter_context(patch.object(module, name, value))
        yield
