"""What vLLM's requests say to the connectors: their prompts, and who else takes part."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.request import Request

from kvplan.connector import prompt_digest
from kvplan_nixl.weights import adapter_of


def params_of(request: Request) -> Mapping[str, Any]:
    """Return the ``kv_transfer_params`` of a request, none if it has none."""
    return request.kv_transfer_params or {}


def is_computed(request: Request) -> bool:
    """Return whether an engine is asked to compute a request for another one."""
    return bool(params_of(request).get("do_remote_decode"))


def has_handoff(request: Request) -> bool:
    """Return whether the parameters of a request have a handoff."""
    return bool(params_of(request).get("remote_block_ids"))


def prompt_of(request: Request, num_tokens: int) -> str:
    """Digest the first positions of a request, and the facts that decide their cache too."""
    facts = [text for position, text in facts_of(request) if position < num_tokens or not position]
    if request.prompt_embeds is not None:
        embeddings = request.prompt_embeds[:num_tokens].contiguous().view(torch.uint8).cpu().numpy()
        digest = hashlib.blake2b(embeddings, digest_size=16).hexdigest()
        facts.append(f"embeddings {digest} at {request.prompt_is_token_ids}")
    return prompt_digest(request._all_token_ids[:num_tokens], facts)


def facts_of(request: Request) -> list[tuple[int, str]]:
    """Return what decides a request's cache beside tokens and embeddings, each from a position on.

    They are those of vLLM's own prefix cache: ``generate_block_hash_extra_keys`` in
    vllm/v1/core/kv_cache_utils.py. An adapter has its name and, if its files are on this machine,
    their fingerprint.
    """
    facts = []
    if request.cache_salt is not None:
        facts.append((0, f"salt {request.cache_salt}"))
    if request.lora_request is not None:
        adapter = request.lora_request
        facts.append((0, f"adapter {adapter.lora_name} {adapter_of(adapter.lora_path)}"))
    for feature in request.mm_features:
        place = feature.mm_position
        text = f"input {feature.identifier} at {place.offset}, {place.length} positions"
        facts.append((int(place.offset), text))
    return facts
