"""Prompts: a digest that binds a handoff to the tokens whose cache it hands over."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvplan._checks import members, wrong_type

DIGEST_BYTES: Final = 16


def prompt_digest(tokens: Sequence[int], facts: Iterable[str] = ()) -> str:
    """Digest the token ids of positions 0, 1, ..., and the facts that decide their cache too.

    ``facts`` are strings that both engines derive alike: an adapter, a salt, hashes of images or
    embeddings with their positions. Their order counts. Raises ``TYPE``.

    >>> prompt_digest([3, 17, 5])
    'c3fda288cda031ab788deda19738ab02'
    >>> prompt_digest([3, 17, 5]) == prompt_digest([3, 17, 5], ["adapter sql"])
    False
    """
    try:
        ids = np.asarray(tokens)
    except Exception:
        # of a ragged list, or of a tensor that is no array, in its framework's own words
        raise wrong_type("token ids", "a flat sequence of integers", tokens) from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise wrong_type("token ids", "a flat sequence of integers", tokens)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(ids.size.to_bytes(8, "little"))
    digest.update(ids.astype("<i8").tobytes())
    for fact in members(str, facts, "facts of a prompt"):
        text = fact.encode()
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()
