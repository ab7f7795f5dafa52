"""Agent: a wrapper of NIXL's agent that turns every failure into a :class:`~kvplan.KVPlanError`.

On some bad inputs NIXL's Python layer logs and continues, or returns None. On others it raises its own exceptions. The
wrapper raises one of three codes instead:

- ``BACKEND``: a backend is missing, or refuses the memory.
- ``PEER``: the remote agent is unknown or unreachable.
- ``TRANSFER``: any other failure of a transfer.

An agent and its handles are alive as long as anything refers to them, and NIXL's threads write memory meanwhile. An
exception of NIXL refers to them too, through the frames of its traceback. So the errors that are raised in its place do
not refer to it, and all handles are in a :class:`Handle`, which :meth:`Agent.close` empties.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._checks import instance, wrong_type
from kvplan.describe.views import Region
from kvplan.errors import KVPlanError

try:
    import nixl
except ImportError as missing:  # nixl itself, or the wheel with its library
    raise ImportError(f"kvplan_nixl needs NIXL: pip install 'nixl>=1.5.1,<2' ({missing})") from None

NIXL_ERRORS: Final = tuple(
    kind
    for kind in vars(nixl._bindings).values()
    if isinstance(kind, type) and issubclass(kind, Exception)
)
"""All exception types of NIXL. They have no common base."""

GONE: Final = (nixl._bindings.nixlRemoteDisconnectError, nixl._bindings.nixlNotFoundError)
"""What NIXL raises during a transfer whose remote agent has disconnected."""

FAILURES: Final[tuple[type[Exception], ...]] = (*NIXL_ERRORS, RuntimeError, UnicodeDecodeError)
"""What NIXL's calls raise: an agent's name may be no UTF-8."""

Made = TypeVar("Made")

LOCAL: Final = "NIXL_INIT_AGENT"

PROGRESS_US: Final = 1000
"""Microseconds after which an agent's progress thread looks for work that has not woken it."""

CONFIG: Final = nixl._bindings.nixlAgentConfig
"""NIXL's settings of an agent."""

DELAY: Final = CONFIG.pthrDelay
"""The delay of the progress thread in them: UCX wakes a thread that waits, and one with a delay of 0 takes a core."""


class WakingConfig(nixl._bindings.nixlAgentConfig):  # type: ignore[misc]
    """Settings of an agent whose progress thread waits until UCX wakes it, whatever NIXL's Python layer sets."""

    @property
    def pthrDelay(self) -> int:  # noqa: N802
        """The delay, in microseconds."""
        return int(DELAY.__get__(self))

    @pthrDelay.setter
    def pthrDelay(self, _: int) -> None:  # noqa: N802
        DELAY.__set__(self, PROGRESS_US)


OPENING: Final = threading.Lock()


def open_agent(name: str, config: Any) -> Any:
    """Return a new agent of NIXL. Its Python layer makes the settings itself, and takes no delay from a caller."""
    with OPENING:
        nixl._bindings.nixlAgentConfig = WakingConfig
        try:
            return nixl.nixl_agent(name, config)
        finally:
            nixl._bindings.nixlAgentConfig = CONFIG


@attrs.define(eq=False)
class Handle:
    """NIXL's handle of a transfer, or of descriptors that it has checked against registered memory; None once freed.

    NIXL frees descriptors with the last reference.
    """

    nixl: Any


class Range(NamedTuple):
    """Registered bytes ``[start, stop)`` of one kind of memory of a device."""

    memory: str
    device_id: int
    start: int
    stop: int


def ranges_of(regions: Iterable[Region]) -> Iterator[Range]:
    """The memory of regions, each byte once: regions that share bytes are one range.

    NIXL does not find descriptors in ranges that overlap, and deregisters two equal ones with a SIGSEGV.

    >>> list(ranges_of([Region("k", 4096, 64), Region("kv", 4096, 128), Region("more", 4224, 64)]))
    [Range(memory='DRAM', device_id=0, start=4096, stop=4224), Range(memory='DRAM', device_id=0, start=4224, stop=4288)]
    """
    last: Range | None = None
    for each in sorted(Range(one.memory, one.device_id, one.address, one.end) for one in regions):
        if last is not None and each[:2] == last[:2] and each.start < last.stop:
            last = last._replace(stop=max(last.stop, each.stop))
        else:
            if last is not None:
                yield last
            last = each
    if last is not None:
        yield last


def checked_backends(value: Any) -> dict[str, dict[str, str]]:
    """Options by the names of backends. Raises ``TYPE`` where NIXL would raise what it likes."""
    if not isinstance(value, Mapping) or not all(
        isinstance(options, Mapping) for options in value.values()
    ):
        raise wrong_type("backends", "a mapping of options by name", value)
    return {
        instance(str, backend, "name of a backend"): {
            instance(str, option, "option of a backend"): instance(
                str, setting, "option of a backend"
            )
            for option, setting in options.items()
        }
        for backend, options in value.items()
    }


