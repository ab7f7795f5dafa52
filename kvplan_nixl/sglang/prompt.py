"""Prompts: a digest of SGLang's own request binds a room to its prompt."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any, Final

import numpy as np
from sglang.srt.runtime_context import get_serving

from kvplan.connector import prompt_digest

FIRST_WEIGHTS: Final = "default"
"""The version of the weights, in SGLang's words, until another one is named."""


def prompt_of(req: Any, num_tokens: int) -> str:
    """Digest the first positions of a request, and the facts that decide their cache or its owner.

    SGLang makes the token ids of images of the images' hashes, and the id of an adapter of its name
    and path.
    """
    facts = []
    # The engine's name for its model has the weights of its start; an update may name others.
    version = get_serving().weight_version
    if version != FIRST_WEIGHTS:
        facts.append(f"weights {version}")
    if req.cache_salt is not None:
        facts.append(f"salt {req.cache_salt}")
    if req.lora_id is not None:
        facts.append(f"adapter {req.lora_id}")
    if req.input_embeds is not None:
        facts.append(f"embeddings {_digest(req.input_embeds[:num_tokens])}")
    if req.token_type_ids is not None:
        facts.append(f"token types {_digest(req.token_type_ids[:num_tokens])}")
    if req.positional_embed_overrides is not None:
        # These may be in another process's memory, so no reader can have the same fact.
        facts.append(uuid.uuid4().hex)
    return prompt_digest(req.origin_input_ids[:num_tokens], facts)


def _digest(numbers: Any) -> str:
    return hashlib.blake2b(np.asarray(numbers, np.float32).tobytes(), digest_size=16).hexdigest()
