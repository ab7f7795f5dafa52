"""Hypothesis profiles: ``ci`` repeats itself exactly; ``long``, by HYPOTHESIS_PROFILE=long, looks far.

Where NIXL, obstore, SGLang, torch, transformers or vLLM is not installed, what needs them is left out.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "long",
    max_examples=20_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

collect_ignore = ["tests/engines"]  # .ci/engines runs it, where vLLM is

os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # the refusals that tests provoke are asserted, not printed
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
os.environ.setdefault("UCX_NET_DEVICES", "lo")  # one test makes a network for a while, which others must not use

MISSING = [name for name in ("nixl", "obstore", "sglang", "torch", "transformers", "vllm") if find_spec(name) is None]
collect_ignore_glob = ["kvplan_nixl/vllm/[!p]*"] if "vllm" in MISSING else []  # all but the proxy
collect_ignore_glob += ["kvplan_nixl/sglang/[!_bs]*", "kvplan_nixl/sglang/store*"] if "sglang" in MISSING else []
collect_ignore_glob += ["tests/nixl/*"] if {"nixl", "torch"} & {*MISSING} else []
collect_ignore_glob += (
    ["kvplan_nixl/[!s]*", "kvplan_nixl/s[!e]*", "kvplan_nixl/settings.py"] if "nixl" in MISSING else []
)
collect_ignore_glob += ["kvplan_nixl/serving/store/objects.py"] if "obstore" in MISSING else []
collect_ignore_glob += ["tests/models/*walk.py"] if {"torch", "transformers"} & {*MISSING} else []


def pytest_report_header() -> list[str]:
    """Says what is left out."""
    return [f"left out: {', '.join(collect_ignore_glob)}; not installed: {', '.join(MISSING)}"] if MISSING else []
