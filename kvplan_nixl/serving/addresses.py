"""Addresses of hosts, looked up without blocking the event loop.

The system's function waits as long as a name server is silent, and cannot be stopped. So it runs on
a daemon thread, which all coroutines that ask for a host share: a name server that never answers
holds one thread for each host, and no process that ends.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from typing import Any, Final

_LOOKUPS: Final[dict[tuple[str, int], Future[list[tuple[socket.AddressFamily, Any]]]]] = {}
_LOCK: Final = threading.Lock()


async def addresses_of(
    host: str, port: int, timeout_s: float
) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of a host. Raises OSError if it has none, or none within the time.

    >>> import asyncio
    >>> [address for _, address in asyncio.run(addresses_of("127.0.0.1", 80, 1.0))]
    [('127.0.0.1', 80)]
    """
    place = host, port
    # an address is its own, without a name server
    try:
        return _look_up(place, socket.AI_NUMERICHOST)
    except socket.gaierror:
        lookup = asyncio.wrap_future(_begin(place))
    try:
        # shielded, since others may wait for it too
        return await asyncio.wait_for(asyncio.shield(lookup), timeout_s)
    except TimeoutError:
        raise TimeoutError(f"no address of {host} in time") from None


def _begin(place: tuple[str, int]) -> Future[list[tuple[socket.AddressFamily, Any]]]:
    """Return the lookup of a place that is under way, or begin one."""
    with _LOCK:
        lookup = _LOOKUPS.get(place)
        if lookup is None:
            lookup = Future()
            _LOOKUPS[place] = lookup
            arguments = (place, lookup)
            threading.Thread(
                target=_run, args=arguments, name="kvplan addresses", daemon=True
            ).start()
    return lookup


def _run(place: tuple[str, int], lookup: Future[list[tuple[socket.AddressFamily, Any]]]) -> None:
    """Look up a place, and end the lookup for all who wait for it."""
    try:
        addresses = _look_up(place)
    except (OSError, UnicodeError) as error:
        # a name that cannot be encoded is no name of a host
        failure = error if isinstance(error, OSError) else OSError(str(error))
        _end(place)
        lookup.set_exception(failure)
    else:
        _end(place)
        lookup.set_result(addresses)


def _end(place: tuple[str, int]) -> None:
    with _LOCK:
        del _LOOKUPS[place]


def _look_up(place: tuple[str, int], flags: int = 0) -> list[tuple[socket.AddressFamily, Any]]:
    host, port = place
    rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in rows]
