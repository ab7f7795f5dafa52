"""Writes the tables of the exporter and the importer for the model: ``python -m tests.protocol.transitions``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvplan.protocol import exporter, importer

PAGE: Final = Path(__file__).with_name("transitions.pml")

Table = Mapping[tuple[Any, Any], Any]

TABLES: Final[Mapping[str, Table]] = MappingProxyType({"EXPORT": exporter.TRANSITIONS, "IMPORT": importer.TRANSITIONS})
"""The tables, by what the names of their states and events begin with in the model."""


def written(tables: Mapping[str, Table] = TABLES) -> str:
    """The tables as macros, which give the state after an event."""
    lines = ["/* Written by python -m tests.protocol.transitions from exporter.py and importer.py. */", ""]
    lines.append("#define NOTHING 255  /* in place of a state, after an event that cannot happen */")
    for prefix, table in tables.items():
        (state, event), *_ = table
        kinds: tuple[Any, ...] = (type(state), type(event))
        for kind in kinds:
            lines += ["", *(f"#define {prefix}_{member.name} {number}" for number, member in enumerate(kind))]
        lines += ["", f"#define AFTER_{prefix}(state, event) ( \\"]
        for (state, event), after in table.items():
            moved = f"state == {prefix}_{state.name} && event == {prefix}_{event.name}"
            lines.append(f"    ({moved}) -> {prefix}_{after.name} : ( \\")
        lines.append(f"    NOTHING {')' * len(table)})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(written())
