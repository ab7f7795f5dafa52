"""Agent: a wrapper of NIXL's agent that turns every failure into a :class:`~kvplan.KVPlanError`.

On some bad inputs NIXL's Python layer logs and continues, or returns None. On others it raises its own exceptions. The
wrapper raises one of three codes instead:

- ``BACKEND``: a backend is missing, or refuses the memory.
- ``PEER``: the remote agent is unknown or unreachable.
- ``TRANSFER``: any other failure of a transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.describe.views import Region
from kvplan.errors import KVPlanError

try:
    import nixl
except ImportError as missing:  # nixl itself, or the wheel with its library
    raise ImportError(f"kvplan_nixl needs NIXL: pip install 'kvplan[nixl]' ({missing})") from None

NIXL_ERRORS: Final = tuple(
    kind for kind in vars(nixl._bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
"""All exception types of NIXL. They have no common base."""

GONE: Final = (nixl._bindings.nixlRemoteDisconnectError, nixl._bindings.nixlNotFoundError)
"""What NIXL raises during a transfer whose remote agent has disconnected."""


LOCAL: Final = "NIXL_INIT_AGENT"


def refused(code: str, action: str, expected: str, error: Exception, **details: Any) -> KVPlanError:
    """The KVPlanError for an exception of NIXL. ``got`` is NIXL's message in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return KVPlanError(code, action, expected=expected, got=f"NIXL: {text}", nixl=type(error).__name__, **details)


@attrs.frozen(eq=False)
class Prepared:
    """Descriptors that NIXL has checked against registered memory. NIXL frees them with the last reference."""

    handle: Any


