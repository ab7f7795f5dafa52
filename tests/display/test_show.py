"""show: pictures of workers and plans, as text, SVG and files; those of the documentation are current."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvplan import KVPlanError, Worker, plan_mesh, plan_reads
from kvplan.display import Picture, show
from kvplan.display.svg import FIXED_STYLE, SVG_WIDTH
from tests.conftest import Cli
from tests.pages import commands, wrong_prints
from tests.small import engine

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
COMMANDS = [(command, output) for command, output, _ in commands(PICTURES / "README.md")]


def test_a_picture_is_text_and_svg() -> None:
    """A picture prints as text, shows as SVG in a notebook, and its repr is one short line."""
    picture = show(plan_reads(engine("decode")[0], engine("prefill", tp=2)), about="small")
    assert isinstance(picture, Picture)
    assert str(picture) == picture.text
    assert picture._repr_svg_() == picture.svg
    assert repr(picture) == "<Picture: decode/0 reads from prefill/0-1>"
    assert ">small</text>" in picture.svg


def test_the_numbers_of_bytes_are_explained() -> None:
    """Text and SVG say what the numbers in a row of bytes are."""
    for picture in (show(engine("decode")[0]), show(plan_reads(engine("decode")[0], engine("prefill")))):
        assert picture.text.endswith("byte: offset in one block")
        assert ">byte: offset in one block; " in picture.svg


def test_texts_are_readable_in_the_book() -> None:
    """The book shows a picture in at least so many pixels that no text is below 9."""
    (least,) = re.findall(r"img\[src\$=\"\.svg\"\] { min-width: (\d+)px }", (PICTURES.parent / "book.css").read_text())
    sizes = [int(size) for size in re.findall(r"font(?:-size)?: (\d+)px", FIXED_STYLE)]
    assert min(sizes) * int(least) / SVG_WIDTH >= 9


def test_colours_are_literal() -> None:
    """Programs that know no variables of CSS, such as rsvg and Inkscape, draw the light scheme."""
    svg = show(plan_reads(engine("decode")[0], engine("prefill"))).svg
    assert "var(" not in svg
    assert ".kvplan .ground { fill: #ffffff }" in svg.partition("@media")[0]
    assert ".kvplan .ground { fill: #0f1318 }" in svg.partition("@media")[2]


def test_an_empty_picture() -> None:
    """A worker without views and a plan that moves nothing have empty pictures."""
    nothing = Worker("decode", 0, (), (), ())
    for value, title in (
        (nothing, "One block of decode/0"),
        (plan_reads(nothing, engine("p")), "reads from no worker"),
    ):
        picture = show(value)
        assert picture.text == ""
        assert picture.title.endswith(title)
        ElementTree.fromstring(picture.svg)


def test_a_mesh_and_an_engine_have_a_hint() -> None:
    """The refusal of a mesh or an engine has a hint how to draw one plan or worker; other refusals have none."""
    mesh = plan_mesh(engine("d"), engine("p"))
    with pytest.raises(
        KVPlanError, match=r"got MeshPlan \(a mesh has a plan for each worker: show\(mesh.plans\[0\]\)\)$"
    ):
        show(mesh)
    with pytest.raises(KVPlanError, match=r"got tuple \(an engine is a tuple of workers: show\(engine\[0\]\)\)$"):
        show(engine("p"))
    with pytest.raises(KVPlanError, match=r"got NoneType$"):
        show(None)


def test_a_width_is_a_number_of_characters() -> None:
    """Lines of the text have at most the width given, which is at least 1; the SVG doesn't depend on it."""
    plan = plan_reads(engine("decode")[0], engine("prefill", tp=2, tokens=2, order="NH"))
    wide, narrow = show(plan), show(plan, width=50)
    assert max(map(len, narrow.text.splitlines())) <= 50 < max(map(len, wide.text.splitlines()[2:])) <= 120
    assert wide.svg == narrow.svg


def test_an_about_is_one_line() -> None:
    """The line under the title must be printable, so that the SVG is well-formed."""
    with pytest.raises(KVPlanError, match="NAME: cannot read about of a picture"):
        show(engine("p")[0], about="a\x00b")


def test_pictures_of_the_documentation_are_what_its_code_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pictures in docs/pictures are byte for byte what the code on that page writes, and there are no others."""
    monkeypatch.chdir(tmp_path)
    assert wrong_prints(PICTURES / "README.md") == []
    written = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    assert written == {path.name: path.read_bytes() for path in PICTURES.glob("*.svg")}


@pytest.mark.parametrize("command, output", COMMANDS)
def test_commands_of_the_documentation_print_what_it_says(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, output: str
) -> None:
    """Each command on the page of pictures prints the line below it, or a whole drawing if there is none."""
    monkeypatch.chdir(tmp_path)
    run = cli(*shlex.split(command)[1:])
    assert run.status == 0
    assert run.out == output or (not output and run.out.count("\n") > 20)
