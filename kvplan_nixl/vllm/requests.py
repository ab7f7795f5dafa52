"""What the parameters of vLLM's requests say to the connectors: who else takes part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.request import Request


def params_of(request: Request) -> Mapping[str, Any]:
    """Return the ``kv_transfer_params`` of a request, none if it has none."""
    return request.kv_transfer_params or {}


def is_computed(request: Request) -> bool:
    """Return whether an engine is asked to compute a request for another one."""
    return bool(params_of(request).get("do_remote_decode"))


def is_computed_whole(request: Request) -> bool:
    """Return whether decode begins with the token that this engine generates, as SGLang does.

    vLLM's decode computes the last token of a prompt again, and generates that token itself.
    """
    return bool(params_of(request).get("whole_prompt"))


def has_handoff(request: Request) -> bool:
    """Return whether the parameters of a request have a handoff."""
    return bool(params_of(request).get("remote_block_ids"))
