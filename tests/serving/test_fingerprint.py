"""A fingerprint is a model's own: however its files are cut, and whatever little has changed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import KVPlanError
from kvplan_nixl.serving.fingerprint import (
    INDEX,
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    MAX_SAMPLES,
    MAX_TENSORS,
    SAMPLE_BYTES,
    TensorRecord,
    _selection,
    fingerprint,
)

Tensor = tuple[str, list[int], bytes]
Tensors = Mapping[str, Tensor]

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "text_config": {"head_dim": 128, "dtype": "bfloat16"},
    "quantization_config": {"quant_method": "quark", "weight": {"dtype": "fp8_e4m3"}},
}
MODEL: Tensors = {
    "model.norm.weight": ("BF16", [3], b"norms."),
    "model.layers.0.self_attn.q_proj.weight": ("BF16", [2, 2], b"queries."),
    "model.layers.1.self_attn.q_proj.weight": ("BF16", [2, 2], b"QUERIES."),
    "model.layers.0.self_attn.k_proj.weight": ("F32", [1, 2], b"the keys"),
    "empty": ("U8", [0], b""),
}


def write(path: Path, tensors: Iterable[tuple[str, Tensor]], padding: int = 0) -> None:
    """Write a safetensors file: the header's length, the header, and the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt" * padding}} if padding else {}
    data = b""
    for name, (dtype, shape, content) in tensors:
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode() + b" " * padding
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_raw(path: Path, header: bytes, data: bytes = b"") -> None:
    """Write a safetensors file with any header."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def of(tensors: Tensors, config: Mapping[str, Any] = CONFIG) -> str:
    """Return the fingerprint of a model in a file."""
    with TemporaryDirectory() as folder:
        write(Path(folder, "model.safetensors"), tensors.items())
        Path(folder, "config.json").write_text(json.dumps(config))
        digest = fingerprint(folder)
    assert digest is not None
    return digest


def sparse(path: Path, sizes: Mapping[str, int]) -> int:
    """Write a safetensors file of zeros that takes no space; returns the offset of its data."""
    header = {}
    stop = 0
    for name, num_bytes in sizes.items():
        start = stop
        stop += num_bytes
        header[name] = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    write_raw(path, text)
    os.truncate(path, 8 + len(text) + stop)
    return 8 + len(text)


def poke(path: Path, offset: int) -> None:
    """Change a byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@st.composite
def models(draw: st.DrawFn) -> dict[str, Tensor]:
    """Draw tensors by name."""
    tensors = {}
    names = st.text(min_size=1, max_size=9)
    for name in draw(st.lists(names, min_size=1, max_size=6, unique=True)):
        dtype = draw(st.sampled_from([*ITEM_BYTES]))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        content = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
        if name != "__metadata__":
            tensors[name] = (dtype, shape, content)
    return tensors


@given(models(), st.data())
def test_a_split_changes_nothing(tensors: dict[str, Tensor], data: st.DataObject) -> None:
    """Any order of tensors, in any files of any names, with an index or without, is one model."""
    num_files = data.draw(st.integers(1, 4))
    files: list[list[tuple[str, Tensor]]] = [[] for _ in range(num_files)]
    for item in data.draw(st.permutations([*tensors.items()])):
        files[data.draw(st.integers(0, num_files - 1))].append(item)
    names = [f"{data.draw(st.sampled_from('azm'))}-{i}.safetensors" for i in range(num_files)]
    config = dict(data.draw(st.permutations([*CONFIG.items()])))
    weight_map = {}
    with TemporaryDirectory() as folder:
        for file_name, items in zip(names, files, strict=True):
            write(Path(folder, file_name), items, padding=data.draw(st.integers(0, 3)))
            weight_map.update({name: file_name for name, _ in items})
        if data.draw(st.booleans()):
            Path(folder, INDEX).write_text(json.dumps({"weight_map": weight_map}))
        Path(folder, "config.json").write_text(json.dumps(config, indent=2))
        assert fingerprint(folder) == of(tensors)


