"""CMA: UCX's own copies between processes of one host.

A reader copies out of its source's memory by itself (``process_vm_readv``), and no source answers,
so it is the fastest way between two processes. But NIXL forgets the copies of a transfer that fails
while it is posted, and UCX goes on with them. They end with the process whose memory they read or
write. So an executor that may have such copies holds what has failed until that process has ended.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs

PROC: Final = Path("/proc")

IN_AGENT_NAME: Final = re.compile(r"\.(\d+)-(\d+)-(\d+)-([0-9a-f]{32})\.[0-9a-f]+$")
"""A process in the name of its agent: pid, ticks at start, PID namespace, boot of its host."""

WITH_CMA: Final = frozenset({"all", "sm", "shm", "cma"})
"""UCX's names for CMA, alone or among other transports."""


def is_enabled(options: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    """Return whether UCX may use CMA, by the options of NIXL's backend and the environment.

    The environment takes precedence. Without a list of transports UCX uses all.

    >>> is_enabled({"engine_config": "TLS=^cma,TCP_CONN_NB=y"}, {})
    False
    >>> is_enabled({"engine_config": "TLS=^cma,TCP_CONN_NB=y"}, {"UCX_TLS": "all"})
    True
    >>> is_enabled({}, {}), is_enabled({}, {"UCX_TLS": "tcp,self"})
    (True, False)
    """
    engine_config = options.get("engine_config", "")
    settings = dict(setting.partition("=")[::2] for setting in engine_config.split(","))
    listed = environment.get("UCX_TLS", settings.get("TLS", "all"))
    names_cma = not WITH_CMA.isdisjoint(listed.removeprefix("^").split(","))
    # a list that begins so names what is left out
    leaves_out = listed.startswith("^")
    return names_cma != leaves_out


@attrs.frozen
class Process:
    """A process, as others on its host know it.

    ``start_ticks`` tells it from earlier processes with its number ``pid``. Processes of another
    ``pid_namespace`` or another ``boot``, as on another host, do not see it.
    """

    pid: int
    start_ticks: int
    pid_namespace: int
    boot: str

    @classmethod
    def current(cls) -> Process | None:
        """Return this process, None where the system does not tell."""
        pid = os.getpid()
        try:
            namespace = (PROC / "self/ns/pid").stat().st_ino
            boot = (PROC / "sys/kernel/random/boot_id").read_text().strip().replace("-", "")
            return cls(pid, _start_ticks(pid), namespace, boot)
        except OSError:
            return None

    @classmethod
    def of_agent(cls, agent: str) -> Process | None:
        """Return the process in the name of a NIXL agent, None where there is none.

        >>> process = Process.current()
        >>> Process.of_agent(f"prefill.0.{process}.a1") == process
        True
        """
        named = IN_AGENT_NAME.search(agent)
        if named is None:
            return None
        pid, start_ticks, pid_namespace, boot = named.groups()
        return cls(int(pid), int(start_ticks), int(pid_namespace), boot)

    def __str__(self) -> str:
        return f"{self.pid}-{self.start_ticks}-{self.pid_namespace}-{self.boot}"

    def shares_host(self, process: Process) -> bool:
        """Return whether both processes are on one host and in one PID namespace.

        UCX uses CMA between no others.
        """
        return (self.boot, self.pid_namespace) == (process.boot, process.pid_namespace)

    def has_ended(self) -> bool:
        """Return whether the process, with all its threads, has ended. It must be on this host.

        Then its memory is gone. Where the system does not tell, it has not.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        # from here on no other process gets the number
        try:
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            return _start_ticks(self.pid) != self.start_ticks or bool(ended.poll(0))
        except (FileNotFoundError, ProcessLookupError):
            return True
        finally:
            os.close(descriptor)


def may_copy(ours: Process | None, theirs: Process | None) -> bool:
    """Return whether UCX may use CMA between two processes. It may if one of them is unknown."""
    return ours is None or theirs is None or ours.shares_host(theirs)


def _start_ticks(pid: int) -> int:
    """Return when a process began, in clock ticks after its host's boot."""
    # the command's name, in parentheses, may have spaces; the field is the 22nd, 20th after it
    *_, fields = (PROC / f"{pid}/stat").read_text().rpartition(")")
    return int(fields.split()[19])
