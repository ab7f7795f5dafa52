"""The matrix: which cases a model has, how each is decided, and what the command prints and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplan import KVPlanError
from kvplan.cli import matrix, trials
from kvplan.cli.matrix import CASES, Case, Cell, cases, cells, markdown, shortened
from kvplan.cli.trials import Request
from kvplan.models.model import Model
from kvplan.verification.report import Report
from tests.conftest import Cli

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
TINY = shortened(Model.from_config(CONFIG, "tiny"))
HALVED = Case("TP", "tp=1", "tp=2")
IMPOSSIBLE = Case("context", "tp=16,dcp=2", "tp=16,dcp=8", "token")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The path of a small model's config.json."""
    written = tmp_path / "config.json"
    written.write_text(json.dumps(CONFIG))
    return str(written)


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """One case that is possible and one that is not, in place of all."""
    monkeypatch.setattr(matrix, "CASES", (HALVED, IMPOSSIBLE))


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification that finds a wrong byte, whatever it is given."""
    failed = Report(1, 1, 1, checked=("VALUE",), failures=(("VALUE", "byte 3 is\nanother"),))
    monkeypatch.setattr(trials, "verify", lambda *args, **kwargs: failed)


@pytest.mark.parametrize("name", Model.names())
def test_a_shortened_model_has_every_kind_of_layer(name: str) -> None:
    """Few layers are left, in their order, at least one of each kind and two where there are two."""
    whole = Model.shipped(name)
    few = shortened(whole)
    rest = iter(whole.layers)
    assert all(layer in rest for layer in few.layers)
    assert all(few.layers.count(layer) >= min(whole.layers.count(layer), 2) for layer in whole.layers)
    assert 4 <= len(few.layers) <= 6


def test_a_short_model_stays_whole() -> None:
    """A model of one layer keeps it."""
    assert len(shortened(Model.from_config({**CONFIG, "num_hidden_layers": 1})).layers) == 1


@pytest.mark.parametrize(
    "name, missing",
    [
        ("llama-3.1-8b", {"convolution", "pools"}),
        ("gpt-oss-20b", {"convolution"}),
        ("deepseek-v3", {"convolution", "K and V", "pools", "scales"}),
        ("falcon-mamba-7b", {"K and V", "block", "context", "kernel blocks", "pools", "scales"}),
        ("granite-4.0-h-tiny", set()),
    ],
)
def test_a_model_has_the_cases_that_mean_something_to_it(name: str, missing: set[str]) -> None:
    """Cases about an axis that the model lacks are left out, and no others."""
    assert {case.differs for case in CASES} - {case.differs for case in cases(Model.shipped(name))} == missing


def test_every_case_of_a_small_model_is_decided() -> None:
    """Each case of a model with 4 heads is verified, none left out, and moves at least its positions' bytes."""
    decided = list(cells(TINY))
    assert [cell.case for cell in decided] == list(cases(TINY))
    assert {cell.verdict for cell in decided} == {"verified"}
    for cell in decided:
        assert cell.trial is not None
        if cell.case.bits is not None:
            continue
        assert cell.trial.report.num_bytes >= 145 * 4 * 4 * 2 * 16 * 2, "145 tokens, 4 layers, K and V of 4 heads"


def test_uneven_stages_are_those_of_the_model() -> None:
    """All layers but one stand on the second stage, however many there are."""
    assert [case.src for case in cases(TINY) if case.src.startswith("stages")] == ["stages=1+3"]


def test_scales_move_in_a_cell_of_their_own() -> None:
    """A quantized case moves a byte for each value and a scale for each head of a token."""
    moved = [cell for cell in cells(TINY) if cell.case.bits == 8]
    assert len(moved) == 2
    for cell in moved:
        assert cell.trial is not None
        assert cell.trial.report.num_bytes == 145 * 4 * 4 * 2 * (16 + 4), "145 tokens, 4 layers, K and V of 4 heads"
        assert cell.to_json()["differs"] == "scales, 8 bits"


