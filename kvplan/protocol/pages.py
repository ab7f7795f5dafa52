"""Files of pages: a header that describes a part, and the part's bytes, each with a digest.

::

    bytes 0 to 7      KVPLPAGE
    bytes 8 to 11     the version of the format, 1, little-endian
    bytes 12 to 15    the length of the header in bytes, little-endian
    bytes 16 to 47    the SHA-256 of the header
    from byte 48 on   the header: JSON in ASCII
    data              from the next multiple of 4096 bytes on

The header has the keys ``key``, the page's name, ``stop``, the positions up to the end of the page,
``num_bytes`` and ``sha256`` of the data, and ``offer``, the description of the part as text.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import attrs

from kvplan._checks import integer
from kvplan._text import brief_repr, shown
from kvplan.errors import KVPlanError
from kvplan.handshake.messages import MAX_BYTES
from kvplan.protocol.page_keys import VERSION, space_of
from kvplan.protocol.page_parts import StoredPart, name_of

MAGIC: Final = b"KVPLPAGE"
PREFIX_BYTES: Final = 48
ALIGNMENT: Final = 4096
"""Data begins at a multiple of this, as direct reads and maps of files need."""

MAX_HEADER_BYTES: Final = 2 * MAX_BYTES
"""A description is at most a message long, and a bit longer as text within the header."""

HEADER_KEYS: Final = frozenset({"key", "stop", "num_bytes", "sha256", "offer"})


@attrs.frozen
class PageHeader:
    """What a file says of itself: the page's key and end, the part, and the digest of the data."""

    key: str
    stop: int
    offer: bytes
    num_bytes: int
    sha256: str
    data_offset: int

    __repr__ = brief_repr

    @property
    def part_name(self) -> str:
        """The name of the part that the file describes."""
        return name_of(self.offer)

    @property
    def part(self) -> StoredPart:
        """The part that the file describes. Raises what :class:`StoredPart` raises."""
        return StoredPart.of_offer(self.offer)


def pack(key: str, stop: int, part: StoredPart, data: memoryview) -> list[bytes | memoryview]:
    """Return a file as its header and its data."""
    fields = {
        "key": key,
        "stop": stop,
        "num_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "offer": part.offer.decode(),
    }
    header = json.dumps(fields, separators=(",", ":")).encode()
    # the numbers before the header are fixed, so that any version can be told
    numbers = VERSION.to_bytes(4, "little") + len(header).to_bytes(4, "little")
    text = MAGIC + numbers + hashlib.sha256(header).digest() + header
    return [text.ljust(_data_offset(len(header)), b"\0"), data]


def header_size(name: str, prefix: bytes) -> int:
    """Return the length of the header that follows the first bytes of a file."""
    if len(prefix) < PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise damaged(name, "a file that begins with KVPLPAGE", shown(prefix[:8].decode("latin1")))
    version = int.from_bytes(prefix[8:12], "little")
    if version != VERSION:
        action = f"read page {name}"
        raise KVPlanError("VERSION", action, expected=f"version {VERSION}", got=f"{version}")
    # no more is read than a header may have, whatever the number says
    header_bytes = int.from_bytes(prefix[12:16], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise damaged(name, f"a header of at most {MAX_HEADER_BYTES} bytes", f"{header_bytes}")
    return header_bytes


def parse_header(name: str, prefix: bytes, header: bytes) -> PageHeader:
    if hashlib.sha256(header).digest() != prefix[16:]:
        raise damaged(name, "a header with its digest", "other bytes")
    # who has written the header is unknown, although its digest is right
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not fields.keys() >= HEADER_KEYS:
        raise damaged(name, f"the keys {', '.join(sorted(HEADER_KEYS))}", shown(fields))
    offer = f"{fields['offer']}"
    if not offer.isascii():
        raise damaged(name, "a description in ASCII", "other characters")
    return PageHeader(
        key=f"{fields['key']}",
        stop=integer(fields["stop"], "stop of a page"),
        offer=offer.encode(),
        num_bytes=integer(fields["num_bytes"], "num_bytes of a page"),
        sha256=f"{fields['sha256']}",
        data_offset=_data_offset(len(header)),
    )


def check_size(name: str, header: PageHeader, part: StoredPart) -> None:
    """Check that a file has as much data as its part. Raises ``PAGE``."""
    if header.num_bytes != part.num_bytes:
        raise damaged(name, f"{part.num_bytes} bytes of data", f"{header.num_bytes}")


def check_space(name: str, model: str, tokens_per_page: int) -> None:
    """Check that a file is in the folder of its model and page size. Raises ``PAGE``."""
    space = space_of(model, tokens_per_page)
    if not name.startswith(f"{space}/"):
        raise damaged(name, f"a page of space {space}", name.partition("/")[0])


def check_stop(name: str, header: PageHeader, stop: int) -> None:
    """Check that a file is of the page that ends at a position. Raises ``PAGE``."""
    if header.stop != stop:
        raise damaged(name, f"a page that ends at {stop}", f"{header.stop}")


def check_name(name: str, header: PageHeader, key: str, part: str) -> None:
    """Check that a file is the part of the page that its name says. Raises ``PAGE``."""
    if (header.key, header.part_name) != (key, part):
        got = f"part {header.part_name} of {header.key}"
        raise damaged(name, f"part {part} of {key}", got)


def _data_offset(header_bytes: int) -> int:
    return -(-(PREFIX_BYTES + header_bytes) // ALIGNMENT) * ALIGNMENT


def damaged(name: str, expected: str, got: str, **details: Any) -> KVPlanError:
    return KVPlanError("PAGE", f"read page {name}", expected=expected, got=got, **details)
