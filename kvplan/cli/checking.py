"""``kvplan check-offer``: what a peer's offer describes, or all that is wrong with it. Needs the ``cli`` extra."""

from __future__ import annotations

from typing import Any, Final

import attrs
import click

from kvplan.cli.options import echo_json, json_option, print_lines
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.handshake.comparison import Comparison, compare
from kvplan.handshake.decoding import decode
from kvplan.handshake.encoding import fingerprint
from kvplan.handshake.errors import PeerError, Problem
from kvplan.handshake.messages import MAX_BYTES
from kvplan.show.explanation import explain

STDIN: Final = "-"


@attrs.frozen
class Checked:
    """A file that was read as an offer: its worker, or the problems that it has."""

    name: str
    worker: Worker | None = None
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, path: str) -> Checked:
        """The offer in a file. Raises ``NAME`` where the file can't be read."""
        name, data = click.format_filename(path), _read(path)
        if len(data) > MAX_BYTES:
            text = f"cannot read a message: expected at most {MAX_BYTES} bytes, got more"
            return cls(name, problems=(Problem("", "MESSAGE", text),))
        try:
            return cls(name, decode(data))
        except PeerError as error:
            return cls(name, problems=error.problems)

    def __str__(self) -> str:
        if self.worker is None:
            told = "\n".join(f"  {problem}" for problem in self.problems)
            return f"{self.name}: refused\n{told}"
        return f"{explain(self.worker)}\n  fingerprint {fingerprint(self.worker)}"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        problems = [attrs.asdict(problem) for problem in self.problems]
        if self.worker is None:
            return {"file": self.name, "ok": False, "problems": problems}
        described = {
            "engine_id": self.worker.engine_id,
            "rank": self.worker.rank,
            "fingerprint": fingerprint(self.worker),
            "groups": [attrs.asdict(group) for group in self.worker.groups],
            "regions": len(self.worker.regions),
            "tensors": len(self.worker.tensors),
            "views": len(self.worker.views),
        }
        return {"file": self.name, "ok": True, "problems": problems, **described}


@click.command("check-offer", short_help="Tell what a peer's offer describes, or all that is wrong with it.")
@click.argument("file")
@click.argument("file2", required=False)
@json_option
def check_offer_command(file: str, file2: str | None, as_json: bool) -> int:
    """Tell what the offer in FILE describes, or all that is wrong with it, each problem with its path.

    An offer is what kvplan.encode makes of a worker. With FILE2 tell how the worker in FILE, as a destination, differs
    from the one in FILE2, as its source, and which differences no plan bridges. FILE or FILE2 is - for stdin.

    \b
    kvplan check-offer offer.json
    kvplan check-offer decode.json prefill.json

    Exit status: 0 an offer, and no difference refused; 2 problems, or a difference refused.
    """
    files = [file] if file2 is None else [file, file2]
    if files.count(STDIN) > 1:
        raise KVPlanError("NAME", "read offers", expected="stdin for one of them", got="for both")
    checked = [Checked.of(path) for path in files]
    workers = [each.worker for each in checked if each.worker is not None]
    comparison = compare(workers[0], workers[1]) if len(workers) == 2 else None
    if as_json:
        echo_json({"offers": [each.to_json() for each in checked], "comparison": _comparison_json(comparison)})
    elif comparison is not None:
        print_lines(str(comparison).splitlines())
    else:
        for each in checked:
            print_lines(str(each).splitlines())
    return 0 if len(workers) == len(checked) and (comparison is None or comparison.ok) else 2


def _read(path: str) -> bytes:
    """The bytes of a file or of stdin, of a long one no more than show that it is too long."""
    try:
        with open(0 if path == STDIN else path, "rb", closefd=path != STDIN) as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        got = f"{path!r}: {reason}"
        raise KVPlanError("NAME", "read an offer", expected="a file that can be read, or -", got=got) from None


def _comparison_json(comparison: Comparison | None) -> dict[str, Any] | None:
    return None if comparison is None else {"ok": comparison.ok, **attrs.asdict(comparison)}
