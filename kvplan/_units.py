"""Units: numbers of bytes in the units that people read.

>>> print(size(1536 << 10), sizes(256, 8192), sep=", ")
1.5 MiB, 256 bytes to 8192 bytes
"""

from __future__ import annotations

from kvplan._checks import count


def size(number: int) -> str:
    """Bytes, exact below 10 KiB, else to four digits in the binary unit that suits.

    >>> size(8192), size(1 << 16), size(5_000_000_000)
    ('8192 bytes', '64 KiB', '4.657 GiB')
    """
    if number < 10 << 10:
        return count(number, "byte")
    power = min((number.bit_length() - 1) // 10, 5)
    return f"{number / (1 << 10 * power):.4g} {'KMGTP'[power - 1]}iB"


def sizes(low: int, high: int) -> str:
    """The sizes from ``low`` to ``high`` bytes.

    >>> sizes(256, 256), sizes(256, 8192)
    ('256 bytes', '256 bytes to 8192 bytes')
    """
    return size(low) if low == high else f"{size(low)} to {size(high)}"
