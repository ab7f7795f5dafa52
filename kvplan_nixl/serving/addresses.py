"""Addresses of hosts, looked up without blocking the event loop.

The system's function waits as long as a name server is silent, and cannot be stopped. So it runs on
a daemon thread, which all coroutines that ask for a host share: a name server that never answers
holds one thread for each name, of at most :data:`MAX_LOOKUPS`, and no process that ends.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from typing import Any, Final

MAX_LOOKUPS: Final = 1 << 10
"""Names that are looked up at a time: requests name hosts, and each has a thread."""

Addresses = list[tuple[socket.AddressFamily, Any]]

_LOOKUPS: Final[dict[str, Future[Addresses]]] = {}
_LOCK: Final = threading.Lock()


async def addresses_of(host: str, port: int, timeout_s: float) -> Addresses:
    """The addresses of a host. Raises OSError if it has none, or none within the time.

    >>> import asyncio
    >>> [address for _, address in asyncio.run(addresses_of("127.0.0.1", 80, 1.0))]
    [('127.0.0.1', 80)]
    """
    # an address is its own, without a name server
    try:
        found = _look_up(host, socket.AI_NUMERICHOST)
    except socket.gaierror:
        lookup = asyncio.wrap_future(_begin(host))
        try:
            # shielded, since others may wait for it too
            found = await asyncio.wait_for(asyncio.shield(lookup), timeout_s)
        except TimeoutError:
            raise TimeoutError(f"no address of {host} in time") from None
    return [(family, (ip, port, *rest)) for family, (ip, _, *rest) in found]


def _begin(host: str) -> Future[Addresses]:
    """Return the lookup of a host that is under way, or begin one. Raises OSError if it cannot."""
    with _LOCK:
        lookup = _LOOKUPS.get(host)
        if lookup is None:
            if len(_LOOKUPS) >= MAX_LOOKUPS:
                raise OSError(f"{host} is not looked up: {MAX_LOOKUPS} other names are")
            lookup = _LOOKUPS[host] = Future()
            arguments = (host, lookup)
            threading.Thread(
                target=_run, args=arguments, name="kvplan addresses", daemon=True
            ).start()
    return lookup


def _run(host: str, lookup: Future[Addresses]) -> None:
    """Look up a host, and end the lookup for all who wait for it."""
    try:
        addresses = _look_up(host)
    except (OSError, UnicodeError) as error:
        # a name that cannot be encoded is no name of a host
        failure = error if isinstance(error, OSError) else OSError(str(error))
        _end(host)
        lookup.set_exception(failure)
    else:
        _end(host)
        lookup.set_result(addresses)


def _end(host: str) -> None:
    with _LOCK:
        del _LOOKUPS[host]


def _look_up(host: str, flags: int = 0) -> Addresses:
    rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in rows]