@pytest.mark.usefixtures("two_cases")
def test_a_refusal_is_a_cell_with_its_reason() -> None:
    """A pair that is refused doesn't stop the rest, and its cell says why in the words of the error."""
    verified, refused = cells(TINY)
    assert (verified.verdict, verified.reason) == ("verified", None)
    assert refused.verdict == "refused"
    assert str(refused).startswith("refused, LAYOUT: cannot spread positions of tiny: expected dcp <= 4")


@pytest.mark.usefixtures("two_cases", "wrong")
def test_wrong_bytes_are_a_cell_of_their_own() -> None:
    """A pair whose bytes differ is neither verified nor refused, and told in one line."""
    found = next(cells(TINY))
    assert (found.verdict, str(found)) == ("wrong", "wrong, VALUE: byte 3 is another")


@pytest.mark.usefixtures("two_cases")
def test_a_check_refuses_before_anything_moves() -> None:
    """What the caller can't carry out is refused in its words."""

    def check(request: Request) -> None:
        raise KVPlanError("MEMORY", "carry it out", expected="more", got="less")

    first = next(cells(TINY, check))
    assert (first.verdict, first.reason) == ("refused", "MEMORY: cannot carry it out: expected more, got less")


def test_the_table_has_a_line_for_each_cell() -> None:
    """The Markdown table has four columns in every line, also where a reason holds a bar."""
    refusal = KVPlanError("LAYOUT", "do it", expected="a|b", got="c")
    lines = list(markdown([Cell(HALVED, refusal=refusal)] * 2))
    assert len(lines) == 4
    assert all(line.replace("\\|", "").count("|") == 5 for line in lines)


@pytest.mark.usefixtures("two_cases")
def test_the_command_prints_the_table(cli: Cli, path: str) -> None:
    """The command prints a title and the table, and exits 0 where a case is refused with a reason."""
    run = cli("matrix", path)
    assert (run.status, run.err) == (0, "")
    # By hand: on 2 workers and 4 layers, 8 whole blocks of 2 heads in one piece, 2 cut blocks with each head apart.
    title, blank, *table = run.out.splitlines()
    assert (title, blank) == (f"{path}, 4 of 9 layers, positions [5, 150):", "")
    assert table[2] == "| TP | tp=1 | tp=2 | verified: 96 descriptors of 384 bytes to 2048 bytes |"
    assert table[3].startswith("| context | tp=16,dcp=2 | tp=16,dcp=8 | refused, LAYOUT: ")
    assert len(table) == 4


@pytest.mark.usefixtures("two_cases")
def test_the_command_prints_one_json_document(cli: Cli, path: str) -> None:
    """With --json each cell is an object: the pair, the verdict, and the reason or what moved."""
    run = cli("matrix", path, "--json")
    document = json.loads(run.out)
    verified, refused = document.pop("cells")
    assert document == {"model": path, "layers": {"moved": 4, "of": 9}, "tokens": [5, 150]}
    assert (verified["src"], verified["dst"], verified["verdict"]) == ("tp=1", "tp=2", "verified")
    assert verified["bytes"] == 145 * 4 * 4 * 2 * 16 * 2
    assert verified["lengths"] == [384, 2048]
    assert refused["reason"].startswith("LAYOUT: cannot spread positions")
    assert "bytes" not in refused


@pytest.mark.usefixtures("two_cases", "wrong")
def test_the_command_fails_where_bytes_differ(cli: Cli, path: str) -> None:
    """A cell whose bytes are wrong makes the exit status 1."""
    run = cli("matrix", path)
    assert run.status == 1
    assert "| wrong, VALUE: byte 3 is another |" in run.out


def test_an_unknown_model_is_refused(cli: Cli) -> None:
    """A model that can't be loaded is one line and exit status 2."""
    run = cli("matrix", "llama-9")
    assert (run.status, run.out) == (2, "")
    assert run.err.startswith("CONFIG: cannot load a model")
