"""Prompts of a store's pages, which SGLang's storage interface names by its own hashes alone.

SGLang's hash of a page digests the tokens before it, so it tells nothing of them. The keys of a
store digest the tokens too, but in pages of another size. Both are computed here from the tokens,
so a page of SGLang's has its positions by its hash, and has no wrong ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, Self

import attrs
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kvplan import Blocks
from kvplan.describe import Range
from kvplan.protocol.page_keys import Fact
from kvplan_nixl.sglang.changes import ADAPTERS, WEIGHTS, request_facts


@attrs.frozen(eq=False)
class PromptPages:
    """A prompt, which SGLang hands to its storage with each call.

    SGLang takes it for the hashes of the pages before those of a call, to which it adds more: they
    are of the same prompt. ``table`` has the pages in host memory that a backup may read, and
    ``window_table`` those of windows that have a separate pool. ``facts`` decide the cache apart
    from the tokens; ``is_stored`` tells whether others may have the same.
    """

    key: RadixKey
    page_size: int
    table: Blocks | None = None
    window_table: Blocks | None = None
    facts: Sequence[Fact] = ()
    is_stored: bool = True

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        extra_key: str | None,
        salt: str | None,
        page_size: int,
        table: Blocks | None = None,
        window_table: Blocks | None = None,
    ) -> Self:
        """Return the prompt of tokens in a namespace of SGLang's.

        SGLang makes the tokens of an image of 30 bits of its hash, which are too few to name pages
        that outlive the engine. So the prompt ends before the first one.
        """
        text = array("q", takewhile(lambda token: token < MM_PAD_SHIFT_VALUE, tokens))
        key = RadixKey(text, extra_key=extra_key, cache_salt=salt)
        # An extra_key is a caller's own, and then the id that SGLang gives an adapter.
        own_key, lora_id = ADAPTERS.split(extra_key)
        version = WEIGHTS.version
        texts = [f"weights version {version}"] if version else []
        texts += request_facts(salt, lora_id)
        if own_key is not None:
            texts.append(f"extra key {own_key}")
        # now, since a thread that saves the prompt may run when weights have changed
        facts = [(0, text) for text in texts]
        return cls(key, page_size, table, window_table, facts, WEIGHTS.is_known)

    def __add__(self, hashes: list[str]) -> Self:
        return self

    def copy(self) -> Self:
        """Return the prompt, which never changes."""
        return self

    @property
    def tokens(self) -> Any:
        """The ids of the prompt's tokens."""
        return self.key.token_ids

    @cached_property
    def _ordinals(self) -> dict[str, int]:
        whole = self.key.page_aligned(self.page_size)
        hashes = get_storage_hash_str(whole, page_size=self.page_size) if len(whole) else []
        return {page_hash: ordinal for ordinal, page_hash in enumerate(hashes)}

    def positions(self, hashes: Sequence[str]) -> Range | None:
        """Return the positions of pages in a row by their hashes, ``None`` of any others.

        None are stored while the weights have no version that other ranks and engines may have.
        """
        first = self._ordinals.get(hashes[0]) if hashes and self.is_stored else None
        if first is None:
            return None
        # a hash of another prompt, or out of order, would name wrong positions
        for ordinal, page_hash in enumerate(hashes, first):
            if self._ordinals.get(page_hash) != ordinal:
                return None
        return first * self.page_size, (first + len(hashes)) * self.page_size
