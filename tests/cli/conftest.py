"""The folder in which commands run: a small model's configuration, and offers of workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplan import encode
from tests.small import engine

TINY = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
DECODE, PREFILL, OTHER = engine("decode", tp=2, tokens=8)[1], engine("prefill")[0], engine("other", heads=2)[0]
BROKEN = encode(PREFILL).replace(b'"size":4', b'"size":"4"').replace(b'"rank":0', b'"rank":-1')
OFFERS = {"decode": encode(DECODE), "prefill": encode(PREFILL), "other": encode(OTHER), "broken": BROKEN}


GUIDE = """\
containers:
  - name: decode
    env:
      - name: VLLM_KV_CACHE_LAYOUT
        value: "HND"
    command: ["vllm", "serve"]
    args:
      - tiny.json
      - --tensor-parallel-size=2
      - "--kv-transfer-config"
      - '{"kv_connector":"KvplanConnector","kv_connector_module_path":"kvplan_nixl.vllm","kv_role":"kv_consumer"}'
      - --gpu-memory-utilization
      - "0.9"
"""
ENGINES = """\
- args:
    - --tp-size
    - "2"
- args:
    - --tp-size
    - "4"
"""
VLLM_LOG = """\
(APIServer pid=7) INFO [utils.py] non-default args: {'model_tag': 'tiny.json', 'tensor_parallel_size': 2, 'port': 8100}
(EngineCore pid=9) INFO [base.py] KV cache layout LBHNC, by VLLM_KV_CACHE_LAYOUT=HND
(EngineCore pid=9) INFO [kv_cache_utils.py] GPU KV cache size: 1,600 tokens
"""
SGLANG_LOG = """\
[2026-11-01 00:00:00] server_args=ServerArgs(model_path='tiny.json', tp_size=2, page_size=16, dtype='auto', host='::')
[2026-11-01 00:00:09] max_total_num_tokens=4800, chunked_prefill_size=2048
"""


def write_files(folder: Path) -> None:
    """Write the configuration, also under a name that looks like markup, and the offers."""
    for name in ("tiny", "[bold]"):
        (folder / f"{name}.json").write_text(json.dumps({**TINY, "num_key_value_heads": 2}))
    for name, text in (
        ("guide.yaml", GUIDE),
        ("engines.yaml", ENGINES),
        ("vllm.log", VLLM_LOG),
        ("sglang.log", SGLANG_LOG),
    ):
        (folder / name).write_text(text)
    for name, data in OFFERS.items():
        (folder / f"{name}.json").write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    return tmp_path
