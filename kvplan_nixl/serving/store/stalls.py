"""Stalls: an engine goes on without a store that does not answer.

A call of a folder in a network may hang for minutes, and nothing ends it.

- store.W1: A call that makes no step for a while is abandoned, with its thread and its client: no
  other client uses that one's buffer.
- store.W2: An abandoned client moves no byte any more, so the blocks are free for other requests.
- store.W3: After that the store is left alone for a while, and as long as too many calls hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from kvplan import KVPlanError
from kvplan.support import having, seconds
from kvplan_nixl.serving.store.parallel import Returned

STALL_S: Final = 10.0
PAUSE_S: Final = 5.0

MAX_HANGING: Final = 4
"""Calls that hang, each with a thread and a client, before no other one begins."""


class Client(Protocol):
    """What may hang: a :class:`~kvplan_nixl.serving.store.StoreClient`, or a reader."""

    num_steps: int

    def abandon(self) -> None:
        """Move nothing any more."""


ClientKind = TypeVar("ClientKind", bound=Client)


class StallGuard(Generic[ClientKind]):
    """Calls a client of a store, and gives up what has stalled. Use it from one thread at a time.

    A call that makes no step for ``stall_s`` is abandoned with its client, and calls in the next
    ``pause_s`` fail at once. ``make_client`` makes the first client, and each later one.

    >>> from kvplan import Model
    >>> from kvplan_nixl.serving.store import MemoryBackend, StoreReader
    >>> (worker,) = Model.shipped("qwen3-0.6b").engine("d", num_blocks=9)
    >>> guard = StallGuard(lambda: StoreReader(MemoryBackend(), worker))
    >>> guard.call(lambda reader: reader.find(reader.chain(range(1000))))
    0
    """

    def __init__(
        self,
        make_client: Callable[[], ClientKind],
        *,
        stall_s: float = STALL_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._make_client = having("__call__", make_client, "make_client", "a function")
        self._stall_s = seconds(stall_s, "stall_s")
        self._pause_s = seconds(pause_s, "pause_s")
        self._paused_until_s = 0.0
        self._client: ClientKind | None = None
        self._hanging: list[_Call] = []

    def call(self, use: Callable[[ClientKind], Returned]) -> Returned:
        """Return what a function of the client returns. Raises ``BACKEND`` if it has stalled."""
        having("__call__", use, "use of a client", "a function")
        # those that have ended since need nothing any more
        self._hanging = [call for call in self._hanging if call.thread.is_alive()]
        if time.monotonic() < self._paused_until_s:
            raise _stalled("none a moment ago")
        if len(self._hanging) >= MAX_HANGING:
            raise _stalled(f"{len(self._hanging)} calls that hang")
        if self._client is None:
            self._client = self._make_client()
        client = self._client
        call = _Call(lambda: use(client))
        is_going_on = True
        while is_going_on and call.thread.is_alive():
            num_steps = client.num_steps
            call.thread.join(self._stall_s)
            # threads that count at once may lose a step
            is_going_on = client.num_steps != num_steps
        if call.thread.is_alive():
            # rule store.W2: from here on no byte moves
            client.abandon()
            self._client = None
            self._hanging.append(call)
            self._paused_until_s = time.monotonic() + self._pause_s
            raise _stalled(f"nothing for {self._stall_s:g} s")
        if call.error is not None:
            raise call.error
        returned: Returned = call.returned
        return returned


class _Call:
    """A function that is called in a thread of its own, and what it has returned or raised."""

    def __init__(self, use: Callable[[], Any]) -> None:
        self._use = use
        self.returned: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="kvplan store call", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.returned = self._use()
        except BaseException as error:  # whatever it is, it is raised where the call was made
            self.error = error


def _stalled(got: str) -> KVPlanError:
    return KVPlanError("BACKEND", "use a store", expected="an answer", got=got)
