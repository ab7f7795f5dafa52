"""The doctor: a line for each thing that serving needs on this machine, right, or with what to do.

It loads no NIXL. What does is in :mod:`kvplan_nixl.probe`, and runs in processes of its own: one
that crashes or hangs is a line too.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import metadata
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan_nixl.mapping import allocator_notes
from kvplan_nixl.serving.access import is_loopback

PROBE_S: Final = 60.0
"""How long a probe may take."""

NIXL_PACKAGE: Final = "nixl>=1.5.1,<2"
"""What kvplan's extra ``nixl`` installs."""

VARIABLES: Final = MappingProxyType({"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "debug"})
"""The environment of probes: UCX lists its transports where it logs its steps."""

LISTED: Final = re.compile(r"\| *([\w-]*) *\| *\w* *\| ([+-]) (\w+) *\| (.*?) *\|")
"""A row of UCX's list: the type, unless it is that of the row above, the transport, its devices."""

USED: Final = re.compile(r"memory read by ucp_get(?:.*\n)+?.*\.\.inf \|[^|]*\| *(.*?) *\|")
"""What UCX logs of the transports by which it reads long pieces of a peer's memory, in a table."""

NO_NVLINKS: Final = "cuda-ipc get zcopy disabled"
"""What UCX logs where it reads from GPUs of the same host by its other transports, mostly TCP."""

FOR_OTHER_HOSTS: Final = "192.0.2.1"
"""An address outside this machine (RFC 5737). Nothing is sent there."""


class State(StrEnum):
    """What a line says: all is right, something to know, or something to mend."""

    RIGHT = "right"
    NOTE = "note"
    WRONG = "wrong"


@attrs.frozen
class Finding:
    """A line of the doctor's: its subject, what was seen, and what to do where it is not right.

    >>> print(Finding("GPU", State.NOTE, "none seen", "run it where engines run"))
    note   GPU               none seen
                             do: run it where engines run
    """

    subject: str
    state: State
    text: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<6} {self.subject:<17} {self.text}"
        return f"{line}\n{'':24} do: {self.advice}" if self.advice else line


@attrs.frozen
class Engine:
    """An engine: its module, the versions that kvplan was judged with, and how it finds plugins."""

    name: str
    module: str
    versions: tuple[str, ...]
    group: str
    allowed: str
    other_way: str = ""


ENGINES: Final = (
    Engine(
        "vLLM",
        "vllm",
        ("0.32", "0.33"),
        "vllm.general_plugins",
        "VLLM_PLUGINS",
        'name "kv_connector_module_path": "kvplan_nixl.vllm"',
    ),
    Engine("SGLang", "sglang", ("0.5.23",), "sglang.srt.plugins", "SGLANG_PLUGINS"),
)
"""The engines that have a connector.

``allowed`` is the variable that names the plugins to load, ``other_way`` how else an engine finds
the connector.
"""


@attrs.frozen
class Trial:
    """What a probe has told: its documents, the log around them, and why it ended early, if so."""

    documents: tuple[Mapping[str, Any], ...]
    log: str
    failure: str

    @property
    def told(self) -> Mapping[str, Any]:
        """The first document; where there is none, the failure is its error."""
        return self.documents[0] if self.documents else {"error": self.failure}


def probe(name: str, *arguments: str) -> Trial:
    """Run a probe in a process of its own."""
    command = [sys.executable, "-m", "kvplan_nixl.probe", name, *arguments]
    environment = {**os.environ, **VARIABLES}
    failure = ""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        failure = f"no answer within {PROBE_S:g} s"
    lines = output.decode(errors="replace").splitlines()
    if not failure and process.returncode < 0:
        failure = f"ended by {signal.Signals(-process.returncode).name}"
    elif not failure and process.returncode:
        failure = next((line for line in reversed(lines) if line.strip()), "ended early")
    documents = tuple(json.loads(line) for line in lines if line.startswith('{"'))
    return Trial(documents, output.decode(errors="replace"), failure)


def findings(host: str, port: int) -> Iterator[Finding]:
    """Yield all lines. A prefill engine on this machine would listen at ``host`` and ``port``."""
    yield Finding("Python", State.RIGHT, platform.python_version())
    yield kvplan_finding()
    for engine in ENGINES:
        yield from engine_findings(engine)
    has_gpu, gpu = gpu_finding()
    yield gpu
    trial = probe("start")
    if not trial.documents:
        yield Finding("NIXL", State.WRONG, trial.failure, f"pip install '{NIXL_PACKAGE}'")
        return
    nixl, *started = trial.documents
    yield Finding("NIXL", State.RIGHT, nixl["version"])
    trial = attrs.evolve(trial, documents=tuple(started))
    yield backend_finding(nixl["backends"], trial)
    yield from transport_findings(trial.log, has_gpu)
    yield from address_findings(host, port)
    yield transfer_finding("transfer", "cpu")
    if has_gpu:
        yield transfer_finding("GPU transfer", "cuda:0")
        yield mapping_finding(os.environ, probe("map"))
        if "vllm" in metadata.packages_distributions():
            yield layout_finding(os.environ)


def kvplan_finding() -> Finding:
    """Return the line of kvplan itself."""
    try:
        return Finding("kvplan", State.RIGHT, metadata.version("kvplan"))
    except metadata.PackageNotFoundError:
        text = "not installed, but found"
        advice = "pip install it beside the engine, which finds plugins of installed packages alone"
        return Finding("kvplan", State.NOTE, text, advice)


def engine_findings(engine: Engine) -> Iterator[Finding]:
    """Yield the lines of an engine: its version, and whether it finds kvplan's plugin."""
    packages = metadata.packages_distributions().get(engine.module)
    if packages is None:
        yield Finding(engine.name, State.NOTE, "not installed here")
        return
    version = metadata.version(packages[0])
    if any(f"{version}.".startswith(f"{judged}.") for judged in engine.versions):
        yield Finding(engine.name, State.RIGHT, version)
    else:
        judged = " and ".join(engine.versions)
        advice = f"use {judged}, or set verify on decode and compare answers before you serve"
        yield Finding(
            engine.name, State.NOTE, f"{version}; kvplan was judged with {judged}", advice
        )
    yield plugin_finding(engine)


def plugin_finding(engine: Engine) -> Finding:
    """Return the line of kvplan's plugin for an engine."""
    entries = tuple(metadata.entry_points(group=engine.group, name="kvplan"))
    allowed = os.environ.get(engine.allowed)
    if not entries:
        text = f"no kvplan in {engine.group}"
        advice = "pip install kvplan in this environment"
    elif allowed is not None and "kvplan" not in allowed.split(","):
        text = f"not loaded, by {engine.allowed}={allowed}"
        advice = f"add kvplan to {engine.allowed}"
    else:
        return Finding(f"{engine.name} plugin", State.RIGHT, entries[0].value)
    if engine.other_way:
        return Finding(
            f"{engine.name} plugin", State.NOTE, text, f"{advice}, or {engine.other_way}"
        )
    return Finding(f"{engine.name} plugin", State.WRONG, text, advice)


def gpu_finding() -> tuple[bool, Finding]:
    """Return whether there is a GPU of NVIDIA's, and its line."""
    program = shutil.which("nvidia-smi")
    names = []
    if program is not None:
        query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        # a driver that does not work ends it with an error, or never
        try:
            ran = subprocess.run(query, capture_output=True, text=True, timeout=PROBE_S)
        except subprocess.TimeoutExpired:
            return False, Finding("GPU", State.WRONG, "nvidia-smi hangs", "mend the driver")
        if ran.returncode:
            text = f"nvidia-smi: {(ran.stderr or ran.stdout).strip()}"
            return False, Finding("GPU", State.WRONG, text, "mend the driver")
        names = ran.stdout.splitlines()
    if not names:
        return False, Finding("GPU", State.NOTE, "none seen: caches are in host memory")
    return True, Finding("GPU", State.RIGHT, "; ".join(names))


def backend_finding(names: Sequence[str], trial: Trial) -> Finding:
    """Return the line of NIXL's backends, of which kvplan's connectors need UCX.

    ``trial`` has started them, as far as it came.
    """
    errors = dict[str, str]()
    waiting = list(names)
    while True:
        errors |= {document["backend"]: document["error"] for document in trial.documents}
        waiting = waiting[len(trial.documents) :]
        if not waiting:
            break
        # the backend at which a process ended is not tried again
        errors[waiting.pop(0)] = trial.failure
        if not waiting:
            break
        trial = probe("start", *waiting)
    working = [name for name in names if not errors[name]]
    failing = [name for name in names if errors[name]]
    text = f"{', '.join(working) or 'none'} start; {', '.join(failing) or 'none'} do not"
    if "UCX" in working:
        return Finding("NIXL backends", State.RIGHT, text)
    reason = errors.get("UCX", "NIXL has no plugin for it")
    advice = f"reinstall NIXL for this machine: pip install --force-reinstall '{NIXL_PACKAGE}'"
    return Finding("NIXL backends", State.WRONG, f"{text}; UCX: {reason}", advice)


def transports_of(log: str) -> dict[str, dict[str, str]]:
    """Return the devices of the transports that UCX enables, by type and by transport.

    >>> row = "| network    | tcp       | + tcp     | + eth0  + lo |"
    >>> transports_of(f"{row}\\n| intra-node | cma | - cma | - memory |")
    {'network': {'tcp': 'eth0 lo'}, 'intra-node': {}}
    """
    transports = dict[str, dict[str, str]]()
    kind = ""
    for row_kind, mark, transport, devices in LISTED.findall(log):
        # a row without a type has that of the row above
        kind = row_kind or kind
        of_kind = transports.setdefault(kind, {})
        if mark == "+":
            of_kind[transport] = " ".join(devices.replace("+", " ").split())
    return transports


def transport_findings(log: str, has_gpu: bool) -> Iterator[Finding]:
    """Yield the lines of UCX's transports, as UCX lists them in its log."""
    listed = transports_of(log)
    if not listed:
        yield Finding("UCX transports", State.NOTE, "UCX does not list them")
        return
    network = listed.get("network", {})
    enabled = set().union(*listed.values())
    rdma = [f"{name} ({devices})" for name, devices in network.items() if name != "tcp"]
    if rdma:
        yield Finding("RDMA", State.RIGHT, ", ".join(rdma))
    else:
        advice = (
            "if the machine has RDMA devices, let this process see /dev/infiniband, lift its "
            "limit of locked memory (ulimit -l), and look at UCX_TLS and UCX_NET_DEVICES"
        )
        yield Finding("RDMA", State.NOTE, "none: other hosts are read over TCP", advice)
    if "tcp" in network:
        yield Finding("TCP", State.RIGHT, network["tcp"])
    else:
        state = State.NOTE if rdma else State.WRONG
        yield Finding("TCP", state, "left out", "look at UCX_TLS and UCX_NET_DEVICES")
    if "cma" in enabled:
        yield Finding("CMA", State.RIGHT, "engines of this host copy out of each other's memory")
    else:
        advice = "look at UCX_TLS, and let containers of this host share a PID namespace"
        yield Finding("CMA", State.NOTE, "left out: engines of this host read over TCP", advice)
    if has_gpu and not {"cuda_copy", "cuda_ipc"} <= enabled:
        names = " and ".join(sorted(enabled & {"cuda_copy", "cuda_ipc"})) or "neither"
        advice = "install NIXL for torch's CUDA (nixl-cu12 or nixl-cu13)"
        yield Finding("CUDA IPC", State.WRONG, f"{names} of cuda_copy and cuda_ipc", advice)
    elif has_gpu and NO_NVLINKS in log:
        text = "cuda_copy, cuda_ipc for writes alone"
        advice = "let UCX_CUDA_IPC_ENABLE_GET_ZCOPY be, which kvplan sets to on"
        yield Finding("CUDA IPC", State.WRONG, text, advice)
    elif has_gpu:
        yield Finding("CUDA IPC", State.RIGHT, "cuda_copy, cuda_ipc")


def outward_address() -> str:
    """Return the address that this machine has for other hosts, empty if it reaches none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        try:
            # a datagram's socket gets its address when it is connected, and sends nothing
            endpoint.connect((FOR_OTHER_HOSTS, 9))
        except OSError:
            return ""
        return str(endpoint.getsockname()[0])


def address_findings(host: str, port: int) -> Iterator[Finding]:
    """Yield the lines of the address that peers reach, and of ports."""
    trial = probe("listen", host, f"{port}")
    told = trial.told
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if told["error"]:
        advice = told.get("hint") or "try another --host or --port, unless an engine listens there"
        yield Finding("address", State.WRONG, told["error"], advice)
    elif is_loopback(host):
        outward = outward_address()
        advice = f"for engines on several hosts, set KVPLAN_KEY on all, and try --host {outward}"
        text = f"{where} answers engines on this machine"
        yield Finding("address", State.NOTE, text, advice if outward else "")
    else:
        key = "with a key" if told["has_key"] else "without a key"
        yield Finding("address", State.RIGHT, f"{where} answers, {key}")
    ports = os.environ.get("UCX_TCP_PORT_RANGE")
    if ports is None:
        advice = "where a firewall is between engines, set UCX_TCP_PORT_RANGE=7000-7999 and open it"
        yield Finding("ports", State.NOTE, f"{port}, and any port for UCX over TCP", advice)
    else:
        yield Finding("ports", State.RIGHT, f"{port}, and {ports} for UCX over TCP")


def transfer_finding(subject: str, device: str) -> Finding:
    """Return the line of a transfer between two processes with memory of one device."""
    trial = probe("move", device)
    told = trial.told
    if told["error"]:
        advice = f"set UCX_LOG_LEVEL=info and run python -m kvplan_nixl.probe move {device}"
        return Finding(subject, State.WRONG, told["error"], advice)
    rate = told["num_bytes"] / told["elapsed_s"] / 2**30
    ways = USED.search(trial.log)
    by = f" by {ways[1]}" if ways else ""
    text = f"{rate:.2f} GiB/s between two processes{by}"
    if told["is_right"]:
        return Finding(subject, State.RIGHT, f"{text}, every byte right")
    return Finding(subject, State.WRONG, f"{text}: BYTES DIFFER", "do not serve; report a bug")


def mapping_finding(environment: Mapping[str, str], trial: Trial) -> Finding:
    """Return the line about memory of a GPU that other engines of this host map and read.

    ``trial`` has asked CUDA whether memory of torch has a handle, in a process of its own. Engines
    may allocate theirs in another way, such as for sleep mode: each says so when it starts.
    """
    subject = "GPU memory"
    notes = [*allocator_notes(environment)]
    told = trial.told
    if told["error"]:
        return Finding(subject, State.WRONG, told["error"], "look at the driver and at torch")
    if told["reason"]:
        notes.insert(0, f"engines of this host cannot map it: {told['reason']}")
    if notes:
        advice = "unset what is named here, and leave sleep mode off, or reads are far slower"
        return Finding(subject, State.NOTE, "; ".join(notes), advice)
    by = "by one kernel" if told["has_triton"] else "by torch's operations, as Triton is missing"
    return Finding(subject, State.RIGHT, f"engines of this host map and copy it, {by}")


def layout_finding(environment: Mapping[str, str]) -> Finding:
    """Return the line about the order in which vLLM lays out a cache in a GPU's memory.

    It tells what is asked for. What vLLM takes depends on the model's attention, so an engine says
    that when it starts.
    """
    subject = "vLLM KV layout"
    layout = environment.get("VLLM_KV_CACHE_LAYOUT")
    if layout is None:
        text = "kvplan asks for BLHNC, a block of all layers in one piece, except for MLA"
        return Finding(subject, State.RIGHT, f"{text}; engines log what they got")
    if layout.upper().startswith("B"):
        text = f"VLLM_KV_CACHE_LAYOUT={layout}: a block of all layers is one piece"
        return Finding(subject, State.RIGHT, text)
    text = f"VLLM_KV_CACHE_LAYOUT={layout}: a block is at least one piece for each layer"
    advice = "unset it, and kvplan asks for BLHNC: UCX takes its time for each piece"
    return Finding(subject, State.NOTE, text, advice)


def main(host: str, port: int, as_json: bool) -> int:
    """Print all lines as they come, or one JSON document. Exit status 1: something is wrong."""
    lines = []
    host = host.removeprefix("[").removesuffix("]")
    for finding in findings(host, port):
        lines.append(finding)
        if not as_json:
            print(finding, flush=True)
    if as_json:
        print(json.dumps({"findings": [attrs.asdict(finding) for finding in lines]}, indent=2))
    return int(any(finding.state is State.WRONG for finding in lines))
