"""What the code of this project needs to be shown in the book: an extension of griffe, by which mkdocstrings reads it.

In docstrings, doctests become fenced blocks, and roles become links where the book has what they name. Classes made by
attrs get the signature that attrs gives them. Names that a package shares with one of its modules are the package's.
Nothing is imported, so the book builds where NIXL is not installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|mod|data|attr):`~?([\w.]+)`")
DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
ATTRS = re.compile(r"attrs\.(frozen|define)\b(?!.*init=False)")


class Code(griffe.Extension):
    """Prepares each package once it is read."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called by griffe with a package and all that is in it."""
        for each in list(_objects(pkg)):
            if each.docstring is not None:
                each.docstring.value = _markdown(each.docstring.value, each)
            if isinstance(each, griffe.Class) and _made_by_attrs(each):
                init = griffe.Function("__init__", parameters=griffe.Parameters(*_parameters(each)))
                each.set_member("__init__", init)
        for name in pkg.exports or ():
            shadow = pkg.members.get(str(name))
            if isinstance(shadow, griffe.Module) and str(name) in shadow.members:
                alias = griffe.Alias(str(name), shadow.members[str(name)], parent=pkg)
                pkg.members[str(name)] = alias


def _objects(within: griffe.Object) -> Iterator[griffe.Object]:
    yield within
    for member in within.members.values():
        if not isinstance(member, griffe.Alias):
            yield from _objects(member)


def _markdown(text: str, within: griffe.Object) -> str:
    """A docstring as Markdown."""
    text = DOCTEST.sub(lambda found: _fence(found[0]), text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return ROLE.sub(lambda found: _link(found[1], within), text)


def _fence(example: str) -> str:
    lines = example.replace("<BLANKLINE>", "").splitlines()
    shown = "\n".join(re.sub(r"\s+# doctest: .*$", "", line) for line in lines)
    return f"```pycon\n{shown}\n```"


def _link(name: str, within: griffe.Object) -> str:
    """A link to what a role names, or its name alone where the book does not have it."""
    first, _, rest = name.partition(".")
    try:
        path = f"{within.resolve(first)}.{rest}".rstrip(".")
    except griffe.NameResolutionError:
        path = name
    return f'<autoref optional identifier="{path}"><code>{name.rpartition(".")[2]}</code></autoref>'


def _made_by_attrs(cls: griffe.Class) -> bool:
    """Whether attrs writes a class's ``__init__``, from its own fields alone."""
    return not cls.bases and any(ATTRS.match(str(decorator.value)) for decorator in cls.decorators)


def _parameters(cls: griffe.Class) -> Iterator[griffe.Parameter]:
    kind = griffe.ParameterKind.positional_or_keyword
    yield griffe.Parameter("self", kind=kind)
    for field in cls.attributes.values():
        if field.annotation is not None and "property" not in field.labels:
            given = _default(field.value)
            if given is not None:
                yield griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=given or None)


def _default(value: Any) -> str | None:
    """The default of a field: empty where there is none, None where the field is no parameter."""
    if value is None:
        return ""
    call = ast.parse(str(value), mode="eval").body
    if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "attrs.field"):
        return str(value)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if given.get("init") == "False":
        return None
    return f"{given['factory']}()" if "factory" in given else given.get("default", "")
