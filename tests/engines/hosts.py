"""Hosts: network namespaces that a switch joins, in which engines run as on machines of their own.

Needs root, ``ip`` and ``tc`` (iproute2). Nothing of it is in the namespace of whoever runs it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

CLONE_NEWNET = 0x40000000

NOWHERE = "02:00:00:00:00:99"
"""An address in the network that no host has."""


class Host(NamedTuple):
    """A namespace, with one network device ``eth0`` that has an address."""

    name: str
    address: str


def enter(host: Host) -> None:
    """Move this thread, and those that it starts from now on, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{host.name}").open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), host.name)


class Network:
    """Hosts and the switch between them, until the context ends."""

    def __init__(self) -> None:
        self._switch = f"kvplan-{os.getpid()}"
        self._hosts: list[Host] = []

    def __enter__(self) -> Network:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self._switch, *(host.name for host in self._hosts)):
            _run("ip", "netns", "del", name)

    def host(self) -> Host:
        """Add a host."""
        number = len(self._hosts) + 1
        host = Host(f"{self._switch}-{number}", f"10.77.0.{number}")
        _run("ip", "netns", "add", host.name)
        self._hosts.append(host)
        port = self._port(host)
        device = ("link", "add", "eth0", "netns", host.name, "type", "veth", "peer", "name", port)
        _run("ip", "-n", self._switch, *device)
        _run("ip", "-n", self._switch, "link", "set", port, "up", "master", "switch")
        _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
        for name in ("lo", "eth0"):
            _run("ip", "-n", host.name, "link", "set", name, "up")
        return host

    def part(self, host: Host) -> None:
        """Lose all that a host sends, and all that others send to it."""
        _run("ip", "-n", self._switch, "link", "set", self._port(host), "nomaster")

    def join(self, host: Host) -> None:
        """End :meth:`part`."""
        _run("ip", "-n", self._switch, "link", "set", self._port(host), "master", "switch")

    def lose(self, sender: Host, receiver: Host) -> None:
        """Lose what one host sends to another; the other way nothing is lost."""
        neighbour = (receiver.address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
        _run("ip", "-n", sender.name, "neighbour", "replace", *neighbour)

    def find(self, sender: Host, receiver: Host) -> None:
        """End :meth:`lose`."""
        _run("ip", "-n", sender.name, "neighbour", "del", receiver.address, "dev", "eth0")

    def limit(self, host: Host, rate: str) -> None:
        """Let a host send no more than a rate, in the words of ``tc``."""
        bucket = ("tbf", "rate", rate, "burst", "32k", "limit", "10m")
        _run("tc", "-n", host.name, "qdisc", "replace", "dev", "eth0", "root", *bucket)

    @staticmethod
    def _port(host: Host) -> str:
        return f"port{host.address.rpartition('.')[2]}"


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise AssertionError(f"void: no hosts can be made here: {error}") from None
    if done.returncode:
        raise AssertionError(f"void: {' '.join(command)}: {done.stderr.strip()}")
