"""Files of pages: a header that describes a shard, and the shard's bytes, each with a digest.

::

    bytes 0 to 7      KVPLPAGE
    bytes 8 to 11     the version of the format, 1, little-endian
    bytes 12 to 15    the length of the header in bytes, little-endian
    bytes 16 to 47    the SHA-256 of the header
    from byte 48 on   the header: JSON in ASCII
    data              from the next multiple of 4096 bytes on

The header has the keys ``key``, the page's name, ``stop``, the positions up to the end of the page,
``num_bytes`` and ``digest`` of the data, and ``offer``, the description of the shard as text.

The digest tells damage: torn pages, lost and swapped sectors, flipped bits. It is no signature,
since a writer of the data writes the digest too. SHA-256 of all bytes takes longer than reading
and copying them together, so it is taken of sums:

- store.D1: A row is 1024 integers of 8 bytes; the last row is filled up with zeros. A sum is a
  polynomial in :data:`FACTOR` modulo 2**64, as by Horner's rule. There is one for each of the 1024
  columns, of little-endian integers, and one for each row, of big-endian ones.
- store.D2: A change within one row, or of one integer in each of any rows, is always seen, since
  an odd factor has an inverse. Other changes are missed if all sums of the rows and of the columns
  cancel out. Bits that weigh least in one kind of sum, the highest ones, weigh most in the other.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._checks import integer
from kvplan._text import brief_repr, shown
from kvplan.errors import KVPlanError
from kvplan.handshake.messages import MAX_BYTES
from kvplan.protocol.page_keys import VERSION, space_of
from kvplan.protocol.page_shards import StoredShard, name_of

__all__ = [
    "ALIGNMENT",
    "ROW_BYTES",
    "DataDigest",
    "PageHeader",
    "check_size",
    "check_space",
    "check_stop",
    "damaged",
    "data_offset",
    "pack",
    "parse_header",
]

MAGIC: Final = b"KVPLPAGE"
PREFIX_BYTES: Final = 48
ALIGNMENT: Final = 4096
"""Data begins at a multiple of this, as direct reads and maps of files need."""

MAX_HEADER_BYTES: Final = 2 * MAX_BYTES
"""A description is at most a message long, and a bit longer as text within the header."""

HEADER_KEYS: Final = frozenset({"key", "stop", "num_bytes", "digest", "offer"})

COLUMNS: Final = 1024
ROW_BYTES: Final = 8 * COLUMNS
ROWS_AT_ONCE: Final = 64
"""As many rows as stay in a processor's cache for both sums."""

FACTOR: Final = 0x9E3779B97F4A7C15
"""An odd number, so that multiplying by it has an inverse modulo 2**64."""

POWERS: Final = np.multiply.accumulate(np.array([1, *[FACTOR] * COLUMNS], "<u8"))[::-1].copy()
""":data:`FACTOR` to the power of 1024, 1023, ..., 0, modulo 2**64.

The last n + 1 are the factor of the sum so far, and those of n integers that are added to it.
"""

POWERS.setflags(write=False)


class DataDigest:
    """The digest of data that comes in chunks, of which all but the last are whole rows.

    >>> digest = DataDigest()
    >>> digest.update(memoryview(bytes(ROW_BYTES)))
    >>> digest.update(memoryview(b"cache"))
    >>> digest.hexdigest()[:16]
    '8828f27b7ec5f350'
    """

    def __init__(self) -> None:
        self._columns = np.zeros(COLUMNS, "<u8")
        self._rows: list[npt.NDArray[np.uint64]] = []

    def update(self, chunk: memoryview) -> None:
        """Add the rows of a chunk to the sums."""
        for start in range(0, len(chunk), ROWS_AT_ONCE * ROW_BYTES):
            data: memoryview | bytes = chunk[start : start + ROWS_AT_ONCE * ROW_BYTES]
            if missing := -len(data) % ROW_BYTES:
                data = bytes(data) + bytes(missing)
            rows = np.frombuffer(data, "<u8").reshape(-1, COLUMNS)
            # each is one call, during which other threads go on
            factors = POWERS[-len(rows) - 1 :]
            self._columns *= factors[0]
            self._columns += np.einsum("i,ij->j", factors[1:], rows)
            self._rows.append(np.einsum("j,ij->i", POWERS[1:], rows.view(">u8")))

    def hexdigest(self) -> str:
        """Return the digest of all chunks, 64 hexadecimal digits."""
        sums = np.concatenate([self._columns, *self._rows]).astype("<u8")
        return hashlib.sha256(sums.data).hexdigest()


