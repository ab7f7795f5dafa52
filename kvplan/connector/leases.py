"""Leases: how long an engine keeps the blocks of a request that another engine reads."""

from __future__ import annotations

from collections.abc import Iterable

from kvplan._checks import members, name, seconds


class Leases:
    """Requests whose blocks stay until their reader is done, or their time is over. Times are of one clock.
    Not for several threads at once.

    >>> leases = Leases()
    >>> leases.grant("request 1", until=30.0)
    >>> leases.grant("request 2", until=40.0)
    >>> leases.end(["request 2", "of another start"])
    >>> leases.ended(now=12.0)
    (('request 2',), ())
    >>> leases.ended(now=30.0)
    ((), ('request 1',))
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._done: dict[str, None] = {}

    def grant(self, request: str, until: float) -> None:
        """Keep the blocks of a request until its reader is done, or until ``until``."""
        self._until[name(request, "name of a request")] = seconds(until, "end of a lease")

    def end(self, requests: Iterable[str]) -> None:
        """Their reader is done. Requests without a lease change nothing: it is over, or was of an earlier start."""
        given = members(str, requests, "requests")
        self._done.update(dict.fromkeys(request for request in given if request in self._until))

    def ended(self, now: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The requests whose blocks may be freed, each once: their reader is done, or their time is over."""
        now = seconds(now, "time")
        done, self._done = (*self._done,), {}
        for request in done:
            del self._until[request]
        late = tuple(request for request, until in self._until.items() if until <= now)
        for request in late:
            del self._until[request]
        return done, late

    def __len__(self) -> int:
        return len(self._until)