class Agent:
    """One NIXL agent. ``backends`` are options by backend name, in order of preference."""

    def __init__(self, name: str, backends: Mapping[str, Mapping[str, str]], progress_thread: bool) -> None:
        self.name = name
        config = nixl.nixl_agent_config(enable_prog_thread=progress_thread, backends=[])
        self._open: Any = nixl.nixl_agent(name, config)
        known = self._agent.get_plugin_list()
        for backend, options in backends.items():
            if backend not in known:
                raise KVPlanError(
                    "BACKEND", "make a NIXL agent", expected=f"a backend among {', '.join(known)}", got=repr(backend)
                )
            try:
                self._agent.create_backend(backend, dict(options))
            except NIXL_ERRORS as error:
                action = f"make a NIXL agent with backend {backend!r}"
                raise refused("BACKEND", action, "one that works on this machine", error, backend=backend) from None
        self._kinds = {
            backend: frozenset(kind.removesuffix("_SEG") for kind in self._agent.get_backend_mem_types(backend))
            for backend in backends
        }

    def close(self) -> None:
        """Drop the agent. NIXL ends it and all its transfers when no handle of it is left."""
        self._open = None

    @property
    def _agent(self) -> Any:
        """NIXL's agent. Raises ``BACKEND`` after :meth:`close`."""
        if self._open is None:
            raise KVPlanError("BACKEND", "use a NIXL agent", expected="an open agent", got="a closed one")
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

    def register(self, regions: Iterable[Region]) -> tuple[Any, ...]:
        """Register all regions or, raising ``BACKEND``, none. Return handles for :meth:`deregister`."""
        by_kind: dict[str, list[tuple[int, int, int, str]]] = {}
        for region in regions:
            entry = (region.address, region.size_bytes, region.device_id, "")
            by_kind.setdefault(region.memory, []).append(entry)
        done: list[Any] = []
        for kind, entries in by_kind.items():
            try:
                done.append(self._agent.register_memory(entries, kind))
            except NIXL_ERRORS as error:
                self.deregister(done)
                raise refused("BACKEND", f"register {kind} memory", "a backend that accepts it", error) from None
        return tuple(done)

    def deregister(self, registered: Iterable[Any]) -> None:
        """Deregister the regions that :meth:`register` returned handles for."""
        for entries in registered:
            try:
                self._agent.deregister_memory(entries)
            except NIXL_ERRORS as error:
                raise refused("BACKEND", "deregister memory", "registered memory", error) from None

    def metadata(self) -> bytes:
        """NIXL's metadata, by which a remote agent reaches the memory that is registered now."""
        return bytes(self._agent.get_agent_metadata())

    def load(self, name: str, metadata: bytes) -> None:
        """Load a remote agent's metadata. Raises ``PEER`` unless it is that of the agent ``name``."""
        action = f"load the metadata of NIXL agent {name!r}"
        try:
            loaded = self._agent.add_remote_agent(metadata)
        except NIXL_ERRORS as error:
            raise refused("PEER", action, "a reachable agent with a common backend", error, agent=name) from None
        found = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
        if found != name:
            self.unload(found)
            raise KVPlanError("PEER", action, expected="that agent's", got=f"those of {found!r}", agent=name)

    def unload(self, name: str) -> None:
        """Forget a remote agent, if NIXL still knows it."""
        try:
            self._agent.remove_remote_agent(name)
        except NIXL_ERRORS:  # NIXL has already forgotten an agent that disconnected
            return

    def prepare(self, owner: str, kind: str, rows: npt.NDArray[np.uint64], backend: str) -> Prepared:
        """Prepare strided rows, shape (n, 5), in the memory of ``owner``: an agent's name, or :data:`LOCAL`.

        Raises ``BACKEND`` for rows outside the owner's registered memory.
        """
        try:
            return Prepared(self._agent.prep_xfer_dlist(owner, rows, kind, [backend]))
        except NIXL_ERRORS as error:
            raise refused(
                "BACKEND",
                f"prepare {len(rows)} rows of {'this agent' if owner == LOCAL else repr(owner)}",
                f"{kind} memory registered with {backend}",
                error,
                owner=owner,
                backend=backend,
            ) from None

    def make(self, operation: str, local: Prepared, remote: Prepared, ids: tuple[Any, Any], message: bytes) -> Any:
        """Make a transfer to post. NIXL sends ``message`` to the remote agent when it is done. Raises ``TRANSFER``."""
        try:
            return self._agent.make_prepped_xfer(operation, local.handle, ids[0], remote.handle, ids[1], message)
        except NIXL_ERRORS as error:
            raise _under_way("make a transfer", error) from None

    def post(self, handle: Any) -> bool:
        """Post a transfer, and return whether it is already done. Raises ``PEER`` or ``TRANSFER``."""
        try:
            return _is_done(self._agent.transfer(handle))
        except NIXL_ERRORS as error:
            raise _under_way("post a transfer", error) from None

    def is_done(self, handle: Any) -> bool:
        """Whether a transfer is done. Raises ``PEER`` or ``TRANSFER`` where it has failed."""
        try:
            return _is_done(self._agent.check_xfer_state(handle))
        except NIXL_ERRORS as error:
            raise _under_way("carry out a transfer", error) from None

    def free(self, handle: Any) -> None:
        """Free the handle of a settled transfer. NIXL would free that of a running one, and not stop it."""
        try:
            handle.release()
        except NIXL_ERRORS as error:
            raise _under_way("free a transfer", error) from None

    def backend_of(self, handle: Any) -> str:
        """The backend that NIXL chose for a transfer."""
        return str(self._agent.query_xfer_backend(handle))

    def notify(self, name: str, message: bytes) -> None:
        """Send a message to a remote agent. Raises ``PEER``."""
        try:
            self._agent.send_notif(name, message)
        except NIXL_ERRORS as error:
            raise refused("PEER", f"notify NIXL agent {name!r}", "a reachable agent", error) from None

    def messages(self) -> list[bytes]:
        """The messages that have arrived since the last call, in order for each sender."""
        try:
            by_sender = self._agent.get_new_notifs()
        except NIXL_ERRORS as error:
            raise refused("TRANSFER", "read notifications", "a working agent", error) from None
        return [message for sent in by_sender.values() for message in sent]


def _is_done(state: str) -> bool:
    if state == "ERR":
        raise KVPlanError("TRANSFER", "carry out a transfer", expected="DONE or PROC", got="NIXL: ERR")
    return state == "DONE"


def _under_way(action: str, error: Exception) -> KVPlanError:
    if isinstance(error, GONE):
        return refused("PEER", action, "a connected remote agent", error)
    return refused("TRANSFER", action, "no error", error)
