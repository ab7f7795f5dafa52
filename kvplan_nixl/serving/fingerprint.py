"""Fingerprints: digests of weights, which tell apart two models that are served under one name.

They cover the tensors, and the Python code next to them, but not a model's configuration: an engine
may run other values than the file has, so :mod:`kvplan_nixl.identity` compares it key by key.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvplan import KVPlanError
from kvplan.support import shown, wrong_type

DIGEST_BYTES: Final = 16

MAX_TENSORS: Final = 4096
"""At most so many tensors are sampled."""

MAX_SAMPLES: Final = 8192
"""The sampled tensors share so many samples evenly, at least two to a tensor."""

SAMPLE_BYTES: Final = 4096
"""The size of a sample: a page, since a disk reads no less."""

MAX_HEADER_BYTES: Final = 100_000_000
"""The longest header that the safetensors format allows."""

MAX_CONFIG_BYTES: Final = 64 << 20
"""Configurations and indexes are shorter; the index of 91,000 tensors has 9 MB."""

HAS_ADVICE: Final = hasattr(os, "posix_fadvise")
"""Whether the system can be told what will be read."""

INDEX: Final = "model.safetensors.index.json"

# The first kind that a folder has counts alone: users download different ones of them. What
# trainers keep beside weights is none. Engines read no hidden files.
NO_WEIGHTS: Final = r"(?!\.|training_args\.|optimizer\.|scheduler\.|scaler\.|rng_state)"
KINDS: Final = (
    re.compile(r"(?!\.|consolidated).+\.safetensors"),
    re.compile(r"consolidated.*\.safetensors"),
    re.compile(NO_WEIGHTS + r".+\.bin"),
    re.compile(NO_WEIGHTS + r".+\.pt"),
    re.compile(NO_WEIGHTS + r".+\.pth"),
    re.compile(NO_WEIGHTS + r".+\.gguf"),
)

# Keys that change nothing that an adapter computes.
ADAPTER_KEYS: Final = frozenset(
    {
        "base_model_name_or_path",  # a folder of the machine that trained it
        "revision",  # the revision of the base model, which has a fingerprint of its own
        "peft_version",  # the version that wrote the file
        "inference_mode",  # false in checkpoints of a training
        "lora_dropout",  # of training alone, as the next
        "init_lora_weights",
        "target_modules",  # the names of tensors say it; PEFT writes this set in any order
    }
)
# All others stay: lora_alpha, use_rslora and alpha_pattern scale what an adapter adds.

ADAPTER_CONFIG: Final = "adapter_config.json"

NUMBER: Final = re.compile(r"\.[0-9]+")


class TensorRecord(NamedTuple):
    """A tensor as a file stores it: ``num_bytes`` from byte ``offset``; or a file as a whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    offset: int
    num_bytes: int


def fingerprint(folder: Path | str) -> str | None:
    """Digest the weights of a model, or a LoRA adapter, that a local folder stores.

    Returns 32 hex digits, or None where ``folder`` is no local folder, such as a model's name on a
    hub, or has no weights. Reads files and follows links. Raises ``CONFIG`` if a file is broken or
    cannot be read, ``TYPE`` if ``folder`` is no path.

    Equal digests: the same tensors in other files, in another order or under other file names; an
    adapter's configuration with other white space, order of keys, or values of keys that change
    nothing that it computes.

    Different digests: another name, dtype or shape of any tensor; another value of any other key of
    ``adapter_config.json``; another byte in a sample, or in a Python file of the folder.

    Up to 8,192 samples of 4 KiB are read, 32 MiB, spread evenly over tensors, and over each
    tensor from its first byte to its last; a tensor that its samples could cover is read whole.
    So 290 tensors have 28 samples each, and an adapter of at most 32 MiB in tensors of one size
    is read whole. Up to 4,096 tensors are all sampled. Of more, tensors whose names differ in
    their numbers alone are a class. Small classes are sampled whole and large ones evenly, so
    a model with 91,000 tensors, most of them experts, has its attention layers sampled whole.

    A fine-tune changes most tensors. A merged adapter changes some throughout, perhaps the query
    and value projections of a few layers, and each of these is sampled. Where a
    change spares a share ``p`` of a tensor's 2-byte elements at random, ``k`` samples of it miss
    the change with probability ``p ** (2048 * k)``.

    A change outside the sample is not seen: of a few rows of an embedding, or of a few experts
    among thousands. Neither are its configuration, its tokenizer, an engine's options, and weights
    and code that an engine loads from elsewhere. One model in two formats has two digests.
    Weights that are not safetensors, such as ``.bin`` or ``.gguf``, count by the name and size
    of each file and samples of it; if a folder also has safetensors, these count alone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     num_bytes = Path(folder, "pytorch_model.bin").write_bytes(b"weights")
    ...     fingerprint(folder)
    '3f1c33414f8e760ce154ecffe919c7ba'
    >>> fingerprint("Qwen/Qwen3-8B") is None
    True
    """
    if not isinstance(folder, Path | str):
        raise wrong_type("folder of a model", "a path", folder)
    if not os.path.isdir(folder):
        return None
    try:
        return _fingerprint(Path(folder))
    except OSError as error:
        raise _broken(error.filename or folder, "a file that can be read", str(error)) from error


