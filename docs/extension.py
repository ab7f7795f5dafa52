"""Prepares the package for the book: an extension of griffe, the parser through which mkdocstrings reads the source.

It turns doctests into fenced blocks and roles (``:func:`plan_reads```) into links, and gives attrs classes the
signature of the ``__init__`` that attrs writes. Where a package exports a name that one of its modules also has, such
as the function ``kvplan.plan.tails``, the name means what the package exports.

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
    """Prepares each top-level package after griffe has read it."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """griffe calls this with a package and all its members."""
        for each in list(_objects(pkg)):
            if each.docstring is not None:
                each.docstring.value = _markdown(each.docstring.value, each)
            if isinstance(each, griffe.Class) and _made_by_attrs(each):
                init = griffe.Function("__init__", parameters=griffe.Parameters(*_parameters(each)))
                each.set_member("__init__", init)
        for each in list(_objects(pkg)):
            if isinstance(each, griffe.Module):
                _prefer_exports(each)


def _objects(within: griffe.Object) -> Iterator[griffe.Object]:
    yield within
    for member in within.members.values():
        if not isinstance(member, griffe.Alias):
            yield from _objects(member)


def _prefer_exports(package: griffe.Module) -> None:
    """Point each exported name that griffe takes for a module of that name at the module's member instead."""
    for name in map(str, package.exports or ()):
        found = package.members.get(name)
        try:
            module = found.final_target if isinstance(found, griffe.Alias) else found
        except griffe.AliasResolutionError:  # the name comes from a package that griffe has not read
            continue
        if isinstance(module, griffe.Module) and name in module.members:
            package.members[name] = griffe.Alias(name, module.members[name], parent=package)


def _markdown(text: str, within: griffe.Object) -> str:
    """A docstring as Markdown."""
    text = DOCTEST.sub(lambda found: _fence(found[0]), text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return ROLE.sub(lambda found: _link(found[1], within), text)


def _fence(example: str) -> str:
    """A doctest as a fenced block, without doctest's own directives."""
    lines = example.replace("<BLANKLINE>", "").splitlines()
    shown = "\n".join(re.sub(r"\s+# doctest: .*$", "", line) for line in lines)
    return f"```pycon\n{shown}\n```"


def _link(name: str, within: griffe.Object) -> str:
    """A link to the object that a role names; plain code if the book has no entry for it."""
    first, _, rest = name.partition(".")
    try:
        path = f"{within.resolve(first)}.{rest}".rstrip(".")
    except griffe.NameResolutionError:
        path = name
    return f'<autoref optional identifier="{path}"><code>{name.rpartition(".")[2]}</code></autoref>'


def _made_by_attrs(cls: griffe.Class) -> bool:
    """Whether attrs writes the class's ``__init__``, from the class's own fields alone."""
    return not cls.bases and any(ATTRS.match(str(decorator.value)) for decorator in cls.decorators)


def _parameters(cls: griffe.Class) -> Iterator[griffe.Parameter]:
    """The parameters of the ``__init__`` that attrs writes."""
    kind = griffe.ParameterKind.positional_or_keyword
    yield griffe.Parameter("self", kind=kind)
    for field in cls.attributes.values():
        if field.annotation is not None and "property" not in field.labels:
            given = _default(field.value)
            if given is not None:
                yield griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=given or None)


def _default(value: Any) -> str | None:
    """A field's default: empty if it has none, None if the field is not a parameter."""
    if value is None:
        return ""
    call = ast.parse(str(value), mode="eval").body
    if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "attrs.field"):
        return str(value)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if given.get("init") == "False":
        return None
    return f"{given['factory']}()" if "factory" in given else given.get("default", "")
