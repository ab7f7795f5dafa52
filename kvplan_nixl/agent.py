"""Agent: a wrapper of NIXL's agent that turns every failure into a :class:`~kvplan.KVPlanError`.

On some bad inputs NIXL's Python layer logs and continues, or returns None. On others it raises its
own exceptions. The wrapper raises one of three codes instead:

- ``BACKEND``: a backend is missing, or refuses the memory.
- ``PEER``: the remote agent is unknown or unreachable.
- ``TRANSFER``: any other failure of a transfer.

An agent and its handles are alive as long as anything refers to them, and NIXL's threads write
memory meanwhile. An exception of NIXL refers to them too, through the frames of its traceback. So
the errors that are raised instead do not refer to it, and all handles are in a
:class:`Handle`, which :meth:`Agent.close` empties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar
from weakref import WeakSet

import attrs
import numpy as np
import numpy.typing as npt

from kvplan import KVPlanError, Region

try:
    import nixl
except ImportError as missing:  # nixl itself, or the wheel with its library
    raise ImportError(f"kvplan_nixl needs NIXL: pip install 'nixl>=1.5.1,<2' ({missing})") from None

NIXL_ERRORS: Final = tuple(
    binding
    for binding in vars(nixl._bindings).values()
    if isinstance(binding, type) and issubclass(binding, Exception)
)
"""All exception types of NIXL. They have no common base."""

GONE: Final = (nixl._bindings.nixlRemoteDisconnectError, nixl._bindings.nixlNotFoundError)
"""NIXL raises these during a transfer whose remote agent has disconnected."""

FAILURES: Final[tuple[type[Exception], ...]] = (*NIXL_ERRORS, RuntimeError, UnicodeDecodeError)
"""NIXL's calls raise these: an agent's name may be no UTF-8."""

Result = TypeVar("Result")

LOCAL: Final = "NIXL_INIT_AGENT"
"""NIXL's name for the agent itself, as the owner of rows."""

PROGRESS_US: Final = 1000
"""Microseconds after which an agent's progress thread looks for work that has not woken it.

UCX wakes a thread that waits. A thread with a delay of 0, NIXL's own choice, takes a core.
"""


def open_agent(name: str) -> Any:
    """Return a new agent of NIXL without backends.

    NIXL's Python layer takes no delay from a caller, so the agent beneath it is replaced.
    """
    config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
    agent = nixl.nixl_agent(name, config)
    # two of one name would share files of telemetry
    agent.agent = None
    settings = nixl._bindings.nixlAgentConfig()
    settings.useProgThread = True
    settings.pthrDelay = PROGRESS_US
    settings.captureTelemetry = True
    agent.agent = nixl._bindings.nixlAgent(name, settings)
    return agent


@attrs.define(eq=False)
class Handle:
    """NIXL's handle of a transfer, or of descriptors that it has checked; None once it is freed.

    NIXL checks descriptors against registered memory, and frees them with the last reference.
    """

    nixl: Any


@attrs.frozen(order=True)
class MemoryRange:
    """Bytes ``[start, stop)`` of one kind of memory of a device, registered or to be registered."""

    memory: str
    device_id: int
    start: int
    stop: int

    @classmethod
    def of(cls, region: Region) -> MemoryRange:
        """Return the bytes of a region."""
        return cls(region.memory, region.device_id, region.address, region.end)

    @property
    def entry(self) -> tuple[int, int, int, str]:
        """The range as NIXL registers it: address, length, device, and no metadata."""
        return (self.start, self.stop - self.start, self.device_id, "")

    def overlaps(self, wanted: MemoryRange) -> bool:
        """Return whether both ranges have a byte in common."""
        is_same_memory = (self.memory, self.device_id) == (wanted.memory, wanted.device_id)
        return is_same_memory and self.start < wanted.stop and wanted.start < self.stop


