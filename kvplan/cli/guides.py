"""Guides in YAML: the engines that the documents of a file start, each by a name.

An engine is a mapping with a ``command`` or ``args`` that start vLLM or SGLang, as a container of
Kubernetes or a service of compose has them, or a text with such a command line, as values files and
scripts in a ConfigMap have. Its name is its own, or its key, with those of what is around it where
two are alike.

An untrusted guide may grow: an alias repeats a whole part, and parts of parts are aliases too. So
scalars are read as they are written, and what is too large is refused.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import attrs
import yaml

from kvplan._checks import at_most

MAX_CHARACTERS: Final = 1 << 20
"""The length of a guide. A longer text is a log."""

MAX_SIZE: Final = 1 << 22
"""The characters of a guide with all that aliases repeat. A node counts as :data:`NODE` of them."""

NODE: Final = 1 << 5

MAX_LEVELS: Final = 100

TYPED: Final = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "binary", "timestamp")
)
"""The tags of scalars of which YAML makes values."""

STARTS: Final = (
    r"\b(?:vllm|sglang) serve\b|vllm\.entrypoints|sglang\.launch_server"
    r"|--(?:kv-transfer-config|tensor-parallel-size|tp-size|disaggregation-mode)\b"
)
"""What the command line of an engine has. Charts have options of engines without the command."""


DEFAULT: Final = r"\$\{\w+:?-([^{}]*)\}"
"""A variable of compose or a shell with a value for when it is not set."""


def is_guide(text: str) -> bool:
    """Return whether a text is YAML with mappings, and no log."""
    has_keys = re.search(r"^[ \t]*(- )?[\w.-]+:( |$)", text, re.MULTILINE) is not None
    return has_keys and len(text) <= MAX_CHARACTERS and bool(_parsed(text))


def engines_of(text: str) -> dict[str, str]:
    """Return the command line of each engine of a guide, with its environment before it, by name.

    Raises ``RANGE`` for a guide that is too large.

    >>> engines_of('''
    ... services:
    ...   prefill: {command: [vllm, serve, "${M:-m}", --tp-size, "2"], environment: {A: b}}
    ...   proxy: {command: [python3, -m, proxy]}
    ... ''')
    {'prefill': 'A=b vllm serve m --tp-size 2'}
    """
    guide = _Guide()
    for document in _parsed(text):
        guide.read(document, (), "engine")
    found = guide.engines
    # as few names around an engine as tell it from the others
    names = [path[-1:] for path, _ in found]
    for length in range(2, 5):
        times = Counter(names)
        names = [
            path[-length:] if times[name] > 1 else name
            for (path, _), name in zip(found, names, strict=True)
        ]
    return {"/".join(name): command for name, (_, command) in zip(names, found, strict=True)}


class _Loader(yaml.SafeLoader):
    """Reads scalars as they are written: no dates, numbers or flags are made of them."""

    _level = 0

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag in TYPED:
            return self.construct_scalar(node)
        return super().construct_object(node, deep)

    def compose_node(self, parent: Any, index: Any) -> Any:
        at_most(MAX_LEVELS, self._level, "levels of a guide", "read it")
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        return node


def _parsed(text: str) -> list[Any]:
    """The documents of a text that are mappings or lists, none if it is not YAML."""
    try:
        documents = [*yaml.load_all(text, _Loader)]
    except yaml.YAMLError:
        return []
    return [document for document in documents if isinstance(document, Mapping | list)]


@attrs.define
class _Guide:
    """The names around each engine of a guide, and its command line."""

    engines: list[tuple[tuple[str, ...], str]] = attrs.field(factory=list)
    _size: int = 0

    def read(self, node: Any, names: tuple[str, ...], key: str, level: int = 0) -> None:
        """Read a node, which has a key, and all that is in it. Raises ``RANGE``."""
        at_most(MAX_LEVELS, level, "levels of a guide", "read it")
        self._add(node)
        if isinstance(node, Mapping):
            name = _name_of(node)
            command = " ".join(
                filter(None, (self._words(node.get(each)) for each in ("command", "args")))
            )
            if re.search(STARTS, command):
                environment = _environment(node.get("env") or node.get("environment"))
                command = f"{environment}{command}"
                self._add(command)
                self.engines.append(((*names, name or key), command))
                return
            names = (*names, name) if name else names
            for each, value in node.items():
                self.read(value, names, str(each), level + 1)
        elif isinstance(node, list):
            for value in node:
                self.read(value, names, key, level + 1)
        elif isinstance(node, str) and re.search(STARTS, node):
            self.engines.append(((*names, key), node))

    def _add(self, node: Any) -> None:
        """Note that a node was read."""
        self._size += NODE + (len(node) if isinstance(node, str) else 0)
        at_most(MAX_SIZE, self._size, "characters of a guide, with aliases", "read it")

    def _words(self, value: Any) -> str:
        """A command or its arguments as one text. A script that a shell is given stays as it is."""
        if isinstance(value, list):
            words = [word for word in value if isinstance(word, str)]
            for word in words:
                self._add(word)
            words = [re.sub(DEFAULT, r"\1", word) for word in words]
            return " ".join(word if _is_script(word) else shlex.quote(word) for word in words)
        return re.sub(DEFAULT, r"\1", value) if isinstance(value, str) else ""


def _is_script(word: str) -> bool:
    """Whether a word has the start of an engine, and a space before or after it."""
    starts = [*re.finditer(STARTS, word)]
    if not starts:
        return False
    before, after = word[: starts[-1].start()], word[starts[0].end() :]
    return re.search(r"\s", before) is not None or re.search(r"\s", after) is not None


def _name_of(node: Mapping[Any, Any]) -> str | None:
    """The name that a mapping gives itself, as containers and documents of Kubernetes do."""
    metadata = node.get("metadata")
    name = node.get("name") or (metadata.get("name") if isinstance(metadata, Mapping) else None)
    return name if isinstance(name, str) else None


def _environment(value: Any) -> str:
    """Settings before a command, as a shell has them."""
    if isinstance(value, Mapping):
        items = [*value.items()]
    elif isinstance(value, list):
        items = [
            (each.get("name"), each.get("value"))
            if isinstance(each, Mapping)
            else f"{each}".partition("=")[::2]
            for each in value
            if isinstance(each, Mapping | str)
        ]
    else:
        return ""
    return "".join(f"{name}={shlex.quote(text)} " for name, text in items if isinstance(text, str))
