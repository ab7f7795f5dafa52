"""The command models: which models come with kvplan, which types it reads, what each caches."""

from __future__ import annotations

import click

from kvplan.cli.caches import cache_lines, caches_of
from kvplan.cli.console import echo_json, print_lines, wrapped
from kvplan.cli.model_files import load
from kvplan.cli.options import assumed_lines, json_option, model_argument
from kvplan.models import FAMILIES, Model


@click.command("models")
@model_argument(required=False)
@json_option
def models_command(model: str | None, like: str | None, as_json: bool) -> int:
    """List shipped models and known types, or what MODEL caches.

    \b
    kvplan models
    kvplan models qwen3-next-80b

    Bytes are those of a whole engine that holds everything once, at the model's own dtypes.

    Exit status: 0 done, 2 refused.
    """
    # without MODEL all shipped ones, and all types
    models = {name: Model.shipped(name) for name in Model.names()} if model is None else {}
    if model is not None:
        models[model] = load(model, None, like)
    types = sorted(FAMILIES) if model is None else []
    if as_json:
        documents = {}
        for name, listed in models.items():
            documents[name] = [cache.to_json() for cache in caches_of(listed)]
        echo_json({"models": documents, "types": types})
        return 0
    lines = []
    for name, listed in models.items():
        lines += [*assumed_lines(name, listed, like), name, *cache_lines(listed)]
    if types:
        lines += ["", f"{len(types)} types of config.json", f"  {', '.join(types)}"]
    print_lines(wrapped(lines))
    return 0