def _fingerprint(folder: Path) -> str | None:
    paths = _weight_paths(folder)
    if not paths:
        return None
    tensors = sorted(chain.from_iterable(map(_tensors, paths)))
    listed = [tensor[:3] for tensor in tensors]  # name, dtype and shape
    try:
        text = json.dumps([_adapter_config(folder), _code(folder), listed], sort_keys=True)
    except RecursionError as error:
        raise _broken(folder / ADAPTER_CONFIG, "a JSON object", str(error)) from None
    digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES)
    for sample in _samples(_selection(tensors)):
        digest.update(sample)
    return digest.hexdigest()


def _weight_paths(folder: Path) -> list[Path]:
    """Return the files that hold a folder's weights: of one kind, and of its index if it has one.

    Some repositories store a model twice, whole and in shards; engines read what the index lists.
    """
    paths = [path for path in folder.iterdir() if not path.is_dir()]
    for kind in KINDS:
        weights = [path for path in paths if kind.fullmatch(path.name)]
        if weights:
            break
    else:
        return []
    index = folder / INDEX
    if kind is KINDS[0] and os.path.lexists(index):
        listed = _listed_names(index)
        missing = listed.difference(path.name for path in weights)
        if missing:
            raise _broken(
                index,
                "only files that the folder has",
                shown(min(missing)),
                "a download that is not over, or an index of other files",
            )
        weights = [path for path in weights if path.name in listed]
    for path in weights:
        _require_file(path)
    return weights


