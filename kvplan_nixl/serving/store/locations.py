"""Locations: what operators call a store, a folder or the URL of a bucket."""

from __future__ import annotations

from kvplan import KVPlanError
from kvplan.support import name, shown
from kvplan_nixl.serving.store.backends import Backend
from kvplan_nixl.serving.store.files import FileBackend


def open_backend(location: str) -> Backend:
    """Return the backend of a folder, or of a URL such as ``s3://bucket/prefix``.

    Raises ``NAME`` for a URL of another scheme or with a password, ``BACKEND`` if the folder cannot
    be made or the package obstore is not installed.

    >>> open_backend("gopher://bucket")
    Traceback (most recent call last):
    kvplan.errors.KVPlanError: NAME: cannot open a store: expected a folder or a URL of s3,
    got 'gopher://bucket'
    """
    scheme, separator, rest = name(location, "location of a store").partition("://")
    if not separator:
        return FileBackend(location)
    # it is in logs, in messages, and in the list of processes
    if "@" in rest or "?" in rest:
        raise KVPlanError(
            "NAME",
            f"open a store of {shown(scheme)}",
            expected="a bucket and a prefix",
            got="a URL with a user, a password or parameters, which is not shown",
            hint="AWS's variables of the environment say who asks",
        )
    if scheme != "s3":
        expected = "a folder or a URL of s3"
        raise KVPlanError("NAME", "open a store", expected=expected, got=shown(location))
    try:
        from kvplan_nixl.serving.store.objects import ObjectBackend
    except ImportError as error:
        raise KVPlanError(
            "BACKEND",
            f"open {location}",
            expected="the package obstore",
            got="none",
            hint="pip install 'kvplan-nixl[s3]'",
        ) from error
    return ObjectBackend.of_url(location)
