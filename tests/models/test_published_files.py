"""Published files, 89 of them, as their authors wrote them and as an engine's own reader returns them.

They come with the package ``aiconfigurator-core``. The reader is vLLM's where vLLM is installed, else transformers'.
"""

from __future__ import annotations

import json
import multiprocessing
from importlib.metadata import PackageNotFoundError, files
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kvplan import KVPlanError, Model


def published() -> dict[str, Path]:
    """The files by the names of their models."""
    try:
        listed = files("aiconfigurator-core") or []
    except PackageNotFoundError:
        return {}
    paths = [Path(str(file.locate())) for file in listed if file.match("model_configs/*_config.json")]
    ends = "_config.json"
    return {path.name.removesuffix(ends): path for path in paths if not path.name.endswith("_hf_quant_config.json")}


FILES = published()
pytestmark = pytest.mark.skipif(not FILES, reason="needs aiconfigurator-core")

REFUSED = {
    "deepseek_v4": "its layers keep compressed keys and values at several ratios",
    "deepseek_ref": "got 'deepseek_ref'",
}
"""Types that kvplan does not plan without an engine, and what it says."""

UNREAD = {
    "mimo": "of remote code",
    "nemotron-nas": "of remote code",
    "deepseek_ref": "of SGLang alone",
    "minimax_m3": "transformers knows the nested file alone",
    "kimi_k2": "of remote code, which vLLM knows and transformers does not",
    "kimi_k3": "of remote code, which vLLM knows and transformers does not",
}
"""Types that the reader does not know."""

READ_OTHERWISE = {"step3p7": "transformers 5.19 gives it a decoder of default sizes in place of the file's text_config"}
"""Types of which the reader returns something else than the file says."""


def read(path: Path) -> dict[str, Any]:
    """What the engine's reader returns of a file."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(path.read_bytes())
        try:
            from vllm.transformers_utils.config import get_config
        except ImportError:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(folder)
        else:
            config = get_config(folder, trust_remote_code=False)
        found: dict[str, Any] = config.to_dict()
        return found


def read_all(paths: list[Path]) -> list[dict[str, Any] | None]:
    """What the reader returns of files, None of those that it does not read."""
    found: list[dict[str, Any] | None] = []
    for path in paths:
        try:
            found.append(read(path))
        except (ValueError, KeyError, OSError):
            found.append(None)
    return found


@pytest.fixture(scope="module")
def returned() -> dict[str, dict[str, Any] | None]:
    """What the engine's reader returns of all files.

    Each type has a process of its own, as in an engine: reading DeepSeek-V3.2 changes how vLLM reads DeepSeek-V3.
    """
    try:
        import vllm.transformers_utils.config  # noqa: F401  # once, in front of all processes
    except ImportError:
        import transformers  # noqa: F401
    names: dict[str, list[str]] = {}
    for name, path in FILES.items():
        names.setdefault(json.loads(path.read_bytes())["model_type"], []).append(name)
    paths = [[FILES[name] for name in names_of_type] for names_of_type in names.values()]
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        found = pool.map(read_all, paths, chunksize=1)
    return dict(zip(chain(*names.values()), chain(*found), strict=True))


def caches(config: dict[str, Any]) -> Any:
    """What the layers of a model cache, or why that cannot be read."""
    try:
        return Model.from_config(config).layers
    except KVPlanError as error:
        return str(error)


@pytest.mark.parametrize("name", FILES)
def test_a_file_and_what_an_engine_reads_of_it_cache_the_same(name: str, returned: dict[str, Any]) -> None:
    """Each layer caches the same, and a file that is refused is refused for the reason that stands above."""
    stated = json.loads(FILES[name].read_bytes())
    model_type = stated["model_type"]
    by_file = caches(stated)
    if isinstance(by_file, str):
        assert REFUSED.get(model_type, "no reason") in by_file
    config = returned[name]
    if config is None:
        assert model_type in UNREAD
    elif model_type not in READ_OTHERWISE:
        by_engine = caches(config)
        assert by_engine == by_file or (isinstance(by_file, str) and REFUSED[model_type] in by_engine)
