"""Leases: an engine keeps the blocks of a request while other engines read them.

- lease.L1: A lease is valid for ``lease_s`` after it is granted, and as long as a reader renews its
  claim; each renewal lasts for ``lease_s``. So the first lease can be short, however long a request
  waits at its reader, and a reader that dies holds blocks no longer than that. It may also be
  longer, where the reader is a request that no client has sent yet.
- lease.L2: When a reader is done, its claim ends, and so does the first lease. The lease ends with
  the last claim, so readers of one request all claim it before the first of them is done.
- lease.L3: A lease that has ended stays ended. No claim brings it back, since its blocks may be
  another request's, and readers that ask are told. Lease names are unique and cannot be guessed:
  a late message about the first lease of a request does not end the second.
- lease.L4: What is computed of a request may be read while the rest is computed: its lease has no
  deadline before all is computed. The lease of a request that is given up is revoked before its
  blocks are free, so a reader that has read its beginning reads no more of it.
- lease.L5: A lease ends ``max_lease_s`` after its request was computed, even if readers still renew
  their claims: a reader that hangs but goes on renewing would hold blocks for ever.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from typing import Final

import attrs

from kvplan._checks import instance, name, seconds
from kvplan._text import brief_repr
from kvplan.protocol.system import System

LEASE_S: Final = 30.0
"""Seconds for which blocks stay pinned without a claim, or after the last renewal of one."""

MAX_LEASE_S: Final = 3600.0
"""Seconds after which a lease ends, whatever its readers do."""

MAX_READERS: Final = 1 << 12
"""Readers of a lease at a time: requests that share a prompt, in all engines."""

LEASE_TOKEN_BYTES: Final = 8
"""The random bytes in the name of a lease."""


@attrs.define(eq=False)
class _Lease:
    """A request whose blocks stay until the first lease ends, and then until the last claim does.

    It was granted at ``since``, and ends at ``stop`` at the latest. ``claims_end_at`` has the end
    of each reader's claim. All claims last equally long, so the one renewed last is last and ends
    last. The lease is looked at when it is ``due``.
    """

    request: str
    ends_at: float
    since: float
    stop: float
    due: float = math.inf
    claims_end_at: OrderedDict[str, float] = attrs.field(factory=OrderedDict)

    @property
    def over_at(self) -> float:
        """When the lease ends, unless a reader claims it before."""
        return min(self.stop, max(self.ends_at, next(reversed(self.claims_end_at.values()), 0.0)))

    def claim(self, reader: str, now: float, end: float) -> bool:
        """Begin or renew a claim unless there are too many, and forget those that have ended."""
        claims = self.claims_end_at
        claims.pop(reader, None)
        while claims and next(iter(claims.values())) <= now:
            claims.popitem(last=False)
        if len(claims) >= MAX_READERS:
            return False
        claims[reader] = end
        return True


@attrs.frozen
class EndedLeases:
    """Requests whose blocks may be freed.

    In ``done`` are those that all readers are done with, or whose lease the engine ended. In
    ``late`` are those whose lease has expired; it has lasted as long as any may in ``old``, too.
    """

    done: tuple[str, ...]
    late: tuple[str, ...]
    old: tuple[str, ...] = ()

    __repr__ = brief_repr


class Leases:
    """The requests whose blocks an engine keeps for readers. Safe for several threads.

    :attr:`num_refused` counts questions and claims that came too late, and claims of more than
    :data:`MAX_READERS` readers. The engine asks for the blocks of :attr:`wanted` leases: a reader
    that has not begun to read, and can do without, ends its claim.

    >>> from kvplan_nixl.serving import Driver
    >>> leases = Leases(Driver())
    >>> lease = leases.grant("request 1")
    >>> leases.claim(lease, "decode 1"), leases.claim(lease, "decode 2")
    (True, True)
    >>> leases.release(lease, "decode 1"), leases.take_ended().done
    (True, ())
    >>> leases.release(lease, "decode 2"), leases.take_ended().done
    (True, ('request 1',))
    >>> leases.claim(lease, "decode 3"), leases.num_refused
    (False, 1)
    """

    DEFAULT_S: Final = LEASE_S
    MAX_S: Final = MAX_LEASE_S

    def __init__(
        self,
        system: System,
        *,
        lease_s: float = LEASE_S,
        max_lease_s: float = MAX_LEASE_S,
    ) -> None:
        self.lease_s: float = seconds(lease_s, "lease_s")
        self.max_lease_s: float = seconds(max_lease_s, "max_lease_s")
        self.num_refused: int = 0
        self.wanted: frozenset[str] = frozenset()
        self._system: System = instance(System, system, "system")
        self._lock = system.lock()
        self._leases: dict[str, _Lease] = {}
        # when to look at each lease that may be over then; entries that are not its ``due`` are old
        self._dues: list[tuple[float, str]] = []
        self._done: list[str] = []

    def grant(self, request: str, first_s: float | None = None) -> str:
        """Keep the blocks of a request, and return the name by which readers know the lease.

        The first lease is of ``first_s``, or of ``lease_s``.
        """
        duration_s = self.lease_s if first_s is None else seconds(first_s, "first_s")
        return self._grant(request, duration_s)

    def grant_early(self, request: str) -> str:
        """Keep the blocks of a request that is still computed, until :meth:`begin_first`.

        Returns the name of the lease. :meth:`revoke` it if the request is given up.
        """
        return self._grant(request, math.inf)

    def _grant(self, request: str, duration_s: float) -> str:
        name(request, "name of a request")
        with self._lock:
            # a new name, also if the request is pinned again, by rule lease.L3
            lease = f"{request} {self._system.token_hex(LEASE_TOKEN_BYTES)}"
            now = self._system.monotonic()
            stop = now + max(duration_s, self.max_lease_s)
            self._leases[lease] = _Lease(request, now + duration_s, now, stop)
            self._look_later(lease)
        return lease

    def _drop(self, lease: str) -> _Lease | None:
        """Drop a lease that has ended, and all times to look at leases once there are none."""
        dropped = self._leases.pop(lease, None)
        if not self._leases:
            self._dues.clear()
        return dropped

    def _look_later(self, lease: str) -> None:
        """Check a lease at the time at which it ends by what is known now, or earlier."""
        found = self._leases[lease]
        if found.over_at < found.due:
            found.due = found.over_at
            heapq.heappush(self._dues, (found.due, lease))

    def begin_first(self, lease: str) -> bool:
        """Let the first lease of a request begin, since all of it is computed.

        Returns whether the lease is valid: readers of its beginning may be done, which ends it.
        """
        with self._lock:
            if name(lease, "lease") not in self._leases:
                return False
            now = self._system.monotonic()
            self._leases[lease].ends_at = now + self.lease_s
            self._leases[lease].stop = now + max(self.lease_s, self.max_lease_s)
            self._look_later(lease)
            return True

    def revoke(self, lease: str) -> bool:
        """End a lease whose blocks are not to be read any more. :meth:`take_ended` leaves it out.

        Returns whether a reader has claimed it, which fails.

        >>> from kvplan_nixl.serving import Driver
        >>> leases = Leases(Driver())
        >>> lease = leases.grant_early("request 1")
        >>> leases.claim(lease, "decode 1")
        True
        >>> leases.revoke(lease)
        True
        >>> leases.is_valid(lease), leases.begin_first(lease), leases.take_ended().done
        (False, False, ())
        """
        with self._lock:
            revoked = self._drop(name(lease, "lease"))
        return revoked is not None and bool(revoked.claims_end_at)

    def claim(self, lease: str, reader: str) -> bool:
        """Claim a lease for a reader, or renew the claim, and return whether the reader holds it.

        It does not if the lease is not valid, or if :data:`MAX_READERS` others hold it.
        """
        name(reader, "reader")
        with self._lock:
            if self._is_refused(lease):
                return False
            now = self._system.monotonic()
            is_claimed = self._leases[lease].claim(reader, now, now + self.lease_s)
            self.num_refused += not is_claimed
            return is_claimed

    def is_valid(self, lease: str) -> bool:
        """Return whether a lease is valid: then its blocks still hold the request."""
        with self._lock:
            return not self._is_refused(lease)

    def release(self, lease: str, reader: str) -> bool:
        """End the claim of a reader that is done or will not read.

        Returns whether the lease was valid until now.
        """
        name(reader, "reader")
        with self._lock:
            if self._is_refused(lease):
                return False
            now = self._system.monotonic()
            ending = self._leases[lease]
            ending.claims_end_at.pop(reader, None)
            # the first lease ends too, by rule lease.L2
            ending.ends_at = now
            if ending.over_at <= now:
                self._drop(lease)
                self._done.append(ending.request)
            else:
                self._look_later(lease)
            return True

    def end_unclaimed(self, lease: str) -> bool:
        """End a lease, unless a reader has claimed it. Returns whether it has ended.

        >>> from kvplan_nixl.serving import Driver
        >>> leases = Leases(Driver())
        >>> lease, claimed = leases.grant("request 1"), leases.grant("request 2")
        >>> leases.claim(claimed, "decode 1")
        True
        >>> leases.end_unclaimed(lease), leases.end_unclaimed(claimed), leases.take_ended().done
        (True, False, ('request 1',))
        """
        with self._lock:
            found = self._leases.get(name(lease, "lease"))
            now = self._system.monotonic()
            if found is None or any(end > now for end in found.claims_end_at.values()):
                return False
            self._drop(lease)
            self._done.append(found.request)
            return True

    def end_all(self) -> None:
        """End all leases: what the blocks hold is not to be read any more. Readers are told so."""
        with self._lock:
            self._done += [lease.request for lease in self._leases.values()]
            self._leases.clear()
            self._dues.clear()

    def take_ended(self) -> EndedLeases:
        """Return the requests whose leases have ended since the last call.

        A lease ends here and not before: readers that asked until now are right. This
        looks at those alone that may be over now, and at each of them once in ``lease_s``.
        """
        with self._lock:
            now = self._system.monotonic()
            ended = []
            while self._dues and self._dues[0][0] <= now:
                due, key = heapq.heappop(self._dues)
                lease = self._leases.get(key)
                if lease is None or lease.due != due:
                    continue
                if lease.over_at <= now:
                    self._drop(key)
                    ended.append(lease)
                else:
                    lease.due = math.inf
                    self._look_later(key)
            late = tuple(lease.request for lease in ended)
            old = tuple(lease.request for lease in ended if now >= lease.stop)
            done = tuple(self._done)
            self._done.clear()
        return EndedLeases(done, late, old)

    def oldest_s(self) -> float:
        """Return the seconds since the oldest lease was granted, 0 without any."""
        with self._lock:
            oldest = next(iter(self._leases.values()), None)
            return 0.0 if oldest is None else self._system.monotonic() - oldest.since

    def __len__(self) -> int:
        return len(self._leases)

    def _is_refused(self, lease: str) -> bool:
        """Return whether a lease has ended, and count the refusal."""
        is_over = name(lease, "lease") not in self._leases
        self.num_refused += is_over
        return is_over
