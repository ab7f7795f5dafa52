"""Groups of a model: which of its layers share a block table, and how far back they attend.

Each kind of layer has a block table of its own: ``attn``, ``swa``, ``state``. Where kinds share their memory, an
engine divides the larger ones into several groups of as many layers as the smallest has, so that a block of any
group takes the same memory (:func:`grouped`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from kvplan._checks import integer
from kvplan.models.tensors import Layer, Layers, Tensor


def tensors_of(layers: Iterable[Layer]) -> Iterator[Tensor]:
    """Every tensor of every layer, once each, in order of appearance."""
    return iter(dict.fromkeys(tensor for layer in layers for tensor in layer))


def windows(layers: Iterable[Layer]) -> dict[str, int | None]:
    """How many tokens back each token group's layers attend, ``None`` for all: the farthest of any of them.

    >>> from kvplan.models.tensors import attention
    >>> windows([attention(8, 64, "swa", 128), attention(8, 64), attention(8, 64, "swa", 512)])
    {'swa': 512, 'attn': None}
    """
    found: dict[str, int | None] = {}
    for tensor in tensors_of(layers):
        if tensor.paged:
            known = found.get(tensor.group, tensor.window)
            found[tensor.group] = None if known is None or tensor.window is None else max(known, tensor.window)
    return found


def visible(seen: Mapping[str, int | None], start: int, stop: int) -> dict[str, tuple[int, int]]:
    """By group, which of the positions ``[start, stop)`` a token at ``stop`` or later can still attend to.

    Through a window of ``w`` tokens, a token at ``p`` attends to positions above ``p - w``
    (``SlidingWindowManager.get_num_skipped_tokens`` of vllm/v1/core/single_type_kv_cache_manager.py, 0.33).

    >>> visible({"swa": 4, "attn": None}, 0, 7)
    {'swa': (4, 7), 'attn': (0, 7)}
    """
    start = integer(start, "start of a token range")
    stop = integer(stop, "stop of a token range", low=start)
    return {
        group: (start if window is None else min(max(start, stop - window + 1), stop), stop)
        for group, window in seen.items()
    }


def grouped(*parts: Layers) -> list[Layers]:
    """``parts`` of a model's layers, with each group divided so that all have about as many layers.

    That is as many as the smallest group has; or the largest, where that has less than half as many again. Of ``n``
    groups made from one, the i-th layer is in number ``i % n``: so each pipeline stage has layers of all
    (``_get_kv_cache_groups_uniform_page_size`` of vllm/v1/core/kv_cache_planning.py, 0.33). The first keeps the name,
    the others have a number behind it.

    >>> from kvplan.models.tensors import attention
    >>> swa, full = attention(8, 64, "swa", 128), attention(8, 64)
    >>> (layers,) = grouped((swa, swa, full, swa))
    >>> [tensor.group for (tensor,) in layers]
    ['swa', 'swa.1', 'attn', 'swa.2']
    """
    flat = [layer for part in parts for layer in part]
    having: dict[str, list[int]] = {}
    for i, layer in enumerate(flat):
        for group in dict.fromkeys(tensor.group for tensor in layer):
            having.setdefault(group, []).append(i)
    sizes = [len(found) for found in having.values()] or [1]
    size = max(sizes) if 2 * max(sizes) < 3 * min(sizes) else min(sizes)
    names = {
        (group, i): _numbered(group, place % -(-len(found) // size))
        for group, found in having.items()
        for place, i in enumerate(found)
    }
    made = [tuple(attrs.evolve(t, group=names[t.group, i]) for t in layer) for i, layer in enumerate(flat)]
    return list(_cut(made, [len(part) for part in parts]))


def _numbered(group: str, number: int) -> str:
    return f"{group}.{number}" if number else group


def _cut(layers: Sequence[Layer], lengths: Sequence[int]) -> Iterator[Layers]:
    start = 0
    for length in lengths:
        yield tuple(layers[start : start + length])
        start += length