@attrs.frozen
class PageHeader:
    """What a file says of itself: the page's key and end, the shard, and the digest of the data."""

    key: str
    stop: int
    offer: bytes
    num_bytes: int
    digest: str
    data_offset: int

    __repr__ = brief_repr

    @property
    def shard_name(self) -> str:
        """The name of the shard that the file describes."""
        return name_of(self.offer)

    @property
    def shard(self) -> StoredShard:
        """The shard that the file describes. Raises what :class:`StoredShard` raises."""
        return StoredShard.of_offer(self.offer)


def pack(key: str, stop: int, shard: StoredShard, data: memoryview) -> list[bytes | memoryview]:
    """Return a file as its header and its data."""
    digest = DataDigest()
    digest.update(data)
    fields = {
        "key": key,
        "stop": stop,
        "num_bytes": len(data),
        "digest": digest.hexdigest(),
        "offer": shard.offer.decode(),
    }
    header = json.dumps(fields, separators=(",", ":")).encode()
    # the numbers before the header are fixed, so that any version can be told
    numbers = VERSION.to_bytes(4, "little") + len(header).to_bytes(4, "little")
    text = MAGIC + numbers + hashlib.sha256(header).digest() + header
    return [text + bytes(-len(text) % ALIGNMENT), data]


def data_offset(name: str, head: bytes) -> int:
    """Return where the data of a file begins, from its first bytes. Raises as a header does."""
    if len(head) < PREFIX_BYTES or not head.startswith(MAGIC):
        raise damaged(name, "a file that begins with KVPLPAGE", shown(head[:8].decode("latin1")))
    version = int.from_bytes(head[8:12], "little")
    if version != VERSION:
        action = f"read page {name}"
        raise KVPlanError("VERSION", action, expected=f"version {VERSION}", got=f"{version}")
    # no more is read than a header may have, whatever the number says
    header_bytes = int.from_bytes(head[12:16], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise damaged(name, f"a header of at most {MAX_HEADER_BYTES} bytes", f"{header_bytes}")
    return -(-(PREFIX_BYTES + header_bytes) // ALIGNMENT) * ALIGNMENT


def parse_header(name: str, head: bytes) -> PageHeader:
    """Return the header in the bytes before a file's data. Raises ``PAGE`` or ``VERSION``.

    ``name`` is ``space/key/shard``, and the header has to be that of the shard of the page.
    """
    offset = data_offset(name, head)
    header_end = PREFIX_BYTES + int.from_bytes(head[12:16], "little")
    header = head[PREFIX_BYTES:header_end]
    if hashlib.sha256(header).digest() != head[16:PREFIX_BYTES]:
        raise damaged(name, "a header with its digest", "other bytes")
    if head[header_end:offset].strip(b"\0"):
        raise damaged(name, "zeros between header and data", "other bytes")
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
    parsed = PageHeader(
        key=f"{fields['key']}",
        stop=integer(fields["stop"], "stop of a page"),
        offer=offer.encode(),
        num_bytes=integer(fields["num_bytes"], "num_bytes of a page"),
        digest=f"{fields['digest']}",
        data_offset=offset,
    )
    _, key, shard = name.split("/")
    if (parsed.key, parsed.shard_name) != (key, shard):
        raise damaged(name, f"shard {shard} of {key}", f"shard {parsed.shard_name} of {parsed.key}")
    return parsed


def check_size(name: str, header: PageHeader, shard: StoredShard) -> None:
    """Check that a file has as much data as its shard. Raises ``PAGE``."""
    if header.num_bytes != shard.num_bytes:
        raise damaged(name, f"{shard.num_bytes} bytes of data", f"{header.num_bytes}")


def check_space(name: str, model: str, tokens_per_page: int) -> None:
    """Check that a file is in the folder of its model and page size. Raises ``PAGE``."""
    space = space_of(model, tokens_per_page)
    if not name.startswith(f"{space}/"):
        raise damaged(name, f"a page of space {space}", name.partition("/")[0])


def check_stop(name: str, header: PageHeader, stop: int) -> None:
    """Check that a file is of the page that ends at a position. Raises ``PAGE``."""
    if header.stop != stop:
        raise damaged(name, f"a page that ends at {stop}", f"{header.stop}")


def damaged(name: str, expected: str, got: str) -> KVPlanError:
    return KVPlanError("PAGE", f"read page {name}", expected=expected, got=got)
