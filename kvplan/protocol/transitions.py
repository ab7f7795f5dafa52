"""Tables of transitions: what a request becomes by what happens to it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from kvplan.errors import KVPlanError

State = TypeVar("State", bound=Enum)
Happening = TypeVar("Happening", bound=Enum)


def after(
    transitions: Mapping[tuple[State, Happening], State], state: State, event: Happening
) -> State:
    """Return the state after an event. Raises ``TRANSFER`` for what cannot happen in a state."""
    following = transitions.get((state, event))
    if following is None:
        got = f"a request that is {state.value}"
        raise KVPlanError("TRANSFER", f"{event.name} a request", expected="another state", got=got)
    return following
