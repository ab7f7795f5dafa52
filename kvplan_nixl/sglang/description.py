"""Descriptions of an SGLang engine, and refusals of one that kvplan does not serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_serving, get_spec

from kvplan import KVPlanError, Model
from kvplan_nixl.settings import ModelNames
from kvplan_nixl.weights import weights_of

ReadConfig = Callable[..., tuple[dict[str, Any], dict[str, Any]]]
"""Reads the configuration of a path and a revision, as transformers' ``get_config_dict`` does."""


def model_of(
    files: tuple[str, str | None], read_config: ReadConfig, names: ModelNames, has_draft: bool
) -> Model:
    """Return the model by its files: SGLang writes into the configuration that it has read.

    If a draft of it has a cache, the model has its layers: of the same files, or of a draft model.
    The name says which, since decode needs the cache of its draft from prefill.
    """

    def fields(path: str, revision: str | None) -> Any:
        contents, _ = read_config(path, revision=revision)
        return contents

    def weights(path: str, revision: str | None) -> str:
        return names.weights or weights_of(path, revision)

    model_name = names.model or get_serving().served_model_name
    name = f"{model_name}, weights {weights(*files)}"
    if not has_draft:
        return Model.from_config(fields(*files), name)
    draft = get_spec()
    draft_files = (draft.speculative_draft_model_path, draft.speculative_draft_model_revision)
    if draft_files[0] in (None, files[0]):
        name = f"{name}, with draft layers"
        return Model.from_config(fields(*files), name, with_draft_layers=True)
    name = f"{name}, draft weights {weights(*draft_files)}"
    drafting = Model.from_config(fields(*draft_files), "draft")
    return Model.from_config(fields(*files), name).with_draft(drafting)


def dtype_name(dtype: Any) -> str | None:
    """Return the name of a dtype of torch, None for None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def require(field: str, expected: Any, got: Any) -> None:
    """Refuse an engine that the plugin does not serve, by a field of SGLang's or of its worker."""
    if got != expected:
        raise KVPlanError(
            "LAYOUT",
            "serve this SGLang by kvplan",
            expected=f"{field} = {expected}",
            got=f"{got}",
            **{field: got},
        )