@given(models(), st.data())
def test_any_change_is_seen(tensors: dict[str, Tensor], data: st.DataObject) -> None:
    """Another byte, name, dtype or shape, more tensors or less: another digest."""
    before = of(tensors)
    changed = {**tensors}
    name = data.draw(st.sampled_from([*tensors, ""]))
    dtype, shape, content = changed.pop(name, ("U8", [], b"x"))
    change = data.draw(st.sampled_from(["byte", "name", "dtype", "shape", "absent"]))
    if change == "byte" and content:
        place = data.draw(st.integers(0, len(content) - 1))
        byte = content[place] ^ data.draw(st.integers(1, 255))
        content = content[:place] + bytes([byte]) + content[place + 1 :]
    elif change == "name":
        name += "." + data.draw(st.text(max_size=3))
    elif change == "dtype":
        dtype = data.draw(st.sampled_from([kind for kind in ITEM_BYTES if kind != dtype]))
    else:
        shape = [*shape, 1]
    if change != "absent" or not name:
        changed[name] = (dtype, shape, content)
    assert of(changed) != before


def test_a_changed_byte_anywhere_is_seen() -> None:
    """Each byte of a model of small tensors counts."""
    digests = {of(MODEL)}
    num_bytes = 0
    for name, (dtype, shape, content) in MODEL.items():
        for place in range(len(content)):
            num_bytes += 1
            changed = content[:place] + bytes([content[place] ^ 128]) + content[place + 1 :]
            digests.add(of({**MODEL, name: (dtype, shape, changed)}))
    assert len(digests) == 1 + num_bytes == 31


def test_the_digest_is_the_same_everywhere() -> None:
    """Engines of several releases compare digests, so that a change of this one is a break."""
    assert of(MODEL) == "ec59d4d7d77134b389a70518e4874bbe"


def test_a_configuration_is_no_part_of_the_weights() -> None:
    """An engine may run another one than the file's, so it is digested apart from the tensors."""
    assert of(MODEL, {"rope_theta": 1}) == of(MODEL)


def test_code_of_a_model_counts(tmp_path: Path) -> None:
    """A model with code of its own has the values that the code computes."""
    write(tmp_path / "model.safetensors", MODEL.items())
    digests = [fingerprint(tmp_path)]
    for text in ("scale = 1", "scale = 2"):
        (tmp_path / "modeling.py").write_text(text)
        digests.append(fingerprint(tmp_path))
    (tmp_path / "modeling.py").rename(tmp_path / "modeling2.py")
    digests.append(fingerprint(tmp_path))
    assert len({*digests}) == 4


def test_an_adapter_is_a_model_too(tmp_path: Path) -> None:
    """An adapter's scale counts, not the folder of its base model or the order of a set."""
    write(tmp_path / "adapter_model.safetensors", MODEL.items())
    config = tmp_path / "adapter_config.json"
    digests = []
    for lora_alpha, base, modules in ((16, "a/b", "qv"), (16, "/b", "vq"), (32, "a/b", "qv")):
        facts = {"base_model_name_or_path": base, "target_modules": [*modules]}
        config.write_text(json.dumps({"lora_alpha": lora_alpha, "r": 8, **facts}))
        digests.append(fingerprint(tmp_path))
    assert digests[0] == digests[1] != digests[2]


def test_links_are_followed(tmp_path: Path) -> None:
    """A snapshot of links to blobs, as hubs keep it, is the model."""
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write(blobs / "1f2e", MODEL.items())
    (blobs / "3d4c").write_text(json.dumps(CONFIG))
    (snapshot / "model.safetensors").symlink_to("../blobs/1f2e")
    (snapshot / "config.json").symlink_to("../blobs/3d4c")
    assert fingerprint(str(snapshot)) == of(MODEL)


