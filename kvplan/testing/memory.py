"""A probe of real memory: does it hold what the workers describe?

``verify`` and ``compare`` believe a description. The probe does not: the engine itself stores
values by which every element is known, and the probe reads them at the described addresses.

An element is known by its *label*, a number that no other element of the request has. An element of
one or two bytes is too short for it. So the engine stores the labels digit by digit: in each pass
every element gets one digit of its label, a small integer that its dtype holds exactly. The last
digit is a check of the others, and always differs from the one before it. So memory that stays the
same in all passes was never written.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints
from kvplan._checks import members, wrong_type
from kvplan._text import few
from kvplan.describe import ITEMSIZE, Blocks, Region, View, Worker
from kvplan.describe.blocks import Tokens
from kvplan.describe.views import TOKEN
from kvplan.describe.worker import Key
from kvplan.errors import KVPlanError
from kvplan.verification import FakeMemory
from kvplan.verification.labels import Labels, Window, label_tensors, locate, needed, window
from kvplan.verification.pattern_search import PatternSearch
from kvplan.verification.patterns import MISSING, OUTSIDE
from kvplan.verification.report import Failure, failures_in_words
from kvplan.verification.requests import range_of_group

ACTION: Final = "probe memory"

FLOAT8: Final = re.compile(r"float8_e(\d)m(\d)(?:fn)?(uz)?u?")
"""Bits of exponent and mantissa; ``uz`` has one more for the bias."""

NO_LABEL: Final = (1 << 63) - 1


class Values(Protocol):
    """The values that ``write`` stores: another digit of every label each time."""

    def __call__(self, tensor: str, dimensions: str, **coordinates: int) -> npt.NDArray[np.float32]:
        """Return the values of a tensor: small integers.

        ``dimensions`` are its axes in the order in which the engine takes them, such as ``"token
        head dim"``; ``coordinates`` choose from the others, as ``kv=1`` does V. The array has the
        tokens of the request, and of other axes all that the model has: a rank takes its shard
        by the engine's own rules.
        """


def region_bytes(region: Region) -> Any:
    """Return all bytes of a region in the memory of this process, not copied."""
    if region.memory != "DRAM":
        raise KVPlanError(
            "MEMORY",
            ACTION,
            expected="regions in DRAM",
            got=f"region {region.name!r} in {region.memory}",
            hint="region_bytes=kvplan_nixl.rearrange.tensor_at reads a GPU's memory",
        )
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.size_bytes).from_address(region.address))


def assert_memory(
    workers: Iterable[Worker],
    write: Callable[[Values], object],
    *,
    blocks: Mapping[str, Blocks],
    tokens: Tokens = None,
    region_bytes: Callable[[Region], Any] = region_bytes,
) -> None:
    """Assert that memory holds each element of a request where the workers describe it.

    ``write`` is called about four times, with other :class:`Values` each time. It stores those of
    all tensors and ``tokens`` with the engine's own functions, as the engine stores new keys and
    values. It may then move them to the ``workers`` with a connector, which this tests too.
    ``blocks`` are those of the request at the workers.

    ``region_bytes`` returns the bytes of a region: an array, or a tensor of torch, that is indexed
    by an array. Raises AssertionError with what all wrong bytes have in common, as
    :func:`assert_copies` does, and KVPlanError for a request that the workers cannot have.

    Here the engine has V before K:

    >>> import numpy as np
    >>> from kvplan import Blocks, Group, Worker, region_of, view_of
    >>> cache = np.zeros((9, 2, 8, 4, 16), np.float16)
    >>> region = region_of(cache)
    >>> pattern = "block kv token head dim"
    >>> view = view_of(cache, pattern, name="layers.0", group="attn", region=region)
    >>> worker = Worker("decode", 0, [region], [Group("attn", 8)], [view])
    >>> def write(values):
    ...     for kv in range(2):
    ...         stored = values("layers.0", "token head dim", kv=kv)
    ...         cache[5, 1 - kv], cache[2, 1 - kv, :4] = stored[:8], stored[8:]
    >>> blocks = {"attn": Blocks([5, 2])}
    >>> assert_memory([worker], write, blocks=blocks, tokens=(0, 12))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: memory is not as described
    VALUE: at decode/0: 3072 bytes wrong: everywhere: K holds V, V holds K
      first: layers.0 dim 0 head 0 kv 0 byte 0 of position 0 (...) holds layers.0 dim 0 head 0 ...
    """
    if not callable(write):
        raise wrong_type("write", "a function of values", write)
    probe = _Probe(members(Worker, workers, "workers"), blocks, tokens)
    for number in range(probe.num_passes):
        write(probe.values(number))
        for chunk in probe.chunks:
            chunk.read(region_bytes)
    failures = failures_in_words(probe.failures())
    if failures:
        lines = [f"{code}: {text}" for code, text in failures]
        raise AssertionError("\n".join(["memory is not as described", *lines]))


@attrs.frozen(eq=False)
class _Chunk:
    """Bytes of a view that are read together: arrays by position, segment and byte.

    ``expected`` are their labels, ``offset`` their offsets in the region, and ``passes`` what each
    pass left there.
    """

    worker: Worker
    view: View
    labels: Labels
    expected: Ints
    offset: Ints
    passes: list[npt.NDArray[np.uint8]] = attrs.field(factory=list)

    @property
    def region(self) -> Region:
        return next(region for region in self.worker.regions if region.name == self.view.region)

    def read(self, region_bytes: Callable[[Region], Any]) -> None:
        found = region_bytes(self.region)[self.offset]
        self.passes.append(found.cpu().numpy() if hasattr(found, "cpu") else np.asarray(found))

    def found(self, dtype: str, end: int) -> Ints:
        """Return the label that each byte has if elements are of a dtype.

        It is 0 where no pass has changed the element, and NO_LABEL for anything but a label.
        """
        base = _base(self.view.dtype)
        itemsize = ITEMSIZE[dtype]
        elements = [found.view(f"u{itemsize}") for found in self.passes]
        digits = [_numbers(element, dtype) for element in elements]
        is_label = np.all([(d >= 0) & (d < base) & (d % 1 == 0) for d in digits], axis=0)
        whole = [np.where(is_label, digit, 0).astype(np.int64) for digit in digits]
        label = np.zeros_like(whole[0])
        for exponent, digit in enumerate(whole[:-1]):
            label += digit * base**exponent
        for digit, right in zip(whole, _digits(label, base, len(whole)), strict=True):
            is_label &= digit == right
        is_label &= (label > 0) & (label < end)
        is_written = np.any([element != elements[0] for element in elements[1:]], axis=0)
        label = np.where(is_label, label, NO_LABEL)
        label = np.where(is_written, label, 0)
        # The labels of an element's bytes follow each other.
        byte = np.arange(itemsize) * (is_label & is_written)[..., np.newaxis]
        by_byte: Ints = (label[..., np.newaxis] + byte).reshape(self.expected.shape)
        return by_byte


class _Probe:
    """The labels of a request, and everywhere that the workers should hold them."""

    def __init__(
        self, workers: tuple[Worker, ...], blocks: Mapping[str, Blocks], tokens: Tokens
    ) -> None:
        self.workers = workers
        stored = list[tuple[View, Ints]]()
        held = list[tuple[Worker, View, Ints]]()
        for worker in workers:
            groups = {group.name: group for group in worker.groups}
            for view in worker.views:
                group = groups[view.group]
                span = range_of_group(tokens, group, group.name)
                positions = needed(group, blocks.get(group.name), span)
                held.append((worker, view, positions))
                # The engine is given all tokens, also those of other ranks of the context.
                stored.append((view, np.arange(*span) if span else positions))
        self.labels = label_tensors(stored)
        self.dtypes = {view.name: view.dtype for _, view, _ in held}
        self.end = max((labels.end for labels in self.labels.values()), default=1)
        # Enough digits for the last label in each base; one more checks them.
        self.num_passes = 2
        while any(_base(d) ** (self.num_passes - 1) < self.end for d in self.dtypes.values()):
            self.num_passes += 1
        self.windows: dict[Key, list[Window]] = {worker.key: [] for worker in workers}
        self.chunks = list[_Chunk]()
        with FakeMemory(workers, label_bytes=8) as memory:
            for worker, view, positions in held:
                table = blocks.get(view.group)
                held_window = window(memory, worker, view, self.labels[view.name], table, positions)
                if table is None or held_window.positions.size < positions.size:
                    needs = f"blocks of group {view.group!r} with all tokens"
                    raise KVPlanError("BLOCKS", ACTION, expected=needs, got=f"{table}")
                self.windows[worker.key].append(held_window)
                for start, labels in held_window.chunks():
                    offset = np.add.outer(start, np.arange(labels.shape[-1]))
                    expected = labels.astype(np.int64)
                    self.chunks.append(_Chunk(worker, view, held_window.labels, expected, offset))

        if not self.chunks:
            raise KVPlanError("RANGE", ACTION, expected="a request with tokens", got="none")

    def values(self, number: int) -> Values:
        """Return the values of a pass."""

        def values(tensor: str, dimensions: str, **coordinates: int) -> npt.NDArray[np.float32]:
            labels = self.labels.get(tensor)
            if labels is None:
                expected = f"a tensor of {few([*self.labels], ', ')}"
                raise KVPlanError("NAME", ACTION, expected=expected, got=repr(tensor))
            weights = dict(labels.weights)
            axes = dimensions.split()
            named = [*axes, *coordinates]
            if not {*weights} <= {*named} <= {TOKEN, *labels.sizes} or len({*named}) < len(named):
                expected = f"each axis of {tensor} once: {', '.join([TOKEN, *weights])}"
                raise KVPlanError("NAME", ACTION, expected=expected, got=", ".join(named))
            label = np.asarray(sum(weights.get(axis, 0) * at for axis, at in coordinates.items()))
            for axis in axes:
                steps = np.arange(labels.sizes.get(axis, 1)) * weights.get(axis, 0)
                along = labels.first(labels.positions) if axis == TOKEN else steps
                label = np.add.outer(label, along)
            if TOKEN not in axes:  # the state after the last token
                label = label + labels.first(labels.positions[-1])
            dtype = self.dtypes[tensor]
            digit = _digits(label, _base(dtype), self.num_passes)[number]
            return np.asarray(2.0**digit if dtype == "float8_e8m0fnu" else digit, np.float32)

        return values

    def failures(self) -> Iterator[Failure]:
        for worker in self.workers:
            yield from self._failures(worker)

    def _failures(self, worker: Worker) -> Iterator[Failure]:
        """Return what is wrong in the memory of a worker, as verify does for fake memory."""
        search = PatternSearch(worker.key, self.labels, NO_LABEL)
        num_bytes = {"VALUE": 0, "COVER": 0}
        first = {}
        looks_like = set[str]()
        for chunk in self.chunks:
            if chunk.worker is not worker:
                continue
            found = chunk.found(chunk.view.dtype, self.end)
            missing = found == 0
            for code, is_wrong in (
                ("COVER", missing),
                ("VALUE", (found != chunk.expected) & ~missing),
            ):
                num_bytes[code] += int(is_wrong.sum())
                if is_wrong.any() and code not in first:
                    first[code] = self._describe(chunk, found, is_wrong)
            if (found != chunk.expected).any():
                search.add(chunk.labels, chunk.expected.astype(np.uint64), found.astype(np.uint64))
                looks_like |= {_dtype_of(chunk, self.end)}
        patterns = search.patterns(self.windows[worker.key]) if first else []
        other = f"values of {few(sorted(looks_like), ', ')}" if "" not in looks_like else "no label"
        for code, text in (("VALUE", "wrong"), ("COVER", "never written")):
            if num_bytes[code]:
                of_code = [p for p in patterns if (p.fault == MISSING) == (code == "COVER")]
                of_code = [
                    attrs.evolve(p, fault=other) if p.fault == OUTSIDE else p for p in of_code
                ]
                yield Failure(
                    code, text, (worker.key,), num_bytes[code], first[code], tuple(of_code)
                )

    def _describe(self, chunk: _Chunk, found: Ints, is_wrong: npt.NDArray[np.bool_]) -> str:
        """Return the first wrong byte of a chunk in words."""
        at = np.unravel_index(int(np.argmax(is_wrong)), is_wrong.shape)
        location = locate(
            chunk.worker, chunk.region.address + int(chunk.offset[at]), chunk.region.device_id
        )
        what = "was never written" if not found[at] else "holds no label"
        for labels in self.labels.values():
            if labels.base <= found[at] < labels.end:
                what = f"holds {labels.describe(int(found[at]))}"
        return f"{chunk.labels.describe(int(chunk.expected[at]))} ({location}) {what}"


def _dtype_of(chunk: _Chunk, end: int) -> str:
    """Return the dtype as which the bytes of a chunk are right, or an empty string."""
    itemsize = ITEMSIZE[chunk.view.dtype]
    for dtype in ITEMSIZE:
        if ITEMSIZE[dtype] == itemsize and np.array_equal(chunk.found(dtype, end), chunk.expected):
            return dtype
    return ""


def _digits(label: Ints, base: int, num_digits: int) -> list[Ints]:
    """Return the digits of labels, the lowest first; the last one checks the others."""
    digits = list[Ints]()
    total = np.zeros_like(label)
    for exponent in range(num_digits - 1):
        label, digit = np.divmod(label, base)
        digits.append(digit)
        total += digit * (2 * exponent + 1)
    # In base 2, the remainder of the sum is 0.
    return [*digits, (digits[-1] + 1 + total % (base - 1)) % base]


def _base(dtype: str) -> int:
    """Return how many digits a dtype holds exactly."""
    if float8 := FLOAT8.fullmatch(dtype):
        mantissa = int(float8[2])
        return 2 << mantissa if mantissa else 64  # without one, the digit is the exponent
    return {"bool": 2, "int8": 128}.get(dtype, 256)


def _numbers(bits: npt.NDArray[np.unsignedinteger[Any]], dtype: str) -> npt.NDArray[Any]:
    """Return the digits that elements store, or other numbers where they store none.

    >>> _numbers(np.array([0x40, 0x4C], np.uint8), "float8_e4m3fn")
    array([2., 6.])
    >>> _numbers(np.array([0x4040], np.uint16), "bfloat16")
    array([3.], dtype=float32)
    """
    if float8 := FLOAT8.fullmatch(dtype):
        exponent_bits, mantissa = int(float8[1]), int(float8[2])
        bias = (1 << exponent_bits - 1) - 1.0 + bool(float8[3])
        if not mantissa:
            return np.asarray(bits - bias)
        exponent = (bits & 0x7F) >> mantissa
        fraction = (bits & (1 << mantissa) - 1) / (1 << mantissa)
        magnitude = (fraction + (exponent > 0)) * 2.0 ** (np.maximum(exponent, 1) - bias)
        return np.asarray(np.where(bits >> 7, -magnitude, magnitude))
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view("u1" if dtype == "bool" else dtype).astype(np.float64)
