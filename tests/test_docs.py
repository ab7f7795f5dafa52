"""The book in docs/: its Python runs, its tables and its reference are complete, and it builds without a warning."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import kvplan
import kvplan.testing
from kvplan.verification import PROMISES
from tests.conftest import Cli
from tests.engines import outcomes
from tests.pages import ROOT, commands, fences, wrong_command, wrong_prints
from tests.sources import DOORS
from tests.test_imports import unlisted

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
AS_FILE = "write-a-connector.md"
"""A page that is one program, which starts processes: tests/nixl runs it."""

PROGRAMS = [name for name, path in PAGES.items() if "python" in dict(fences(path.read_text())) and name != AS_FILE]
ENTRY = r"^::: ([\w.]+)$"
COMMANDS = list(commands(PAGES["command-line.md"]))
ROOMS = [f"kvplan.{room}" for room in kvplan.PACKAGES if room != "testing"]
API = ["describe", "plan", "connect", "staging", "store"]
TROUBLES = "how-to/troubleshooting.md"
METRICS = ("how-to/vllm.md", TROUBLES)


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """Logs are as before after a page that turns them off, or sets up what NIXL's executor logs."""
    logger = logging.getLogger("kvplan_nixl")
    level, handlers, propagate = logger.level, [*logger.handlers], logger.propagate
    yield
    logging.disable(logging.NOTSET)
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagate


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_python_prints_what_the_page_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's Python blocks run in order, as one program; each prints the text block that follows it, or nothing."""
    monkeypatch.chdir(tmp_path)
    assert wrong_prints(PAGES[name]) == []


def test_python_is_on_every_page_that_teaches() -> None:
    """The pages with Python are the tutorial, every how-to, and those listed here."""
    how_to = {name for name in PAGES if name.startswith("how-to/")}
    assert {*PROGRAMS} == {
        "tutorial.md",
        "tour.md",
        "connectors.md",
        "handshake.md",
        *how_to,
    }


@pytest.mark.parametrize("command, output, status", COMMANDS)
def test_a_command_does_what_the_page_says(cli: Cli, command: str, output: str, status: int) -> None:
    """Each command on the page exits with the status and prints the lines shown, if run in the root of a checkout."""
    assert wrong_command(cli, command, output, status) == ""


def test_consoles_are_on_pages_that_are_run() -> None:
    """No other page shows a console."""
    shown = [name for name, path in PAGES.items() if list(commands(path))]
    assert shown == ["command-line.md"]


def test_tables_of_real_engines_are_those_of_the_file() -> None:
    """``python -m tests.engines.outcomes`` has written them, each once."""
    page = outcomes.PAGE.read_text()
    assert page == outcomes.written()
    assert sorted(marker for marker, _ in outcomes.MARKED.findall(page)) == sorted(outcomes.tables())


def test_the_reference_has_every_public_name() -> None:
    """Each name that a public module lists has one entry, under the name of that module or of a package above it."""
    found = [entry for name in PAGES if name.startswith("reference/") for entry in entries(name)]
    assert [entry for entry in found if found.count(entry) > 1] == []
    missing = [
        f"{door}.{name}"
        for door, listed in DOORS.items()
        for name in listed
        if door not in LOADED_BY_NAME and not {f"{above}.{name}" for above in above_of(door)} & {*found}
    ]
    assert missing == []


LOADED_BY_NAME = ("kvplan_nixl.vllm", "kvplan_nixl.vllm.nixl")
"""Classes that vLLM loads by names in its configuration, with methods that vLLM's own pages describe."""


