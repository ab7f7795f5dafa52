"""Speculative decoding: which drafts may run beside transfers, and the layers that they cache.

Tokens that a model has rejected are never handed over, whatever has drafted them. Some drafts have
a cache of their own, with the positions of the model's. Its layers move with those of the model, so
both engines must run the same draft, and the name of the model says which.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
from vllm.config import VllmConfig

from kvplan import KVPlanError, Model
from kvplan_nixl.weights import weights_of

WITHOUT_CACHE: Final = (
    "ngram",
    "ngram_gpu",
    "suffix",
    "medusa",
    "mlp_speculator",
    "custom_class",
)
"""Methods whose drafts cache nothing, or nothing that vLLM has a block table for."""

WITH_CACHE: Final = ("eagle", "eagle3", "mtp", "draft_model")
"""Methods whose drafts have layers with caches.

At a position, ``draft_model`` caches what the tokens up to there decide, and the others what the
next token decides too. Decode computes the last token of a prompt, so both are those of the prompt
wherever it reads.
"""


def check_drafts(config: VllmConfig) -> None:
    """Refuse speculative decoding whose caches are not known to be right. Raises ``LAYOUT``."""
    speculative: Any = config.speculative_config
    if speculative is None or speculative.method in WITHOUT_CACHE:
        return
    action = "transfer beside speculative decoding"
    if speculative.method not in WITH_CACHE:
        expected = f"a method of {', '.join((*WITHOUT_CACHE, *WITH_CACHE))}"
        raise KVPlanError("LAYOUT", action, expected=expected, got=str(speculative.method))
    # Each of several modules reads one token further than the one before it.
    if speculative.use_multi_module_mtp():
        expected = "one module that predicts tokens"
        raise KVPlanError("LAYOUT", action, expected=expected, got="several of them")
    # EAGLE numbers its layers after those of a stage, as another stage numbers the model's.
    if config.parallel_config.pipeline_parallel_size > 1:
        expected = "one pipeline stage, with drafts that have a cache"
        got = f"{config.parallel_config.pipeline_parallel_size}"
        raise KVPlanError("LAYOUT", action, expected=expected, got=got)


def with_drafts(model: Model, config: VllmConfig) -> Model:
    """Return a model with the draft layers that an engine caches beside its own, if any.

    Its name says which draft that is.
    """
    speculative: Any = config.speculative_config
    if speculative is None or speculative.method not in WITH_CACHE:
        return model
    target = config.model_config
    draft = speculative.draft_model_config
    draft_name = f"draft {speculative.method}"
    if speculative.method == "mtp":
        # Its layers are listed in the model's own file, and are like the model's.
        config_keys = target.hf_config.to_dict()
        layers = Model.from_config(config_keys, with_draft_layers=True).drafts
    else:
        # vLLM wraps the configuration of an EAGLE draft in one of its own.
        inner_config = getattr(draft.hf_config, "model", None) or draft.hf_config
        layers = Model.from_config(inner_config.to_dict()).layers
    if draft.model != target.model:
        assert config.kv_transfer_config is not None
        extra_config = config.kv_transfer_config.get_from_extra_config
        weights = weights_of(draft.model, draft.revision)
        draft_name += f" {extra_config('draft', draft.model)}, weights {weights}"
    return attrs.evolve(model, name=f"{model.name}, {draft_name}", drafts=layers)
