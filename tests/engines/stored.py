"""Judges stores: ``python -m tests.engines.stored [ROW ...]``. vLLM saves and is killed, another vLLM loads.

Answers must be those of the engine that saved, which computed everything, and vLLM must count the cached tokens. The
control has a store with the same pages of zeros: its answers differ, so that the bytes of pages matter.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvplan.store import FileBackend, read_file
from kvplan.store.pages import pack
from tests.engines.__main__ import ENGINE, FOLDER
from tests.engines.models import VOCABULARY, build
from tests.engines.pairs import side
from tests.engines.process import Engine, free_port

ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "blocks 32 to 64": ("llama", side(32), side(64)),
    "TP 1 to 2": ("llama", side(32), side(64, tp=2)),
    "TP 2 to 1": ("llama", side(64, tp=2), side(32)),
    "latents": ("deepseek-v3", side(32), side(64)),
}
"""A model, the engine that saves, and the one that loads."""

LENGTHS = (70, 130, 200)
MAX_TOKENS = 12


def start(model: str, settings: dict[str, Any], store: Path, name: str) -> Engine:
    """An engine with a store."""
    transfer = {
        "kv_connector": "KvplanStore",
        "kv_connector_module_path": "kvplan_nixl.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"folder": str(store)},
    }
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    folder = FOLDER / model
    if not folder.exists():
        build(model, folder)
    options = {**ENGINE, **settings, "model": str(folder), "kv_transfer_config": transfer}
    return Engine(options, FOLDER / "logs" / f"store {name}.log".replace(" ", "_"), free_port()).ready()


def answers(engine: Engine, prompts: list[list[int]], **marks: Any) -> list[tuple[list[int], int]]:
    """The tokens of each answer, and how many tokens of its prompt were cached."""
    return [(answer.tokens, answer.cached) for answer in engine.generate(prompts, MAX_TOKENS, **marks)]


def blank(store: Path) -> None:
    """Replace the data of all pages with zeros, with right digests."""
    backend = FileBackend(store)
    for entry in [*backend.entries()]:
        header, data = read_file(backend, entry.name)
        backend.delete(entry.name)
        backend.put(entry.name, pack(header.key, header.stop, header.part, memoryview(bytes(len(data)))))


def damage(store: Path) -> None:
    """Flip a bit of every page that is not the first."""
    backend = FileBackend(store)
    for entry in [*backend.entries()]:
        header, _ = read_file(backend, entry.name)
        if header.stop > 64:
            path = backend.path_of(entry.name)
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))


def saved(engine: Engine) -> None:
    """Wait until an engine holds no blocks: the last answers are saved."""
    while engine.held()[0]:
        pass


def judge(row: str) -> str:
    """What came of a row."""
    model, saves, loads = ROWS[row]
    rng = random.Random(row)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    with TemporaryDirectory() as temporary:
        store = Path(temporary) / "kv"
        with closing_engine(start(model, saves, store, "saves")) as writer:
            computed = answers(writer, prompts)
            saved(writer)
        with closing_engine(start(model, loads, store, "loads")) as reader:
            loaded = answers(reader, prompts)
            salted = answers(reader, prompts, salt="blue")
            saved(reader)
            blank(store)
            blanked = answers(reader, prompts)
            damage(store)
            damaged = answers(reader, prompts)
    tokens = [answer for answer, _ in computed]
    findings = {
        "same tokens": [answer for answer, _ in loaded] == tokens,
        "hits": [cached for _, cached in loaded] == [length // 64 * 64 for length in LENGTHS],
        "another salt: same tokens": [answer for answer, _ in salted] == tokens,
        "another salt: no hits": not any(cached for _, cached in salted),
        "pages of zeros: other tokens": all(a != b for (a, _), b in zip(blanked, tokens, strict=True)),
        "damaged pages: same tokens": [answer for answer, _ in damaged][1:] == tokens[1:],
        "damaged pages: no hits": not any(cached for _, cached in damaged[1:]),
    }
    wrong = [name for name, is_so in findings.items() if not is_so]
    cached = [[number for _, number in each] for each in (computed, loaded, salted, blanked, damaged)]
    return f"{row}: {'right' if not wrong else 'WRONG: ' + ', '.join(wrong)}; cached {cached}"


@contextmanager
def closing_engine(engine: Engine) -> Iterator[Engine]:
    """Kills an engine at the end."""
    try:
        yield engine
    finally:
        engine.kill()


def main() -> None:
    """Judges rows."""
    for row in sys.argv[1:] or ROWS:
        print(judge(row), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    main()