def above_of(door: str) -> list[str]:
    """A module, and the packages that it is in."""
    parts = door.split(".")
    return [".".join(parts[:number]) for number in range(len(parts), 0, -1)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_pages_use_the_public_api(name: str) -> None:
    """What a page imports from kvplan and kvplan_nixl, these list."""
    programs = [text for language, text in fences(PAGES[name].read_text()) if language == "python"]
    assert [found for text in programs for found in unlisted(text)] == []


def entries(page: str) -> list[str]:
    """The objects that a page of the reference documents."""
    return re.findall(ENTRY, PAGES[page].read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "name, rows", [("reference/errors.md", kvplan.errors.CODES), ("how-to/debugging.md", PROMISES)]
)
def test_a_table_of_codes_is_that_of_the_code(name: str, rows: dict[str, str]) -> None:
    """The tables of error codes and of promises have exactly those of the code, in order, each with its meaning."""
    found = re.findall(r"^\| `([A-Z]+)` \| (.*) \|$", PAGES[name].read_text(), re.MULTILINE)
    assert found == list(rows.items())


def test_the_messages_to_look_for_are_those_of_the_code() -> None:
    """Each text that tables of the page on troubleshooting quote has codes and words of our messages."""
    texts = "\n".join(text for name in ("kvplan", "kvplan_nixl") for text in messages(ROOT / name))
    cells = re.findall(r"^\|(.*?\|.*?)\|", PAGES[TROUBLES].read_text(), re.MULTILINE)
    quoted = [text for text in re.findall(r"`([^`]+)`", "".join(cells)) if " " in text or text.isupper()]
    assert len(quoted) > 25
    for text in quoted:
        assert {*re.findall(r"^([A-Z]+)(?::|$)", text)} <= {*kvplan.errors.CODES}, text
        for words in re.split(rf"{'|'.join(kvplan.errors.CODES)}|\.\.\.|cannot|expected", text):
            assert words.strip(" :") in texts, text


def messages(folder: Path) -> list[str]:
    """All texts of a package's modules, also the constant parts of texts with values."""
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_the_metrics_of_the_guides_are_those_of_the_connector() -> None:
    """Guides name no other metric, and one names all. They are read from the source, since vLLM is not here."""
    source = (ROOT / "kvplan_nixl/vllm/metrics.py").read_text()
    names = {*re.findall(r'"(vllm:\w+)"', source)}
    assert len(names) == 20
    shown = {page: {*re.findall(r"vllm:(?:nixl|kvplan)_[a-z_]+[a-z]", PAGES[page].read_text())} for page in METRICS}
    for page, found in shown.items():
        assert {name.removesuffix("_total").removesuffix("_sum").removesuffix("_count") for name in found} <= names, (
            page
        )
    assert {name.removesuffix("_total") for name in shown["how-to/vllm.md"]} == names


def test_the_links_of_the_readme_lead_somewhere() -> None:
    """Each file that the README links to exists."""
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text())
    files = [target for target in targets if not urlsplit(target).scheme]
    assert files
    assert [target for target in files if not (ROOT / target).exists()] == []


class Links(HTMLParser):
    """The ids of a built page, the targets of its links, and everything that it loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := given.get(key))}
        if tag == "a":
            self.links.append(given.get("href") or "")
        elif tag in ("img", "link", "script", "iframe", "source"):
            self.loads += [value for key in ("src", "href") if (value := given.get(key))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built book. Every warning is an error; with ``--quiet``, mkdocs would not count them."""
    into = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(into)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return into


def test_the_book_has_every_page(site: Path) -> None:
    """The book builds, and contains each page of docs/."""
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")} - {Path("404")}
    assert built == {Path(re.sub("README$", "index", name.removesuffix(".md"))) for name in PAGES}


def test_a_public_function_has_an_entry_with_its_signature(site: Path) -> None:
    """The entry of a public function documents the function, also where a module has the same name."""
    pages = "".join((site / "reference" / f"{page}.html").read_text() for page in API)
    shown = set(re.findall(r'doc-function">\s*<h3 id="([\w.]+)"', pages))
    names = [f"{door}.{name}" for door in ROOMS for name in DOORS[door] if name not in kvplan.__all__]
    names += [f"kvplan.{name}" for name in kvplan.__all__]
    assert {name for name in names if inspect.isfunction(resolved(name))} <= shown


def resolved(name: str) -> object:
    """The object of a public name."""
    door, _, last = name.rpartition(".")
    return getattr(importlib.import_module(door), last)


def test_every_link_of_the_book_leads_somewhere(site: Path) -> None:
    """Each relative link leads to a file of the book, and to an id on that page if it names one."""
    pages = {path: Links(path) for path in site.rglob("*.html") if path.name != "404.html"}
    lost = []
    for page, its in pages.items():
        for link in (*its.links, *its.loads):
            parts = urlsplit(link)
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not parts.scheme and not target.exists():
                lost.append(f"{page.name}: {link}")
            if not parts.scheme and parts.fragment and parts.fragment not in pages[target].ids:
                lost.append(f"{page.name}: {link}")
    assert lost == []


def test_the_book_loads_nothing_from_elsewhere(site: Path) -> None:
    """Pages and their styles load nothing from the network."""
    loads = {load for path in site.rglob("*.html") for load in Links(path).loads}
    loads |= {url for path in site.rglob("*.css") for url in re.findall(r"url\(\s*[\"']?([^\"')]+)", path.read_text())}
    assert loads
    assert [load for load in loads if urlsplit(load).scheme not in ("", "data") or load.startswith("//")] == []
