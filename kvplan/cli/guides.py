"""Guides in YAML: the engines that the documents of a file start, each by a name.

An engine is a mapping with a ``command`` or ``args`` that start vLLM or SGLang, as a container of
Kubernetes or a service of compose has them, or a text with such a command line, as values files and
scripts in a ConfigMap have. Its name is its own, or its key, with those of what is around it where
two are alike.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

STARTS: Final = (
    r"\b(?:vllm|sglang) serve\b|vllm\.entrypoints|sglang\.launch_server"
    r"|--(?:kv-transfer-config|tensor-parallel-size|tp-size|disaggregation-mode)\b"
)
"""What the command line of an engine has. Charts have options of engines without the command."""


def is_guide(text: str) -> bool:
    """Return whether a text is YAML with mappings, and no log."""
    return re.search(r"^\s*(- )?[\w.-]+:( |$)", text, re.MULTILINE) is not None and bool(
        _parsed(text)
    )


def engines_of(text: str) -> dict[str, str]:
    """Return the command line of each engine of a guide, with its environment before it, by name.

    >>> engines_of('''
    ... services:
    ...   prefill: {command: [vllm, serve, m, --tensor-parallel-size, "2"], environment: {A: b}}
    ...   proxy: {command: [python3, -m, proxy]}
    ... ''')
    {'prefill': 'A=b vllm serve m --tensor-parallel-size 2'}
    """
    found = [engine for document in _parsed(text) for engine in _engines(document, (), "engine")]
    # as few names around an engine as tell it from the others
    names = [path[-1:] for path, _ in found]
    for length in range(2, 5):
        times = Counter(names)
        names = [
            path[-length:] if times[name] > 1 else name
            for (path, _), name in zip(found, names, strict=True)
        ]
    return {"/".join(name): command for name, (_, command) in zip(names, found, strict=True)}


def _parsed(text: str) -> list[Any]:
    """The documents of a text that are mappings or lists, none if it is not YAML."""
    try:
        return [
            document
            for document in yaml.safe_load_all(text)
            if isinstance(document, Mapping | list)
        ]
    except yaml.YAMLError:
        return []


def _engines(node: Any, names: tuple[str, ...], key: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names of each engine of a node, which has a key, and its command line."""
    if isinstance(node, Mapping):
        name = _name_of(node)
        command = " ".join(filter(None, (_words(node.get(each)) for each in ("command", "args"))))
        if re.search(STARTS, command):
            environment = _environment(node.get("env") or node.get("environment"))
            yield (*names, name or key), f"{environment}{command}"
            return
        names = (*names, name) if name else names
        for each, value in node.items():
            yield from _engines(value, names, str(each))
    elif isinstance(node, list):
        for value in node:
            yield from _engines(value, names, key)
    elif isinstance(node, str) and re.search(STARTS, node):
        yield (*names, key), node


def _name_of(node: Mapping[Any, Any]) -> str | None:
    """The name that a mapping gives itself, as containers and documents of Kubernetes do."""
    metadata = node.get("metadata")
    name = node.get("name") or (metadata.get("name") if isinstance(metadata, Mapping) else None)
    return name if isinstance(name, str) else None


def _words(value: Any) -> str:
    """A command or its arguments as one text. A script that a shell is given stays as it is."""
    if isinstance(value, list):
        words = [str(word) for word in value]
        return " ".join(
            word if re.search(rf"\s.*(?:{STARTS})|(?:{STARTS}).*\s", word) else shlex.quote(word)
            for word in words
        )
    return value if isinstance(value, str) else ""


def _environment(value: Any) -> str:
    """Settings before a command, as a shell has them."""
    if isinstance(value, Mapping):
        items = [(str(name), text) for name, text in value.items()]
    elif isinstance(value, list):
        items = [
            (str(each["name"]), each.get("value"))
            if isinstance(each, Mapping) and "name" in each
            else (str(each).partition("=")[0], str(each).partition("=")[2])
            for each in value
        ]
    else:
        return ""
    return "".join(
        f"{name}={shlex.quote(str(text))} "
        for name, text in items
        if isinstance(text, str | int | bool)
    )
