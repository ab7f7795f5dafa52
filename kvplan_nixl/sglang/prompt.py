"""Prompts: a digest of SGLang's own request binds a room to its prompt."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

import numpy as np

from kvplan.protocol import prompt_digest
from kvplan_nixl.sglang.changes import request_facts


def prompt_of(req: Any, num_tokens: int) -> str:
    """Digest the first positions of a request, and the facts that decide their cache or its owner.

    SGLang makes the token ids of images of the images' hashes.
    """
    facts = request_facts(req.cache_salt, req.lora_id)
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
