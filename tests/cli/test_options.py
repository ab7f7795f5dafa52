"""Options: the words for an engine are told in the help, and unknown ones get a hint."""

from __future__ import annotations

import re

import attrs
import pytest

from kvplan import KVPlanError, Model
from kvplan.cli.options import SIDE, print_lines
from kvplan.cli.sides import Side
from kvplan.models.layouts import KV_FORMS, LETTERS, ORDERS


@pytest.mark.parametrize(
    ("layout", "hint"), [("NHD", "vLLM's NHD is LBNHC"), ("HND", "vLLM's HND is LBHNC"), ("LHD", LETTERS)]
)
def test_an_unknown_layout_has_a_hint(layout: str, hint: str) -> None:
    """The names that vLLM also has for two orders are told as those; of any other, what the letters mean is told."""
    with pytest.raises(KVPlanError, match=f"^LAYOUT: cannot read layout: .*, got '{layout}'") as refused:
        Side.parse(f"layout={layout}", "--src").engine(Model.shipped("llama-3.2-1b"), "e", 2)
    assert refused.value.hint == hint


def test_the_help_tells_every_word_of_a_side() -> None:
    """Keys, orders and their letters, and kv forms are in the help of commands; what it says is left out is."""
    words, _, left_out = SIDE.partition("Left out: ")
    told = re.findall(r"\w+", words)
    assert {field.name for field in attrs.fields(Side)} | {*ORDERS} | {*KV_FORMS} <= {*told}
    assert LETTERS in words
    assert Side.parse(left_out, "--src") == Side()


def test_heads_stand_out_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that are not indented are bold there; in a pipe all is plain, and no word is taken for markup."""
    lines = ["head [0, 4)", "  [bold]row", ""]
    print_lines(lines)
    assert capsys.readouterr().out == "head [0, 4)\n  [bold]row\n\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    print_lines(lines)
    assert capsys.readouterr().out == "\x1b[1mhead [0, 4)\x1b[0m\n  [bold]row\n\n"
