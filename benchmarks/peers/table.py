"""The comparison as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.peers.rows import BASES, BIND, DESCRIPTORS, FLOOR, OF_BLOCKS, Figure, Section

Line = tuple[str, ...]

COLUMNS: Final = ("function", "median", "quartiles", "cold", "makes", "a second", "/ additions", "/ kvplan")

NOTES: Final = (
    "A decode worker's request, from lists of block ids on both sides, between engines that have shaken hands. All "
    "functions that make ids or ranges of one request move the same bytes from and to the same addresses. Times are "
    "medians of rounds in which all have a turn, ratios are medians of those in the same rounds. Cold is the first "
    "call of a turn, after other functions have filled the caches; all other times are of the calls after it.",
    "Ids are descriptor ids, as many for either side. Ranges are addresses and lengths of both sides. What NIXL or "
    "Mooncake does with them is in no figure.",
)
MEMORY: Final = f"'{BIND}', '{OF_BLOCKS}' and '{FLOOR}' reuse memory; 'kvplan bind' and peers make new arrays."
RATIOS: Final = (
    "/ additions: the time over that of two additions of numpy, one for each side, into arrays that are there already. "
    f"/ kvplan: over that of '{BIND}' for ids, of '{DESCRIPTORS}' for ranges."
)


def seconds(value: float) -> str:
    """Return a time with three digits.

    >>> [seconds(value) for value in (9.876e-6, 1.2345e-4, 0.01234, 2.5)]
    ['9.88 µs', '123 µs', '12.3 ms', '2.50 s']
    """
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if value * scale < 999.5:
            return f"{_digits(value * scale)} {unit}"
    return f"{_digits(value)} s"


def _digits(value: float) -> str:
    return f"{value:.{max(0, 2 - (value >= 9.995) - (value >= 99.95))}f}"


def title(section: Section) -> str:
    """Return the title of a section: how much moves in it."""
    return (
        f"{section.case}, {section.blocks:,} blocks: {section.num_bytes / 2**20:,.0f} MiB, "
        f"{section.num_descriptors:,} descriptors at least"
    )


def lines(section: Section) -> Iterator[Line]:
    """Yield the rows of a section."""
    for figure in section.figures:
        low, median, high = figure.quartiles
        cells = [figure.name, seconds(median), f"{seconds(low)} - {seconds(high)}", seconds(figure.cold)]
        cells += [f"{figure.count:,} {figure.output}", f"{_digits(figure.count / median / 1e6)} M"]
        cells += [_ratio(figure, section[FLOOR]) if figure.output == "ids" else ""]
        yield (*cells, _ratio(figure, section[BASES[figure.output]]))


def _ratio(figure: Figure, base: Figure) -> str:
    return f"{_digits(figure.over(base))}x"


def remarks(sections: Sequence[Section]) -> Iterator[str]:
    """Yield the notes of functions and the refusals of peers, each once."""
    notes: dict[str, dict[str, None]] = {}
    refused: dict[tuple[str, str], str] = {}
    for section in sections:
        for figure in section.figures:
            if figure.note:
                notes.setdefault(figure.note, {})[figure.name] = None
        for refusal in section.refusals:
            refused[section.case, refusal.name] = refusal.reason
    yield from (f"{'; '.join(names)}: {note}." for note, names in notes.items())
    yield from (f"{name} refuses '{case}': {reason}" for (case, name), reason in refused.items())


def markdown(sections: Sequence[Section], caption: str) -> str:
    """Return everything as Markdown."""
    tables = [[f"**{title(section)}**", "", *_head(COLUMNS), *map(_row, lines(section))] for section in sections]
    notes = [f"- {note}" for note in (*NOTES, MEMORY, RATIOS, *remarks(sections))]
    return "\n\n".join(["\n".join(part) for part in (*tables, notes)] + [caption])


def _head(columns: Line) -> list[str]:
    # names at the left, figures at the right
    alignments = ["---", *["---:"] * (len(columns) - 1)]
    return [_row(columns), f"|{'|'.join(alignments)}|"]


def _row(cells: Line) -> str:
    return f"| {' | '.join(cells)} |"
