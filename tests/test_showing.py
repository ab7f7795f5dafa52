"""show and ``kvplan show``: one function for pictures, and a command that prints or writes them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvplan import Blocks, KVPlanError, Picture, Worker, plan_mesh, plan_reads, show
from tests.conftest import Cli
from tests.small import engine

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
COMMANDS = re.findall(r"^\$ kvplan (show .* --svg .*)$", (PICTURES / "README.md").read_text(), re.MULTILINE)
SMALL = ("show", "qwen3-0.6b", "--src", "tp=2,layout=LBNHC", "--dst", "tp=4,block=8")


def test_a_picture_is_text_and_svg() -> None:
    """A picture prints as text, shows as SVG in a notebook, and its repr is one short line."""
    picture = show(plan_reads(engine("decode")[0], engine("prefill", tp=2)), about="small")
    assert isinstance(picture, Picture)
    assert str(picture) == picture.text
    assert picture._repr_svg_() == picture.svg
    assert repr(picture) == "<Picture: decode/0 reads from prefill/0-1>"
    assert ">small</text>" in picture.svg


def test_a_request_changes_the_picture() -> None:
    """With block tables, positions are those of the request; without, those of a sample."""
    plan = plan_reads(engine("decode", tokens=8)[0], engine("prefill"))
    picture = show(plan, local={"attn": Blocks([7])}, remote={"attn": Blocks([4, 9])}, tokens=(3, 7))
    assert "positions [3, 7) of" in picture.text
    assert "block id 9" in picture.svg
    assert "positions [0, 8) of" in show(plan).text


@pytest.mark.parametrize("side, given", [("local", {"tokens": (0, 4)}), ("remote", {"local": {"attn": Blocks([7])}})])
def test_half_a_request_is_refused(side: str, given: dict[str, object]) -> None:
    """A request without all its block tables is refused, not drawn as something else."""
    plan = plan_reads(engine("decode")[0], engine("prefill"))
    with pytest.raises(KVPlanError, match=f"BLOCKS: cannot bind {side} group 'attn'"):
        show(plan, **given)  # type: ignore[arg-type]


def test_what_has_nothing_to_show_is_drawn_as_that() -> None:
    """A worker without views and a plan that moves nothing have empty pictures."""
    nothing = Worker("decode", 0, (), (), ())
    for value, title in ((nothing, "One block of decode/0"), (plan_reads(nothing, engine("p")), "reads from nobody")):
        picture = show(value)
        assert picture.text == ""
        assert picture.title.endswith(title)
        ElementTree.fromstring(picture.svg)


@pytest.mark.parametrize("value", [None, "worker", plan_mesh(engine("d"), engine("p"))])
def test_other_values_are_refused(value: object) -> None:
    """Only workers and plans have pictures."""
    with pytest.raises(KVPlanError, match="TYPE: cannot show a value: expected a Worker or a TransferPlan, got "):
        show(value)


def test_an_about_is_one_line() -> None:
    """What stands under the title is printable, so that the picture is well formed."""
    with pytest.raises(KVPlanError, match="NAME: cannot read about of a picture"):
        show(engine("p")[0], about="a\x00b")


def test_the_command_draws_both_sides_and_the_plan(cli: Cli) -> None:
    """Without options it prints a block of a source, a block of the destination, and which bytes go where."""
    run = cli(*SMALL, "--rank", "3")
    assert (run.status, run.err) == (0, "")
    title, *rest = run.out.splitlines()
    assert title == "qwen3-0.6b, tp=2,layout=LBNHC -> tp=4,block=8"
    headings = [line for line in rest if re.match(r"One block of|dst/3 reads", line)]
    assert headings == ["One block of src/1", "One block of dst/3", "dst/3 reads from src/1"]
    assert "layers.0-27.attn" in rest


def test_the_command_writes_a_picture(cli: Cli, tmp_path: Path) -> None:
    """--svg writes the picture of the plan, and says nothing."""
    path = tmp_path / "plan.svg"
    run = cli(*SMALL, "--svg", str(path))
    assert (run.status, run.out, run.err) == (0, "", "")
    assert ElementTree.parse(path).getroot().get("class") == "kvplan"


def test_the_command_as_json(cli: Cli) -> None:
    """--json has every copy of what is drawn, with both ends."""
    document = json.loads(cli(*SMALL, "--json").out)
    assert (document["model"], document["src"], document["worker"]) == ("qwen3-0.6b", "tp=2,layout=LBNHC", "dst/0")
    (panel,) = document["panels"]
    assert (panel["layers"], panel["tokens"], len(panel["copies"])) == (28, [0, 16], 32)
    assert panel["copies"][1] == {
        "what": "layers.0.attn: head [0, 1) of 8, position [1, 2), kv [0, 2) of 2, dim [0, 128) of 128",
        "bytes": 512,
        "descriptor_bytes": 512,
        "src": {"worker": "src/0", "block": 0, "block_id": 0, "region": "layers.0.attn", "offset": 2048},
        "dst": {"worker": "dst/0", "block": 0, "block_id": 0, "region": "layers.0.attn", "offset": 512},
    }


@pytest.mark.parametrize(
    "arguments, start",
    [
        (("--rank", "4"), "RANGE: cannot read --rank"),
        (("--rank", "x"), "TYPE: cannot read --rank"),
        (("--svg", "/"), "NAME: cannot write a picture: expected a path that can be written to, got '/': "),
        (("--svg", "a\0b"), "NAME: cannot write a picture"),
    ],
)
def test_what_cannot_be_drawn_is_refused(cli: Cli, arguments: tuple[str, ...], start: str) -> None:
    """A bad rank and a bad path are refused with one line and exit status 2."""
    run = cli(*SMALL, *arguments)
    assert (run.status, run.out) == (2, "")
    assert run.err.startswith(start)
    assert run.err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_pictures_of_the_documentation_are_what_their_commands_write(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Each picture in docs/pictures is, byte by byte, what the command beside it writes today."""
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)
    assert cli(*arguments).status == 0
    name = arguments[arguments.index("--svg") + 1]
    assert (tmp_path / name).read_bytes() == (PICTURES / name).read_bytes()


def test_every_picture_of_the_documentation_has_its_command() -> None:
    """No picture lies there that no command is said to write."""
    assert {path.name for path in PICTURES.glob("*.svg")} == {shlex.split(command)[-1] for command in COMMANDS}
