"""What binds a room to a prompt, from SGLang's own request."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

import numpy as np

from kvplan.connector import prompt_digest


def prompt_of(req: Any, num_tokens: int) -> str:
    """Digest the first positions of a request, and what decides their cache or whose it is.

    Token ids of images are made of the images' hashes. The id of an adapter is made of its name and path.
    """
    facts = []
    if req.cache_salt is not None:
        facts.append(f"salt {req.cache_salt}")
    if req.lora_id is not None:
        facts.append(f"adapter {req.lora_id}")
    if req.input_embeds is not None:
        facts.append(f"embeddings {_digest(req.input_embeds[:num_tokens])}")
    if req.token_type_ids is not None:
        facts.append(f"token types {_digest(req.token_type_ids[:num_tokens])}")
    if req.positional_embed_overrides is not None:
        facts.append(
            uuid.uuid4().hex
        )  # these may be in another process's memory, so no reader is told what they are
    return prompt_digest(req.origin_input_ids[:num_tokens], facts)


def _digest(numbers: Any) -> str:
    return hashlib.blake2b(np.asarray(numbers, np.float32).tobytes(), digest_size=16).hexdigest()
