"""Chains: digests of a prompt's prefixes, by which pages are named.

- store.K1: The root is the SHA-256 of the words ``kvplan page 1``, the tokens per page, and the
  model. A string is written as its length, 8 bytes, little-endian, and its UTF-8.
- store.K2: A prefix of ``n`` pages has the SHA-256 of the digest of ``n - 1`` pages (the root
  before the first one), then of the token ids of the n-th page, 8 bytes each, little-endian, then
  of the texts of the facts at its positions, sorted: each as its position in 8 bytes, and the text.
- store.K3: So equal digests mean equal tokens, facts, model, format and page size, from position 0
  on.

A *fact* is what decides a cache apart from the tokens: an adapter or a salt from position 0 on, an
image from the position on at which it begins. The model's name has to say which weights it has
(:func:`kvplan_nixl.serving.fingerprint`).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import attrs
import numpy as np

from kvplan._checks import instance, integer, members, wrong_type
from kvplan._text import brief_repr
from kvplan.describe.blocks import POSITION_END

__all__ = [
    "PAGE_TOKENS",
    "Chain",
    "Fact",
]

VERSION: Final = 1
"""The version of the format: of keys, of files and of their headers."""

PAGE_TOKENS: Final = 64
"""Tokens per page unless a store is made for another number."""

Fact = tuple[int, str]
"""The position from which on a fact decides the cache, and its text."""


@attrs.frozen
class Chain:
    """The keys of a prompt's whole pages: ``keys[k]`` is that of the first ``k + 1`` of them.

    >>> chain = Chain.of("qwen", range(100), tokens_per_page=16)
    >>> len(chain.keys), chain.keys[0][:16]
    (6, 'fb1b388847850710')
    >>> salted = Chain.of("qwen", range(100), [(40, "image 7")], tokens_per_page=16)
    >>> [own == other for own, other in zip(chain.keys, salted.keys)]
    [True, True, False, False, False, False]
    """

    model: str
    tokens_per_page: int
    keys: tuple[str, ...] = attrs.field(repr=False)

    __repr__ = brief_repr

    @classmethod
    def of(
        cls,
        model: str,
        tokens: Sequence[int],
        facts: Iterable[Fact] = (),
        *,
        tokens_per_page: int = PAGE_TOKENS,
    ) -> Chain:
        """Return the chain of the token ids of positions 0, 1, and so on.

        Raises ``TYPE`` or ``RANGE``.
        """
        instance(str, model, "model of a chain")
        size = integer(tokens_per_page, "tokens_per_page", low=1, high=POSITION_END)
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise wrong_type("token ids", "a flat sequence of integers", tokens)
        texts = _texts_by_page(facts, size)
        # one stretch of bytes for all pages, of 8 bytes a token
        data = ids.astype("<i8").tobytes()
        # each page's digest covers the one before it, so it covers the whole prefix
        digest = hashlib.sha256(root(model, size)).digest()
        keys = []
        for page in range(ids.size // size):
            link = hashlib.sha256(digest)
            link.update(data[8 * page * size : 8 * (page + 1) * size])
            for text in texts.get(page, ()):
                link.update(text)
            digest = link.digest()
            keys.append(digest.hex())
        return cls(model, size, tuple(keys))

    @property
    def num_tokens(self) -> int:
        """The positions that the whole pages have."""
        return len(self.keys) * self.tokens_per_page

    @property
    def space(self) -> str:
        """The name of the folder of all pages of this model and size."""
        return space_of(self.model, self.tokens_per_page)


def space_of(model: str, tokens_per_page: int) -> str:
    """Return the name of the folder of all pages of a model: 16 hexadecimal digits."""
    return hashlib.sha256(root(model, tokens_per_page)).hexdigest()[:16]


def root(model: str, tokens_per_page: int) -> bytes:
    """Return the text whose digest is before that of the first page, rule store.K1."""
    return b"".join(map(_counted, (f"kvplan page {VERSION}", f"{tokens_per_page}", model)))


def _counted(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(8, "little") + data


def _texts_by_page(facts: Iterable[Fact], tokens_per_page: int) -> dict[int, list[bytes]]:
    """Return the facts that begin in each page, sorted, as they are digested."""
    texts = defaultdict(list)
    for fact in members(tuple, facts, "facts of a prompt"):
        if len(fact) != 2:
            raise wrong_type("a fact of a prompt", "(position, text)", fact)
        position = integer(fact[0], "position of a fact", high=POSITION_END)
        text = instance(str, fact[1], "text of a fact")
        data = position.to_bytes(8, "little") + _counted(text)
        # a fact counts from the page on in which it begins
        texts[position // tokens_per_page].append(data)
    return {page: sorted(page_texts) for page, page_texts in texts.items()}