def test_only_weights_in_folders_have_a_fingerprint(tmp_path: Path) -> None:
    """Names of a hub, files, and folders without weights have none."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").mkdir()
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "._model.safetensors"):
        (tmp_path / name).write_bytes(b"no weights")
    assert fingerprint(tmp_path) is None
    assert fingerprint(tmp_path / "config.json") is None
    assert fingerprint("meta-llama/Llama-3.1-8B") is None
    assert fingerprint("\0") is None


def test_a_folder_is_a_path() -> None:
    """Anything else is refused."""
    with pytest.raises(KVPlanError, match=r"^TYPE: cannot read folder of a model: expected a path"):
        fingerprint(b"folder")  # type: ignore[arg-type]


def test_the_best_kind_counts_alone(tmp_path: Path) -> None:
    """Who downloads more formats of a model has the same model."""
    kinds = ["model.gguf", "consolidated.00.pth", "a.pt", "a.bin", "consolidated.safetensors"]
    digests = []
    for name in [*kinds, "model.safetensors"]:
        path = tmp_path / name
        write(path, MODEL.items())
        digests.append(fingerprint(tmp_path))
        poke(path, path.stat().st_size - 1)
        assert fingerprint(tmp_path) != digests[-1]
        poke(path, path.stat().st_size - 1)
    assert digests[-2] == digests[-1]  # both are safetensors of the same tensors
    assert len({*digests}) == len(kinds)
    for name in kinds:
        (tmp_path / name).unlink()
        assert fingerprint(tmp_path) == digests[-1]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "m.gguf"])
def test_any_weights_have_a_fingerprint(tmp_path: Path, name: str) -> None:
    """Of files without a header that is known, names, sizes and places count."""
    path = tmp_path / name
    path.write_bytes(b"weights")
    digests = {fingerprint(tmp_path)}
    path.write_bytes(b"Weights")
    digests.add(fingerprint(tmp_path))
    path.write_bytes(b"Weights.")
    digests.add(fingerprint(tmp_path))
    path.rename(tmp_path / f"a-{name}")
    digests.add(fingerprint(tmp_path))
    assert len(digests) == 4


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    """A model that is stored twice, whole and in shards, counts as its index lists it."""
    write(tmp_path / "a.safetensors", MODEL.items())
    digest = fingerprint(tmp_path)
    write(tmp_path / "b.safetensors", MODEL.items())
    assert fingerprint(tmp_path) != digest
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(MODEL, "b.safetensors")}))
    assert fingerprint(tmp_path) == digest


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the length of each read of weights."""
    lengths: list[int] = []
    pread = os.pread

    def counting(descriptor: int, num_bytes: int, offset: int) -> bytes:
        lengths.append(num_bytes)
        return pread(descriptor, num_bytes, offset)

    monkeypatch.setattr(os, "pread", counting)
    return lengths