class Agent:
    """One NIXL agent. ``backends`` are options by backend name, in order of preference."""

    def __init__(
        self, name: str, backends: Mapping[str, Mapping[str, str]], progress_thread: bool
    ) -> None:
        self.name = name
        config = nixl.nixl_agent_config(enable_prog_thread=progress_thread, backends=[])
        self._open: Any = None
        text = ""
        try:
            self._open = open_agent(name, config)
        except FAILURES as error:
            text = " ".join(str(error).split())
        if self._open is None:  # raised after the exception of NIXL is gone
            raise KVPlanError(
                "BACKEND", "make a NIXL agent", expected="no error", got=f"NIXL: {text}"
            )
        self._handles: WeakSet[Handle] = WeakSet()
        self._registered: Counter[Range] = Counter()
        self._loaded: set[str] = set()
        self._kinds: dict[str, frozenset[str]] = {}
        try:
            for backend, options in backends.items():
                self._add(backend, dict(options))
        except KVPlanError:
            self.close()
            raise

    def _add(self, backend: str, options: dict[str, str]) -> None:
        known = self._agent.get_plugin_list()
        if backend not in known:
            raise KVPlanError(
                "BACKEND",
                "make a NIXL agent",
                expected=f"a backend among {', '.join(known)}",
                got=repr(backend),
            )
        self._do(
            lambda agent: agent.create_backend(backend, options),
            "BACKEND",
            f"make a NIXL agent with backend {backend!r}",
            "one that works on this machine",
            backend=backend,
        )
        kinds = self._agent.get_backend_mem_types(backend)
        self._kinds[backend] = frozenset(kind.removesuffix("_SEG") for kind in kinds)

    def _do(
        self, call: Callable[[Any], Made], code: str, action: str, expected: str, **details: Any
    ) -> Made:
        """What ``call`` returns for NIXL's agent. What it raises becomes an error that does not refer to NIXL."""
        agent = self._agent
        try:
            return call(agent)
        except FAILURES as error:
            if code == "TRANSFER" and isinstance(error, GONE):
                code, expected = "PEER", "a connected remote agent"
            text = " ".join(str(error).split()) or type(error).__name__
            details["nixl"] = type(error).__name__
        finally:
            del agent
        # raised after the exception of NIXL is gone, which would be its context otherwise
        raise KVPlanError(code, action, expected=expected, got=f"NIXL: {text}", **details)

    def close(self) -> None:
        """Free everything: handles, remote agents, registered memory, the agent. Nothing touches memory afterwards."""
        if self._open is None:
            return
        for handle in self._handles:
            handle.nixl = None
        for name in tuple(self._loaded):
            self.unload(name)
        try:
            self.deregister(self._registered.elements())
        finally:
            self._open = None

    @property
    def _agent(self) -> Any:
        """NIXL's agent. Raises ``BACKEND`` after :meth:`close`."""
        if self._open is None:
            raise KVPlanError(
                "BACKEND", "use a NIXL agent", expected="an open agent", got="a closed one"
            )
        return self._open

    def backend_for(self, *kinds: str) -> str:
        """The first backend that moves bytes between these kinds of memory. Raises ``BACKEND`` if there is none."""
        for backend, supported in self._kinds.items():
            if supported.issuperset(kinds):
                return backend
        raise KVPlanError(
            "BACKEND",
            f"move bytes between {' and '.join(dict.fromkeys(kinds))} memory",
            expected="a backend that supports it",
            got=", ".join(self._kinds) or "none",
            hint="POSIX moves between DRAM and FILE, UCX between DRAM and VRAM",
            kinds=kinds,
        )

    def register(self, regions: Iterable[Region]) -> tuple[Range, ...]:
        """Register the memory of regions or, raising ``BACKEND``, none. Return what to :meth:`deregister`."""
        done: list[Range] = []
        try:
            done.extend(map(self._register, ranges_of(regions)))
        except KVPlanError:
            self.deregister(done)
            raise
        return tuple(done)

    def _register(self, wanted: Range) -> Range:
        """Register a range, unless it is in one that is registered, and return that."""
        memory, device_id, start, stop = wanted
        for known in self._registered:
            if known[:2] == wanted[:2] and known.start < stop and start < known.stop:
                if start < known.start or known.stop < stop:
                    raise KVPlanError(
                        "BACKEND",
                        f"register {memory} memory",
                        expected="memory that is not registered, or that lies in one registered range",
                        got=f"[{start:#x}, {stop:#x}), of which [{known.start:#x}, {known.stop:#x}) is registered",
                        hint="register the whole allocation first",
                    )
                self._registered[known] += 1
                return known
        entry = (start, stop - start, device_id, "")
        expected = "a backend that accepts it"
        self._do(
            lambda agent: agent.register_memory([entry], memory),
            "BACKEND",
            f"register {memory} memory",
            expected,
        )
        self._registered[wanted] = 1
        return wanted

    def deregister(self, ranges: Iterable[Range]) -> None:
        """Deregister what :meth:`register` returned."""
        for each in tuple(ranges):
            self._registered[each] -= 1
            if not self._registered[each]:
                del self._registered[each]
                memory, device_id, start, stop = each
                self._deregister([(start, stop - start, device_id, "")], memory)

    def _deregister(self, entries: list[tuple[int, int, int, str]], memory: str) -> None:
        self._do(
            lambda agent: agent.deregister_memory(agent.get_reg_descs(entries, memory)),
            "BACKEND",
            "deregister memory",
            "registered memory",
        )

    def metadata(self) -> bytes:
        """NIXL's metadata, by which a remote agent reaches the memory that is registered now."""
        return bytes(self._agent.get_agent_metadata())

    def load(self, name: str, metadata: bytes) -> None:
        """Load a remote agent's metadata. Raises ``PEER`` unless it is that of the agent ``name``."""
        action = f"load the metadata of NIXL agent {name!r}"
        expected = "a reachable agent with a common backend"
        loaded = self._do(
            lambda agent: agent.add_remote_agent(metadata), "PEER", action, expected, agent=name
        )
        found = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
        self._loaded.add(found)
        if found != name:
            self.unload(found)
            raise KVPlanError(
                "PEER", action, expected="that agent's", got=f"those of {found!r}", agent=name
            )

    def unload(self, name: str) -> None:
        """Forget a remote agent, if NIXL still knows it."""
        self._loaded.discard(name)
        with suppress(KVPlanError):  # NIXL has already forgotten an agent that disconnected
            self._do(
                lambda agent: agent.remove_remote_agent(name),
                "PEER",
                "forget a NIXL agent",
                "one that is loaded",
            )

    def prepare(self, owner: str, kind: str, rows: npt.NDArray[np.uint64], backend: str) -> Handle:
        """Prepare strided rows, shape (n, 5), in the memory of ``owner``: an agent's name, or :data:`LOCAL`.

        Raises ``BACKEND`` for rows outside the owner's registered memory.
        """
        return self._handle(
            lambda agent: agent.prep_xfer_dlist(owner, rows, kind, [backend]),
            "BACKEND",
            f"prepare {len(rows)} rows of {'this agent' if owner == LOCAL else repr(owner)}",
            f"{kind} memory registered with {backend}",
            owner=owner,
            backend=backend,
        )

    def make(self, operation: str, local: Handle, remote: Handle, ids: tuple[Any, Any]) -> Handle:
        """Make a transfer to post. Raises ``PEER`` or ``TRANSFER``."""
        return self._handle(
            lambda agent: agent.make_prepped_xfer(
                operation, local.nixl, ids[0], remote.nixl, ids[1]
            ),
            "TRANSFER",
            "make a transfer",
            "no error",
        )

    def _handle(self, *arguments: Any, **details: Any) -> Handle:
        handle = Handle(self._do(*arguments, **details))
        self._handles.add(handle)
        return handle

    def post(self, handle: Handle) -> bool:
        """Post a transfer, and return whether it is already done. Raises ``PEER`` or ``TRANSFER``."""
        return self._is_done(lambda agent: agent.transfer(handle.nixl), "post a transfer")

    def is_done(self, handle: Handle) -> bool:
        """Whether a transfer is done. Raises ``PEER`` or ``TRANSFER`` where it has failed."""
        return self._is_done(
            lambda agent: agent.check_xfer_state(handle.nixl), "carry out a transfer"
        )

    def _is_done(self, call: Callable[[Any], str], action: str) -> bool:
        state = self._do(call, "TRANSFER", action, "no error")
        if state == "ERR":
            raise KVPlanError("TRANSFER", action, expected="DONE or PROC", got="NIXL: ERR")
        return state == "DONE"

    def free(self, handle: Handle) -> None:
        """Free the handle of a settled transfer. NIXL would free that of a running one, and not stop it."""
        try:
            self._do(lambda agent: handle.nixl.release(), "TRANSFER", "free a transfer", "no error")
        finally:
            handle.nixl = None

    def backend_of(self, handle: Handle) -> str:
        """The backend that NIXL chose for a transfer."""
        return str(self._agent.query_xfer_backend(handle.nixl))

    def notify(self, name: str, message: bytes) -> None:
        """Send a message to a remote agent. Raises ``PEER``."""
        action = f"notify NIXL agent {name!r}"
        self._do(lambda agent: agent.send_notif(name, message), "PEER", action, "a reachable agent")

    def messages(self) -> list[tuple[str, bytes]]:
        """The messages that have arrived since the last call, each with its sender's name, in order for each sender."""
        action = "read notifications"
        by_sender = self._do(
            lambda agent: agent.get_new_notifs(), "TRANSFER", action, "a working agent"
        )
        return [(sender, message) for sender, sent in by_sender.items() for message in sent]
