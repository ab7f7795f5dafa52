"""What packages that build on kvplan share with it: checks of values, and texts of messages.

``kvplan_nixl`` checks what its callers give with these functions, so its errors read like kvplan's,
and so can a connector of your own. Each check returns the value in its exact type, or raises a
:class:`~kvplan.KVPlanError` that names the ``subject``. This module is provisional: it may change
in any release.

>>> integer(7, "number of layers", low=1)
7
>>> integer(-1, "number of layers", low=1)
Traceback (most recent call last):
kvplan.errors.KVPlanError: RANGE: cannot read number of layers:
expected an integer in [1, 9223372036854775808), got -1
"""

from kvplan._arrays import Ints, integers_in
from kvplan._checks import (
    at_most,
    having,
    instance,
    integer,
    interval,
    members,
    name,
    seconds,
    wrong_type,
)
from kvplan._text import brief_repr, few, meant, shown

__all__ = [
    "Ints",
    "at_most",
    "brief_repr",
    "few",
    "having",
    "instance",
    "integer",
    "integers_in",
    "interval",
    "meant",
    "members",
    "name",
    "seconds",
    "shown",
    "wrong_type",
]