def test_large_tensors_are_sampled_from_end_to_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their first bytes, their last and places between count; a byte between places does not."""
    path = tmp_path / "model.safetensors"
    gap_bytes = 3 * SAMPLE_BYTES
    num_places = MAX_SAMPLES // 2
    num_bytes = num_places * (SAMPLE_BYTES + gap_bytes) - gap_bytes
    data_offset = sparse(path, {"a": num_bytes, "b": num_bytes})
    lengths = counted_reads(monkeypatch)
    before = fingerprint(tmp_path)
    assert lengths == [SAMPLE_BYTES] * MAX_SAMPLES
    between = SAMPLE_BYTES + gap_bytes
    for offset in (0, SAMPLE_BYTES - 1, between, 7 * between, num_bytes - 1, num_bytes):
        poke(path, data_offset + offset)
        assert fingerprint(tmp_path) != before
        poke(path, data_offset + offset)
    for offset in (SAMPLE_BYTES, between - 1):
        poke(path, data_offset + offset)
    assert fingerprint(tmp_path) == before


def test_many_experts_leave_room_for_attention(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of more tensors than are sampled, small classes are sampled whole, and large ones evenly."""
    path = tmp_path / "model.safetensors"
    sizes = {"model.norm.weight": 8}
    for layer in range(10):
        sizes[f"model.layers.{layer}.self_attn.q_proj.weight"] = 3 * SAMPLE_BYTES
        for expert in range(500):
            sizes[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"] = 8
            sizes[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"] = 8
    assert len(sizes) > 2 * MAX_TENSORS
    data_offset = sparse(path, sizes)
    lengths = counted_reads(monkeypatch)
    digests = {fingerprint(tmp_path)}
    assert len(lengths) == MAX_TENSORS + 10  # two places of each of the queries' tensors
    offset = data_offset
    for name, num_bytes in sizes.items():
        if "self_attn" in name:
            poke(path, offset)
            digests.add(fingerprint(tmp_path))
        offset += num_bytes
    assert len(digests) == 1 + 10


def test_large_classes_are_sampled_evenly() -> None:
    """What small classes leave is shared, from the first of a large class to its end."""
    num_small = 96
    names = [f"layers.{number:05}.small" for number in range(num_small)]
    for kind in ("down", "up"):
        names += [f"layers.{number:05}.{kind}" for number in range(MAX_TENSORS)]
    tensors = [TensorRecord(name, "U8", (), "", 0, 0) for name in names]
    selected = [tensor.name for tensor in _selection(tensors)]
    assert selected[:num_small] == names[:num_small]
    evenly = [int(ordinal * MAX_TENSORS / 2000) for ordinal in range(2000)]
    for kind in ("down", "up"):
        of_kind = [name for name in selected if name.endswith(kind)]
        assert of_kind == [f"layers.{number:05}.{kind}" for number in evenly]
    assert len(selected) == MAX_TENSORS


def test_a_model_of_tensors_without_a_common_name_is_bounded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More classes than tensors that are sampled do not make it more."""
    sizes = {f"t{number:x}g": 1 for number in range(MAX_TENSORS + 100)}
    sparse(tmp_path / "model.safetensors", sizes)
    lengths = counted_reads(monkeypatch)
    assert fingerprint(tmp_path)
    assert len(lengths) == MAX_TENSORS


HEADER = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    "content, got",
    [
        (b"", "one of 0 "),
        (b"\x02\0\0", "one of 2 "),
        (b"\x03" + b"\0" * 7 + b"{}", "one of 3 "),
        (b"\xff" * 8 + b"{}", f"one of {(1 << 64) - 1} "),
        (b"\x02" + b"\0" * 7 + b"{]", "Expecting property name"),
        (b"\x02" + b"\0" * 7 + b"[]", "a list of 0"),
        (b"\x02" + b"\0" * 7 + b"\xff\xfe", "'utf-8' codec can't decode"),
        (b"\xa0\x86\x01" + b"\0" * 5 + b"[" * 100_000, "recursion"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, got: str) -> None:
    """A file that was cut, or is no safetensors file, has no fingerprint, and no other error."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(KVPlanError, match=r"^CONFIG: cannot read '.*model.safetensors' ") as caught:
        fingerprint(tmp_path)
    assert got in str(caught.value)
    assert caught.value.details["path"] == str(path)


@pytest.mark.parametrize(
    "entry",
    [
        7,
        None,
        "F32",
        [],
        {},
        {**HEADER, "dtype": None},
        {**HEADER, "shape": 2},
        {**HEADER, "shape": {}},
        {**HEADER, "shape": "2"},
        {**HEADER, "shape": [True]},
        {**HEADER, "shape": [2.0]},
        {**HEADER, "shape": [-2]},
        {**HEADER, "shape": [[]]},
        {**HEADER, "data_offsets": [0]},
        {**HEADER, "data_offsets": [0, 1, 2]},
        {**HEADER, "data_offsets": None},
        {**HEADER, "data_offsets": ["0", "2"]},
        {**HEADER, "data_offsets": [0, True]},
        {**HEADER, "data_offsets": [-1, 2]},
        {**HEADER, "data_offsets": [2, 1]},
        {**HEADER, "data_offsets": [0, 3]},
        {**HEADER, "data_offsets": [10**30, 10**30]},
    ],
)
def test_a_broken_tensor_is_refused(tmp_path: Path, entry: Any) -> None:
    """Whatever a header says of a tensor, it is a tensor within the file or an error."""
    path = tmp_path / "model.safetensors"
    write_raw(path, json.dumps({"t": HEADER}).encode(), b"ab")
    assert fingerprint(tmp_path)
    write_raw(path, json.dumps({"t": entry}).encode(), b"ab")
    with pytest.raises(KVPlanError, match=r"^CONFIG: .* within 2 bytes of data, got 't': "):
        fingerprint(tmp_path)


def test_a_long_header_is_refused(tmp_path: Path) -> None:
    """A length that the format does not allow is not read, even where a file is as long."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(path, MAX_HEADER_BYTES + 100)
    with pytest.raises(KVPlanError, match=r"^CONFIG: .* at most 100000000 bytes in a file of"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", INDEX])
@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b'{"a":' * 100_000, b"9" * 5000])
def test_a_broken_configuration_is_refused(tmp_path: Path, name: str, text: bytes) -> None:
    """Configurations and indexes are JSON objects."""
    write(tmp_path / "model.safetensors", MODEL.items())
    (tmp_path / name).write_bytes(text)
    with pytest.raises(KVPlanError, match=f"^CONFIG: cannot read '.*{name}' of a model"):
        fingerprint(tmp_path)


def test_a_configuration_too_deep_to_write_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python can read some configurations that nest too deeply for it to write."""

    def failing(value: Any, sort_keys: bool) -> str:
        raise RecursionError("too deep")

    write(tmp_path / "model.safetensors", MODEL.items())
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(json, "dumps", failing)
    with pytest.raises(KVPlanError, match=r"^CONFIG: .* expected a JSON object, got too deep$"):
        fingerprint(tmp_path)


def test_a_long_configuration_is_refused(tmp_path: Path) -> None:
    """A file that is no configuration is not read into memory."""
    write(tmp_path / "model.safetensors", MODEL.items())
    (tmp_path / "adapter_config.json").touch()
    os.truncate(tmp_path / "adapter_config.json", MAX_CONFIG_BYTES + 1)
    with pytest.raises(KVPlanError, match=r"^CONFIG: .* at most 67108864 bytes, got 67108865$"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": ["b.safetensors"]}])
def test_a_broken_index_is_refused(tmp_path: Path, weight_map: Any) -> None:
    """An index maps tensors to files."""
    write(tmp_path / "model.safetensors", MODEL.items())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(KVPlanError, match=r"^CONFIG: .* a weight_map from tensors to files"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("name", ["b.safetensors", "../outside.safetensors", "config.json"])
def test_a_shard_that_is_missing_is_refused(tmp_path: Path, name: str) -> None:
    """An index names weights in its own folder; half a download is no other model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for path in (folder / "a.safetensors", tmp_path / "outside.safetensors"):
        write(path, MODEL.items())
    (folder / INDEX).write_text(json.dumps({"weight_map": {"t": "a.safetensors", "u": name}}))
    with pytest.raises(KVPlanError, match=f"^CONFIG: .* got '{name}' .a download that is not over"):
        fingerprint(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_config.json", "code.py"])
def test_only_files_are_read(tmp_path: Path, name: str) -> None:
    """A link to nothing and a pipe, which could be read forever, are refused."""
    write(tmp_path / "a.safetensors", MODEL.items())
    (tmp_path / name).symlink_to("gone")
    with pytest.raises(KVPlanError, match=f"^CONFIG: .*{name}' of a model: .* .a link to a file"):
        fingerprint(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(KVPlanError, match=f"^CONFIG: .*{name}' .* a regular file, got none$"):
        fingerprint(tmp_path)


def test_a_file_that_shrinks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download into the folder while it is read does not make a digest."""
    write(tmp_path / "model.safetensors", MODEL.items())
    monkeypatch.setattr(os, "pread", lambda descriptor, num_bytes, offset: b"")
    with pytest.raises(KVPlanError, match=r"^CONFIG: .* a file that keeps its size"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), OSError(5, "I/O error")])
def test_errors_of_a_disk_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
) -> None:
    """What the system says of a file is in the message."""

    def failing(descriptor: int, num_bytes: int, offset: int) -> bytes:
        raise error

    write(tmp_path / "model.safetensors", MODEL.items())
    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(KVPlanError, match=f"^CONFIG: .* got .*{error.strerror}"):
        fingerprint(tmp_path)
