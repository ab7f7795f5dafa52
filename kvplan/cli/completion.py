"""What a shell completes: shipped models, files, types of config.json, keys of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click
from click.shell_completion import CompletionItem

from kvplan.cli.defaults import ENGINES
from kvplan.models import FAMILIES, Model


def completed_models(
    context: click.Context,
    argument: click.Parameter,
    text: str,
) -> list[CompletionItem]:
    """Return the shipped models that begin with a text, or else files.

    >>> [item.value for item in completed_models(None, None, "granite-4.0-h-t")]
    ['granite-4.0-h-tiny']
    >>> [item.type for item in completed_models(None, None, "./conf")]
    ['file']
    """
    # a text that begins no name is the path of a config.json
    names = [name for name in Model.names() if name.startswith(text)]
    return [CompletionItem(name) for name in names] or [CompletionItem(text, type="file")]


def completed_types(
    context: click.Context,
    option: click.Parameter,
    text: str,
) -> list[CompletionItem]:
    """Return the values of ``model_type`` that begin with a text.

    >>> [item.value for item in completed_types(None, None, "gpt_")]
    ['gpt_bigcode', 'gpt_neo', 'gpt_neox', 'gpt_neox_japanese', 'gpt_oss']
    """
    return [CompletionItem(name) for name in FAMILIES if name.startswith(text)]


def completed_keys(values: Mapping[str, Sequence[str]], text: str) -> list[CompletionItem]:
    """Return what may follow in ``vllm,tp=4,layout=LBNHC``: engines, keys, or values of a key.

    ``values`` are those of each key that can be listed.

    >>> keys = {"tp": (), "kv": ("axis", "split"), "kernel": ()}
    >>> [item.value for item in completed_keys(keys, "vllm,tp=4,k")]
    ['vllm,tp=4,kv=', 'vllm,tp=4,kernel=']
    >>> [item.value for item in completed_keys(keys, "kv=s")], len(completed_keys(keys, ""))
    (['kv=split'], 5)
    """
    # what stands before the last comma is there already
    before, comma, last = text.rpartition(",")
    before += comma
    key, equals, value = last.partition("=")
    if equals:
        # a key of numbers has no values to list
        words = [f"{key}={word}" for word in values.get(key, ()) if word.startswith(value)]
    else:
        given_keys = {item.partition("=")[0] for item in before.split(",")}
        words = [f"{name}=" for name in values if name not in given_keys]
        # the name of an engine comes first
        words += [] if before else [f"{name}," for name in ENGINES]
        words = [word for word in words if word.startswith(last)]
    return [CompletionItem(before + word) for word in words]
