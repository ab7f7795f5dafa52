"""The files of docs/deploy, which cannot be run here: by their schemas, and by what they must agree on."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml

from kvplan.cli.app import kvplan
from tests.pages import ROOT

DEPLOY = ROOT / "docs" / "deploy"
COMPOSE: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OBJECTS: dict[tuple[str, str], Any] = {
    (document["kind"], document["metadata"]["name"]): document
    for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
}
BOARD: Any = json.loads((DEPLOY / "grafana" / "kvplan.json").read_text())
CALLS = ast.walk(ast.parse((ROOT / "kvplan_nixl/vllm/metrics.py").read_text()))  # vLLM is not here to import it
METRICS = {
    ast.literal_eval(call.args[0]): (len(call.args) > 3, any(word.arg == "is_gauge" for word in call.keywords))
    for call in CALLS
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "Metric"
}
"""Whether a metric has buckets, and whether it is a gauge, by its name."""
PARTS = {"vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"}
for name, (has_buckets, is_gauge) in METRICS.items():
    parts = ("_bucket", "_sum", "_count") if has_buckets else ("",) if is_gauge else ("_total",)
    PARTS |= {f"{name}{part}" for part in parts}
MODEL = "Qwen/Qwen3-8B"
ENGINES = ("prefill", "decode")


def run(*arguments: str) -> None:
    """Runs a checker, which must be content."""
    ran = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_compose_is_as_its_specification_says() -> None:
    """By the schema of compose-spec."""
    run("check_jsonschema", "--builtin-schema", "vendor.compose-spec", f"{DEPLOY / 'compose.yaml'}")


def test_objects_are_as_kubernetes_says() -> None:
    """By the schemas of its objects; no other key is let pass."""
    run("kubernetes_validate", "--strict", f"{DEPLOY / 'kubernetes.yaml'}")


def container(name: str) -> Any:
    (only,) = OBJECTS["Deployment", name]["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("name", [*ENGINES, "proxy"])
def test_both_files_run_the_same_commands(name: str) -> None:
    """But for the model, which compose takes from the environment."""
    command = [word.replace(f"${{MODEL:-{MODEL}}}", MODEL) for word in COMPOSE["services"][name]["command"]]
    assert command == container(name)["command"]


@pytest.mark.parametrize("name, role", [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_engines_are_set_as_the_guide_says(name: str, role: str) -> None:
    """Their connector is that of the guide, their role that of their name."""
    text = container(name)["command"][-1]
    assert f"'{{\n  {text[1:]}'" in (ROOT / "docs/how-to/vllm.md").read_text()
    assert json.loads(text)["kv_role"] == role


@pytest.mark.parametrize("name", ENGINES)
def test_ports_are_those_of_the_policy(name: str) -> None:
    """Engines reach each other's listener and UCX, the proxy and Prometheus the server of requests, and nobody more."""
    variables = {variable["name"]: variable.get("value") for variable in container(name)["env"]}
    listener = int(variables["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    first, last = map(int, variables["UCX_TCP_PORT_RANGE"].split("-"))
    engines, others = OBJECTS["NetworkPolicy", "engines"]["spec"]["ingress"]
    assert engines["ports"] == [
        {"protocol": "TCP", "port": listener},
        {"protocol": "TCP", "port": first, "endPort": last},
    ]
    assert others["ports"] == [{"protocol": "TCP", "port": 8000}]
    assert [port["containerPort"] for port in container(name)["ports"]] == [8000, listener]
    environment = COMPOSE["services"][name]["environment"]
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == name
    for variable in ("VLLM_NIXL_SIDE_CHANNEL_PORT", "UCX_TCP_PORT_RANGE"):
        assert environment[variable] == variables[variable]
    assert {"KVPLAN_KEY", "VLLM_NIXL_SIDE_CHANNEL_HOST"} <= variables.keys() & environment.keys()


def test_who_is_meant_is_there() -> None:
    """Selectors of services and of the policy have labels of pods, and services have the names that the proxy asks."""
    labels = {
        name: deployment["spec"]["template"]["metadata"]["labels"].items()
        for (kind, name), deployment in OBJECTS.items()
        if kind == "Deployment"
    }
    for (kind, name), service in OBJECTS.items():
        if kind == "Service":
            selected = [pod for pod, its in labels.items() if service["spec"]["selector"].items() <= its]
            assert selected == [name]
    policy = OBJECTS["NetworkPolicy", "engines"]["spec"]["podSelector"]["matchLabels"]
    assert [pod for pod, its in labels.items() if policy.items() <= its] == [*ENGINES]
    command = container("proxy")["command"]
    assert [word for word in command if "://" in word] == [f"--{name}=http://{name}:8000" for name in ENGINES]


def test_the_image_has_what_is_installed_alone() -> None:
    """A copy of the whole checkout had its .git, and a .env with the engines' key that compose reads beside it."""
    lines = [line.split() for line in (DEPLOY / "Dockerfile").read_text().splitlines()]
    copied = {word for name, *words in (line for line in lines if line) if name == "COPY" for word in words[:-1]}
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", "README.md", *built["project"]["license-files"]}
    needed |= {built["tool"]["hatch"]["metadata"]["hooks"]["custom"]["path"]}
    wheel = built["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert copied == needed | {*wheel["packages"]} | {*wheel["force-include"]} | {"kvplan_nixl"}


def test_the_board_names_commands_that_there_are() -> None:
    """A description of a panel says which command to run next."""
    named = re.findall(r"\bkvplan ([a-z-]+) with\b", json.dumps(BOARD))
    assert {*named} == {"advise"} <= kvplan.commands.keys()
    assert json.dumps(BOARD).count("kvplan ") == len(named)


def test_nothing_runs_as_root() -> None:
    """The image has a user of its own, by a number that Kubernetes can compare, and pods have no rights beyond it."""
    (user,) = re.findall(r"^USER (\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert int(user) > 0
    for name in (*ENGINES, "proxy"):
        pod = OBJECTS["Deployment", name]["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container(name)["securityContext"] == context
    assert "privileged" not in f"{COMPOSE}{OBJECTS}"
    assert "/root" not in f"{COMPOSE}{OBJECTS}"


def test_images_have_a_version() -> None:
    """All but the one that is built here."""
    images = {service["image"] for service in COMPOSE["services"].values()}
    images |= {container(name)["image"] for name in (*ENGINES, "proxy")}
    images |= {*re.findall(r"^FROM (.+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)}
    assert [image for image in images - {"kvplan-vllm"} if not re.fullmatch(r".+:v?\d+\.\d+\.\d+", image)] == []


def test_what_is_published_is_published_on_loopback() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_prometheus_scrapes_both_engines() -> None:
    """By the names and the port of their services."""
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert [config["targets"] for config in job["static_configs"]] == [[f"{name}:8000"] for name in ENGINES]
    mounted = [volume for name in ("prometheus", "grafana") for volume in COMPOSE["services"][name]["volumes"]]
    assert mounted
    assert [volume for volume in mounted if not (DEPLOY / volume.partition(":")[0]).is_file()] == []


def expressions() -> Iterator[str]:
    for panel in BOARD["panels"]:
        yield from (target["expr"].replace("$__rate_interval", "1m") for target in panel["targets"])


def test_the_board_shows_every_metric_of_the_connector() -> None:
    """And no other, but for vLLM's own two of its prefix cache. Counters end in _total, histograms have parts."""
    assert len(METRICS) == 20
    shown = {name for expression in expressions() for name in re.findall(r"vllm:\w+", expression)}
    assert shown <= PARTS
    assert {*METRICS} <= {re.sub("_(bucket|sum|count|total)$", "", name) for name in shown}


@pytest.mark.parametrize("expression", [*expressions()])
def test_an_expression_is_one_of_prometheus(expression: str) -> None:
    """It parses; quantiles are of buckets, rates of counters."""
    promql_parser.parse(expression)
    assert ("histogram_quantile" in expression) == ("_bucket" in expression)


def test_panels_of_the_board_do_not_overlap() -> None:
    """Each has a place and an id of its own, and takes data from the source that Grafana is given."""
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len({*places}) == len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    targets = [target for panel in BOARD["panels"] for target in panel["targets"]]
    assert {target["datasource"]["uid"] for target in targets} == {source["uid"]}
