"""The one error that kvplan raises: a closed set of codes, and one grammar for all messages.

    cannot <do what>: expected <rule>, got <value> (<hint>)

>>> raise KVPlanError("SIZE", "pair axis 'head' of tensor 'layers.0.attn'",
...                   expected="size 8 (destination)", got="4 (source)", axis="head", destination=8, source=4)
Traceback (most recent call last):
...
kvplan.errors.KVPlanError: SIZE: cannot pair axis 'head' of tensor 'layers.0.attn': expected size 8 (destination), got 4 (source)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "TYPE": "a value has the wrong type",
        "RANGE": "an integer is outside its range",
        "NAME": "a name is empty, unknown or used twice",
        "DTYPE": "an element type is unknown, or differs between the two sides",
        "AXES": "a view lacks an axis or has an unknown one",
        "SIZE": "two sizes that must be equal differ",
        "STRIDE": "elements of one view share bytes",
        "BOUNDS": "bytes are outside their region, or an address wraps",
        "OVERLAP": "two views of one group share bytes, or lie between each other with different strides",
        "GROUP": (
            "a group is impossible, or paired with one of another kind, other tokens per slot or too "
            "few positions kept"
        ),
        "WORKER": "the given workers do not form one engine, or one of them is given twice",
        "MODEL": "the two sides run different models",
        "TENSOR": "no source has a tensor that the destination needs",
        "COVER": "no source has some slice of a tensor that the destination needs",
        "BLOCKS": (
            "a block table is missing or too short, lists a block twice, or has an id outside the "
            "pool"
        ),
        "TOKENS": "a token range is malformed or exceeds the block tables",
        "INT": "a descriptor id does not fit in 31 bits",
        "LAYOUT": "a layout or one of its options is unknown or impossible",
        "CONFIG": "a model configuration lacks a key or has an unusable value",
        "SETTING": "a setting of a connector is unknown, or has a value that is not supported",
        "PROOF": "a plan does not move the right bytes",
        "MEMORY": "memory cannot be allocated, or a copy leaves it",
        "BACKEND": "a transfer backend is missing or does not accept the memory",
        "PEER": "a remote worker is not connected, is not the one described, or is gone",
        "LEASE": "the source of a request no longer keeps its blocks",
        "PROMPT": "a handoff is of another prompt, adapter, salt or other input",
        "PAGE": "a stored page is damaged, is of another cache, or is not there any more",
        "TRANSFER": "a transfer failed or is not in the state that an action needs",
        "MESSAGE": "bytes from a peer are not a message: too long, not JSON, or nested too deeply",
        "VERSION": "a message has no version or an unknown one",
        "KEY": "a message lacks a key, or has an unknown or repeated one",
    }
)
"""Every code a :class:`KVPlanError` can carry, with its meaning."""


class KVPlanError(ValueError):
    """A description, pair or request is refused, before anything moves, or a transfer fails.

    ``code`` is one of :data:`CODES`; ``details`` has the values that disagree, by field.
    ``str(error)`` is one line: ``code``, ``action``, ``expected``, ``got`` and ``hint``. ``lines``
    says the same in three short ones.
    """

    code: str
    action: str
    expected: str
    got: str
    hint: str
    details: Mapping[str, Any]

    def __init__(
        self, code: str, action: str, *, expected: str, got: str, hint: str = "", **details: Any
    ) -> None:
        if not (isinstance(code, str) and code in CODES):
            raise KVPlanError(
                "NAME",
                "make an error",
                expected="a code of kvplan.errors.CODES",
                got=f"a {type(code).__name__} that is none",
            )
        if not isinstance(hint, str):
            raise KVPlanError(
                "TYPE",
                "make an error",
                expected="a hint that is a string",
                got=f"a value of type {type(hint).__name__}",
            )
        message = f"{code}: cannot {action}: expected {expected}, got {got}"
        super().__init__(f"{message} ({hint})" if hint else message)
        self.code = code
        self.action = action
        self.expected = expected
        self.got = got
        self.hint = hint
        self.details = MappingProxyType(details)

    @property
    def lines(self) -> tuple[str, str, str]:
        """The message in three lines: what cannot be done, what is wrong, and what to do.

        >>> error = KVPlanError("RANGE", "read tp", expected="an integer in [1, 4096)", got="0")
        >>> print(*error.lines, sep="\\n")
        RANGE: cannot read tp
          got 0
          expected an integer in [1, 4096)
        """
        subject = f"{self.code}: cannot {self.action}"
        if self.hint:
            return subject, f"  got {self.got}, expected {self.expected}", f"  {self.hint}"
        return subject, f"  got {self.got}", f"  expected {self.expected}"

    def with_hint(self, hint: str) -> KVPlanError:
        """Return the same error with another hint."""
        return _rebuild(self.code, self.action, self.expected, self.got, hint, dict(self.details))

    def in_file(self, path: str) -> KVPlanError:
        """Return the same error, about a file that was read."""
        action = f"{self.action} in {path}"
        return _rebuild(self.code, action, self.expected, self.got, self.hint, dict(self.details))

    def with_details(self, **details: Any) -> KVPlanError:
        """Return the same error with more details. Those that it has stay as they are."""
        all_details = {**details, **self.details}
        return _rebuild(self.code, self.action, self.expected, self.got, self.hint, all_details)

    def __reduce__(self) -> tuple[Any, ...]:
        details = dict(self.details)
        return _rebuild, (self.code, self.action, self.expected, self.got, self.hint, details)


def _rebuild(
    code: str, action: str, expected: str, got: str, hint: str, details: dict[str, Any]
) -> KVPlanError:
    return KVPlanError(code, action, expected=expected, got=got, hint=hint, **details)
