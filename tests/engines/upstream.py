"""Runs vLLM's own tests of connectors with kvplan in place of NixlConnector: ``python -m tests.engines.upstream``.

They come with vLLM's source package, of which nothing else is used. Those at the level of the scheduler take another
connector. The table says how many a connector passes, and why it does not pass the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import urllib.request
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pip._internal.models.index import PyPI

from tests.engines.models import build

FOLDER = Path("build/engines")
UNIT = "tests/v1/kv_connector/unit"
FILES = ("test_remote_prefill_lifecycle", "test_remote_decode_lifecycle", "test_bidirectional_kv_transfer")

CONNECTORS: dict[str, dict[str, Any]] = {
    "nixl": {"kv_connector": "NixlConnector"},
    "kvplan": {
        "kv_connector": "KvplanConnector",
        "kv_connector_module_path": "kvplan_nixl.vllm",
        "kv_role": "kv_both",
    },
}

LAST_TOKEN = "counts the prompt's last token among those that are read; kvplan leaves it out, since decode computes it"
STATES = "has drafts beside Mamba states, which kvplan refuses by name"
TABLES = "counts blocks in a list for each group; a table of kvplan's has a name, and says where it begins"
BY_HAND = "states a handoff by hand, without a lease and a digest of the prompt: kvplan lets the request fail"
EXPIRY = "looks for the time when blocks expire; kvplan's readers claim a lease instead"

REASONS = {
    "test_remote_prefill_lifecycle.test_basic_lifecycle": LAST_TOKEN,
    "test_remote_prefill_lifecycle.test_async_load_does_not_double_reserve_mamba_spec_blocks": STATES,
    "test_remote_decode_lifecycle.test_prefix_cache_lifecycle": TABLES,
    "test_bidirectional_kv_transfer.test_remote_blocks_exceed_prompt_tokens": LAST_TOKEN,
    "test_bidirectional_kv_transfer.test_d_node_partial_last_block_remote_num_tokens": TABLES,
    "test_bidirectional_kv_transfer.test_kv_recompute_threshold_skips_small_transfer": BY_HAND,
    "test_bidirectional_kv_transfer.test_d_node_request_finished_exports_blocks_expiry_time": EXPIRY,
}
"""Why kvplan does not pass a test."""


def source_package(release: str) -> Path:
    """Return the folder of vLLM's source package, fetched from the package index once."""
    folder = FOLDER / f"vllm-{release}"
    if folder.is_dir():
        return folder
    index = os.environ.get("PIP_INDEX_URL", PyPI.simple_url)
    headers = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with urllib.request.urlopen(urllib.request.Request(f"{index.rstrip('/')}/vllm/", headers=headers)) as answer:
        files = json.load(answer)["files"]
    (entry,) = (file for file in files if file["filename"] == f"vllm-{release}.tar.gz")
    with urllib.request.urlopen(entry["url"]) as answer:
        archive = answer.read()
    if hashlib.sha256(archive).hexdigest() != entry["hashes"]["sha256"]:
        raise SystemExit(f"{entry['filename']} is not what the index says")
    path = FOLDER / entry["filename"]
    path.write_bytes(archive)
    with tarfile.open(path) as package:
        members = [member for member in package if member.name.startswith(f"{folder.name}/tests/")]
        package.extractall(FOLDER, members, filter="data")
    (folder / "tests/conftest.py").unlink()  # for tests of other kinds, with imports of their own
    return folder


def outcomes(package: Path, connector: str) -> dict[str, str]:
    """Run the tests with a connector. Returns what each has come to: passed, failed, or the reason for a skip."""
    model = FOLDER / "llama"
    build("llama", model)
    settings = {"model": str(model.resolve()), "max_model_len": 1024, **CONNECTORS[connector]}
    report = (FOLDER / f"upstream-{connector}.xml").resolve()
    here = Path(__file__).parent
    paths = [package.resolve(), here / "in_place", here.parent.parent]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "JUDGED": json.dumps(settings),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    options = ["-q", "-p", "kvplan_in_place", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
    files = [f"{UNIT}/{file}.py" for file in FILES]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir=.",
        "--confcutdir=.",
        "-W",
        "ignore",
        *options,
        *files,
    ]
    with (FOLDER / "logs" / f"upstream {connector}.log".replace(" ", "_")).open("w") as log:
        subprocess.run(command, cwd=package, env=environment, stdout=log, stderr=log, check=False)
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname'].rpartition('.')[2]}.{case.attrib['name']}"
        skipped = case.find("skipped")
        if skipped is not None:
            results[name] = skipped.attrib["message"]
        else:
            results[name] = "passed" if not len(case) or case[0].tag == "system-out" else "failed"
    return results


def count(results: dict[str, str], file: str) -> Counter[str]:
    """Count the outcomes of a file's tests."""
    return Counter(outcome for name, outcome in results.items() if name.startswith(f"{file}."))


def main() -> int:
    """Print the table; return 1 if a test fails for a reason that is not known, or passes though one is."""
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    release = version("vllm-cpu")
    package = source_package(release)
    results = {connector: outcomes(package, connector) for connector in CONNECTORS}
    print(
        f"vLLM {release}\n\n| tests | | NixlConnector | kvplan | does not apply |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for file in FILES:
        nixl, kvplan = (count(result, file) for result in results.values())
        num_skipped = sum(kvplan.values()) - kvplan["passed"] - kvplan["failed"]
        print(f"| {file} | {sum(kvplan.values())} | {nixl['passed']} | {kvplan['passed']} | {num_skipped} |")
    failed: dict[str, list[str]] = {}
    for name, outcome in results["kvplan"].items():
        if outcome == "failed":
            reason = REASONS.get(name.partition("[")[0], "unknown")
            failed.setdefault(reason, []).append(name)
    for reason, names in failed.items():
        print(f"\nNot passed, {reason}: {', '.join(names)}")
    passed = [name for name in REASONS if results["kvplan"].get(name) == "passed"]
    if passed:
        print(f"\nPassed, though a reason is stated: {', '.join(passed)}")
    return int("unknown" in failed or bool(passed))


if __name__ == "__main__":
    sys.exit(main())