def ranges_of(regions: Iterable[Region]) -> list[MemoryRange]:
    """Return the memory of regions, each byte once: regions that share bytes are one range.

    NIXL does not find descriptors in ranges that overlap, and deregisters two equal ones with a
    SIGSEGV.

    >>> regions = [Region("k", 4096, 64), Region("kv", 4096, 128), Region("more", 4224, 64)]
    >>> [(memory_range.start, memory_range.stop) for memory_range in ranges_of(regions)]
    [(4096, 4224), (4224, 4288)]
    """
    merged = list[MemoryRange]()
    # by address, so a range overlaps none before the last one
    for memory_range in sorted(map(MemoryRange.of, regions)):
        if merged and merged[-1].overlaps(memory_range):
            stop = max(merged[-1].stop, memory_range.stop)
            merged[-1] = attrs.evolve(merged[-1], stop=stop)
        else:
            merged.append(memory_range)
    return merged


class Agent:
    """One NIXL agent. ``backends`` are options by backend name, in order of preference."""

    def __init__(self, name: str, backends: Mapping[str, Mapping[str, str]]) -> None:
        self.name = name
        self._nixl_agent: Any = None
        text = ""
        try:
            self._nixl_agent = open_agent(name)
        except FAILURES as error:
            text = " ".join(str(error).split())
        # raised after the exception of NIXL is gone, which would be its context otherwise
        if self._nixl_agent is None:
            raise KVPlanError(
                "BACKEND", "make a NIXL agent", expected="no error", got=f"NIXL: {text}"
            )
        self._handles: WeakSet[Handle] = WeakSet()
        # each range that NIXL has, and the number of callers that registered it or a range in it
        self._registered: Counter[MemoryRange] = Counter()
        self._loaded: set[str] = set()
        self._memory_kinds: dict[str, frozenset[str]] = {}
        try:
            for backend, options in backends.items():
                self._add(backend, dict(options))
        except KVPlanError:
            self.close()
            raise

    def _add(self, backend: str, options: dict[str, str]) -> None:
        """Make a backend. Raises ``BACKEND`` for one that is missing or does not work."""
        plugins = self.plugins()
        if backend not in plugins:
            raise KVPlanError(
                "BACKEND",
                "make a NIXL agent",
                expected=f"a backend among {', '.join(plugins)}",
                got=repr(backend),
            )
        self._do(
            lambda agent: agent.create_backend(backend, options),
            "BACKEND",
            f"make a NIXL agent with backend {backend!r}",
            "one that works on this machine",
            backend=backend,
        )
        # NIXL says DRAM_SEG where kvplan says DRAM
        kinds = self._agent.get_backend_mem_types(backend)
        self._memory_kinds[backend] = frozenset(kind.removesuffix("_SEG") for kind in kinds)

    def _do(
        self, call: Callable[[Any], Result], code: str, action: str, expected: str, **details: Any
    ) -> Result:
        """Return the result of ``call`` for NIXL's agent.

        Raises an error that does not refer to NIXL instead of what the call raises.
        """
        agent = self._agent
        try:
            return call(agent)
        except FAILURES as error:
            if code == "TRANSFER" and isinstance(error, GONE):
                code = "PEER"
                expected = "a connected remote agent"
            # some of NIXL's errors have several lines, some have no text
            text = " ".join(str(error).split()) or type(error).__name__
            details["nixl"] = type(error).__name__
        finally:
            # the traceback of the error below refers to this frame
            del agent
        # raised after the exception of NIXL is gone, which would be its context otherwise
        raise KVPlanError(code, action, expected=expected, got=f"NIXL: {text}", **details)

    def close(self) -> None:
        """Free everything: handles, remote agents, registered memory, the agent.

        Nothing touches memory afterwards.
        """
        if self._nixl_agent is None:
            return
        # NIXL frees what a handle has with the last reference to it
        for handle in self._handles:
            handle.nixl = None
        for name in tuple(self._loaded):
            self.unload(name)
        try:
            self.deregister(self._registered.elements())
        finally:
            self._nixl_agent = None

    @property
    def _agent(self) -> Any:
        """NIXL's agent. Raises ``BACKEND`` after :meth:`close`."""
        if self._nixl_agent is None:
            raise KVPlanError(
                "BACKEND", "use a NIXL agent", expected="an open agent", got="a closed one"
            )
        return self._nixl_agent

    def plugins(self) -> list[str]:
        """Return the names of the backends that NIXL has plugins for, whether or not they work."""
        return list(self._agent.get_plugin_list())

    def backend_for(self, *kinds: str) -> str:
        """Return the first backend that moves bytes between these kinds of memory.

        Raises ``BACKEND`` if there is none.
        """
        for backend, supported in self._memory_kinds.items():
            if supported.issuperset(kinds):
                return backend
        raise KVPlanError(
            "BACKEND",
            f"move bytes between {' and '.join(dict.fromkeys(kinds))} memory",
            expected="a backend that supports it",
            got=", ".join(self._memory_kinds) or "none",
            hint="POSIX moves between DRAM and FILE, UCX between DRAM and VRAM",
            kinds=kinds,
        )

    def register(self, regions: Iterable[Region]) -> tuple[MemoryRange, ...]:
        """Register the memory of regions or, raising ``BACKEND``, none.

        Return the ranges to :meth:`deregister`.
        """
        registered = list[MemoryRange]()
        # if one range is refused, those before it are deregistered
        try:
            for memory_range in ranges_of(regions):
                registered.append(self._register(memory_range))
        except KVPlanError:
            self.deregister(registered)
            raise
        return tuple(registered)

    def _register(self, wanted: MemoryRange) -> MemoryRange:
        """Register a range, unless one that is registered has all of it, and return that one."""
        # a worker that is attached may have regions within those of this worker
        for registered in self._registered:
            if registered.overlaps(wanted):
                if wanted.start < registered.start or registered.stop < wanted.stop:
                    raise _overlaps_registered(wanted, registered)
                self._registered[registered] += 1
                return registered
        self._do(
            lambda agent: agent.register_memory([wanted.entry], wanted.memory),
            "BACKEND",
            f"register {wanted.memory} memory",
            "a backend that accepts it",
        )
        self._registered[wanted] = 1
        return wanted

    def deregister(self, ranges: Iterable[MemoryRange]) -> None:
        """Deregister the ranges that :meth:`register` returned."""
        for memory_range in tuple(ranges):
            self._registered[memory_range] -= 1
            # NIXL keeps a range as long as another caller has registered it
            if not self._registered[memory_range]:
                del self._registered[memory_range]
                self._deregister(memory_range)

    def _deregister(self, registered: MemoryRange) -> None:
        """Deregister a range of memory that is no longer needed."""
        self._do(
            lambda agent: agent.deregister_memory(
                agent.get_reg_descs([registered.entry], registered.memory)
            ),
            "BACKEND",
            "deregister memory",
            "registered memory",
        )

    def metadata(self) -> bytes:
        """Return NIXL's metadata, by which remote agents reach the memory registered now."""
        return bytes(self._agent.get_agent_metadata())

    def load(self, name: str, metadata: bytes) -> None:
        """Load a remote agent's metadata. Raises ``PEER`` unless it is that of agent ``name``."""
        action = f"load the metadata of NIXL agent {name!r}"
        expected = "a reachable agent with a common backend"
        loaded = self._do(
            lambda agent: agent.add_remote_agent(metadata), "PEER", action, expected, agent=name
        )
        # NIXL returns the name as bytes, which may be no UTF-8.
        loaded_name = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
        self._loaded.add(loaded_name)
        if loaded_name != name:
            self.unload(loaded_name)
            got = f"those of {loaded_name!r}"
            raise KVPlanError("PEER", action, expected="that agent's", got=got, agent=name)

    def unload(self, name: str) -> None:
        """Unload a remote agent, if NIXL still knows it."""
        self._loaded.discard(name)
        with suppress(KVPlanError):  # NIXL has already forgotten an agent that disconnected
            self._do(
                lambda agent: agent.remove_remote_agent(name),
                "PEER",
                "unload a NIXL agent",
                "one that is loaded",
            )

    def prepare(self, owner: str, kind: str, rows: npt.NDArray[np.uint64], backend: str) -> Handle:
        """Prepare strided rows, shape (n, 5), in the memory of an owner.

        The owner is an agent's name, or :data:`LOCAL`. Raises ``BACKEND`` for rows outside the
        owner's registered memory.
        """
        return self._handle(
            lambda agent: agent.prep_xfer_dlist(owner, rows, kind, [backend]),
            "BACKEND",
            f"prepare {len(rows)} rows of {'this agent' if owner == LOCAL else repr(owner)}",
            f"{kind} memory registered with {backend}",
            owner=owner,
            backend=backend,
        )

    def make(
        self, operation: str, local: Handle, remote: Handle, local_ids: Any, remote_ids: Any
    ) -> Handle:
        """Make a transfer to post. Raises ``PEER`` or ``TRANSFER``."""
        return self._handle(
            lambda agent: agent.make_prepped_xfer(
                operation, local.nixl, local_ids, remote.nixl, remote_ids
            ),
            "TRANSFER",
            "make a transfer",
            "no error",
        )

    def _handle(self, *arguments: Any, **details: Any) -> Handle:
        """Return the result of :meth:`_do` in a handle, which :meth:`close` empties."""
        handle = Handle(self._do(*arguments, **details))
        self._handles.add(handle)
        return handle

    def post(self, handle: Handle) -> bool:
        """Post a transfer, and return whether it is already done.

        Raises ``PEER`` or ``TRANSFER``.
        """
        return self._is_done(lambda agent: agent.transfer(handle.nixl), "post a transfer")

    def is_done(self, handle: Handle) -> bool:
        """Return whether a transfer is done. Raises ``PEER`` or ``TRANSFER`` if it has failed."""
        return self._is_done(
            lambda agent: agent.check_xfer_state(handle.nixl), "carry out a transfer"
        )

    def _is_done(self, call: Callable[[Any], str], action: str) -> bool:
        """Return whether the state that a call returns is that of a transfer that is done."""
        state = self._do(call, "TRANSFER", action, "no error")
        if state == "ERR":
            raise KVPlanError("TRANSFER", action, expected="DONE or PROC", got="NIXL: ERR")
        return state == "DONE"

    def free(self, handle: Handle) -> None:
        """Free the handle of a settled transfer.

        NIXL would free that of a running transfer too, and not stop it.
        """
        try:
            self._do(lambda agent: handle.nixl.release(), "TRANSFER", "free a transfer", "no error")
        finally:
            handle.nixl = None

    def num_descriptors(self, handle: Handle) -> int:
        """Return how many descriptors NIXL has made of a transfer that is done.

        NIXL joins neighbours. Returns 0 where it does not tell, which is no failure of a transfer.
        """
        with suppress(KVPlanError):
            telemetry = self._do(
                lambda agent: agent.get_xfer_telemetry(handle.nixl),
                "TRANSFER",
                "count the descriptors of a transfer",
                "no error",
            )
            return int(telemetry.descCount)
        return 0

    def backend_of(self, handle: Handle) -> str:
        """Return the backend that NIXL chose for a transfer."""
        return str(self._agent.query_xfer_backend(handle.nixl))

    def discard_messages(self) -> None:
        """Discard the messages that other agents have sent, which NIXL keeps until it is asked.

        Engines with kvplan send none. Any process that reaches the agent can, until its memory is
        full.
        """
        self._do(
            lambda agent: agent.get_new_notifs(),
            "BACKEND",
            "discard messages",
            "a working agent",
        )

    def fence(self) -> None:
        """Send this agent a message. UCX delivers it only after all copies that began before."""
        self._do(
            lambda agent: agent.send_notif(self.name, b""),
            "PEER",
            "send this agent a message",
            "a working agent",
        )


def _overlaps_registered(wanted: MemoryRange, registered: MemoryRange) -> KVPlanError:
    return KVPlanError(
        "BACKEND",
        f"register {wanted.memory} memory",
        expected="memory that is not registered, or that lies in one registered range",
        got=f"[{wanted.start:#x}, {wanted.stop:#x}), "
        f"of which [{registered.start:#x}, {registered.stop:#x}) is registered",
        hint="register the whole allocation first",
    )
