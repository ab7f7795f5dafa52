"""SGLang's plugin: it adds ``kvplan`` to the values of ``--disaggregation-transfer-backend``.

SGLang finds :func:`register` by an entry point and calls it in each of its processes.

A :class:`~kvplan_nixl.sglang.manager.Manager` is a rank as SGLang sees it. Its rank of prefill or
of decode has the memory, leases and reads; a sender or receiver is one request of it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

BACKEND: Final = "kvplan"


def register() -> None:
    """Register the backend with SGLang's own registry of hooks."""
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # SGLang's own backends, and one more: an Enum can't be extended
    backends = {member.name: member.value for member in utils.TransferBackend}
    transfer_backend = Enum("TransferBackend", {**backends, BACKEND.upper(): BACKEND})  # type: ignore[misc]
    package = "sglang.srt.disaggregation"
    HookRegistry.register(f"{package}.utils.TransferBackend", transfer_backend, HookType.REPLACE)
    HookRegistry.register(f"{package}.utils.get_kv_class", _get_kv_class, HookType.AROUND)
    for queue in ("prefill.PrefillBootstrapQueue", "decode.DecodePreallocQueue"):
        HookRegistry.register(f"{package}.{queue}._init_kv_manager", _start, HookType.AFTER)
    sending = "prefill.PrefillBootstrapQueue.create_sender"
    HookRegistry.register(f"{package}.{sending}", _tell_sender, HookType.AFTER)
    waiting = "decode.DecodePreallocQueue._create_receiver_and_enqueue"
    HookRegistry.register(f"{package}.{waiting}", _tell_receiver, HookType.AFTER)
    add_disagg_transfer_backend_choices([BACKEND])


def _get_kv_class(original: Any, backend: Any, kind: Any) -> Any:
    """Return the class of a kind, for all backends."""
    if backend.value != BACKEND or kind.value == "kvargs":
        return original(backend, kind)
    from kvplan_nixl.sglang.decode import Receiver
    from kvplan_nixl.sglang.manager import Manager, serve_rooms
    from kvplan_nixl.sglang.prefill import Sender

    classes = {
        "manager": Manager,
        "sender": Sender,
        "receiver": Receiver,
        "bootstrap_server": serve_rooms,
    }
    return classes[kind.value]


def _start(manager: Any, queue: Any) -> None:
    """Give a manager the queue that made it, and with it the pool, which its constructor lacks."""
    from kvplan_nixl.sglang.manager import Manager

    if isinstance(manager, Manager):
        manager.start(queue)


def _tell_sender(is_created: bool, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    """Give a sender its request."""
    if is_created:
        req.disagg_kv_sender.req = req


def _tell_receiver(waiting: Any, *_: Any, **__: Any) -> None:
    """Give a receiver its request. One that was retracted, to be computed again, is refused."""
    waiting.kv_receiver.req = waiting.req
    if waiting.is_rebootstrap:
        waiting.kv_receiver.refuse_rebootstrap()