def _listed_names(index: Path) -> set[str]:
    """Return the names of files in an index."""
    files = read_config(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise _broken(index, "a weight_map from tensors to files", shown(files))
    return set(files.values())


def _adapter_config(folder: Path) -> dict[str, Any] | None:
    """Return the configuration of an adapter, without keys that change nothing that it computes."""
    path = folder / ADAPTER_CONFIG
    if not os.path.lexists(path):
        return None
    config = read_config(path)
    return {key: value for key, value in config.items() if key not in ADAPTER_KEYS}


def _code(folder: Path) -> dict[str, str]:
    """Return a digest of each Python file of a folder, by name: it may be the model's own code."""
    digests = {}
    for path in sorted(folder.glob("*.py")):
        _require_file(path)
        digest = hashlib.blake2b(path.read_bytes(), digest_size=DIGEST_BYTES)
        digests[path.name] = digest.hexdigest()
    return digests


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON file of an object, such as a model's configuration. Raises ``CONFIG``."""
    _require_file(path)
    num_bytes = path.stat().st_size
    if num_bytes > MAX_CONFIG_BYTES:
        raise _broken(path, f"at most {MAX_CONFIG_BYTES} bytes", str(num_bytes))
    return _parsed(path, path.read_bytes(), "a JSON object")


def _parsed(path: Path, text: bytes, expected: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise _broken(path, expected, str(error)) from None
    if not isinstance(value, dict):
        raise _broken(path, expected, shown(value))
    return value


def _tensors(path: Path) -> Iterator[TensorRecord]:
    """Yield the tensors of a safetensors file; a file of another kind is a tensor of its own."""
    file_name = str(path)
    file_bytes = path.stat().st_size
    if path.suffix != ".safetensors":
        yield TensorRecord(path.name, "file", (file_bytes,), file_name, 0, file_bytes)
        return
    # The format: the header's length in 8 bytes, a header in JSON, then the tensors' data.
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(file_bytes - 8, MAX_HEADER_BYTES):
            expected = f"a header of at most {MAX_HEADER_BYTES} bytes in a file of {file_bytes}"
            raise _broken(path, expected, f"one of {header_bytes}", "a file that was cut?")
        header = _parsed(path, file.read(header_bytes), "a header that is a JSON object")
    data_offset = 8 + header_bytes
    data_bytes = file_bytes - data_offset
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not _is_tensor(entry, data_bytes):
            expected = f"a dtype, a shape, and data_offsets within {data_bytes} bytes of data"
            raise _broken(path, expected, f"{shown(name)}: {shown(entry)}", "a file that was cut?")
        start, stop = entry["data_offsets"]
        offset = data_offset + start
        shape = tuple(entry["shape"])
        yield TensorRecord(name, entry["dtype"], shape, file_name, offset, stop - start)


def _is_tensor(entry: Any, data_bytes: int) -> bool:
    """Return whether an entry of a header describes a tensor within the data."""
    try:
        dtype = entry["dtype"]
        shape = entry["shape"]
        start, stop = entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        return False
    if not isinstance(dtype, str) or not isinstance(shape, list):
        return False
    if {*map(type, shape), type(start), type(stop)} != {int}:
        return False
    return min(shape, default=0) >= 0 and 0 <= start <= stop <= data_bytes


def _selection(tensors: Sequence[TensorRecord]) -> Sequence[TensorRecord]:
    """Select tensors to sample: all, or an equal number of each class and more of large classes."""
    if len(tensors) <= MAX_TENSORS:
        return tensors
    # Tensors whose names differ in numbers, such as those of a layer and an expert, are a class.
    classes = defaultdict(list)
    for tensor in tensors:
        classes[NUMBER.sub(".#", tensor.name)].append(tensor)
    # From the smallest class on, what one does not need is left for the others.
    selected: list[TensorRecord] = []
    num_classes = len(classes)
    for members in sorted(classes.values(), key=len):
        num_members = len(members)
        share = min((MAX_TENSORS - len(selected)) // num_classes, num_members)
        selected += [members[ordinal * num_members // share] for ordinal in range(share)]
        num_classes -= 1
    return selected


def _samples(tensors: Sequence[TensorRecord]) -> list[bytes]:
    """Digest samples of each tensor; returns the digests in the order of the tensors."""
    num_samples = MAX_SAMPLES // max(len(tensors), 1)
    digests: dict[TensorRecord, bytes] = {}
    by_file = sorted(tensors, key=attrgetter("path", "offset"))
    for path, members in groupby(by_file, attrgetter("path")):
        ranges = {tensor: _sampled_ranges(tensor, num_samples) for tensor in members}
        with open(path, "rb", buffering=0) as file:
            # The system fetches all samples at once, and not in turn.
            for offset, num_bytes in chain.from_iterable(ranges.values()) if HAS_ADVICE else ():
                os.posix_fadvise(file.fileno(), offset, num_bytes, os.POSIX_FADV_WILLNEED)
            for tensor in ranges:
                digests[tensor] = _sample(file.fileno(), path, ranges[tensor])
    return [digests[tensor] for tensor in tensors]


def _sample(descriptor: int, path: str, ranges: Iterable[tuple[int, int]]) -> bytes:
    """Digest some ranges of a file."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for offset, num_bytes in ranges:
        sample = os.pread(descriptor, num_bytes, offset)
        if len(sample) != num_bytes:
            raise _broken(path, "a file that keeps its size", "a shorter file")
        digest.update(sample)
    return digest.digest()


def _sampled_ranges(tensor: TensorRecord, num_samples: int) -> list[tuple[int, int]]:
    """Return offsets in the file and lengths: a small tensor, or samples from end to end of it."""
    if tensor.num_bytes <= num_samples * SAMPLE_BYTES:
        return [(tensor.offset, tensor.num_bytes)]
    last = tensor.num_bytes - SAMPLE_BYTES
    offsets = [last * number // (num_samples - 1) for number in range(num_samples)]
    return [(tensor.offset + offset, SAMPLE_BYTES) for offset in offsets]


def _require_file(path: Path) -> None:
    """Refuse links to nothing, and what is no regular file: to read a pipe could take forever."""
    if not path.is_file():
        hint = "a link to a file that is gone?" if path.is_symlink() else ""
        raise _broken(path, "a regular file", "none", hint)


def _broken(path: Path | str, expected: str, got: str, hint: str = "") -> KVPlanError:
    """The error for a file of a model that cannot be read."""
    action = f"read {str(path)!r} of a model"
    return KVPlanError("CONFIG", action, expected=expected, got=got, hint=hint, path=str(path))
