"""SGLang's plugin: it adds ``kvplan`` to the values of ``--disaggregation-transfer-backend``.

SGLang finds :func:`register` by an entry point and calls it in each of its processes, whatever
their backend is. So it only adds the value and its classes. SGLang's queues are hooked when it
first asks for the value's member of ``TransferBackend``, which is before it makes them.

A :class:`~kvplan_nixl.sglang.manager.Manager` is a rank as SGLang sees it. Its rank of prefill or
of decode has the memory, leases and reads; a sender or receiver is one request of it.

:class:`~kvplan_nixl.sglang.store.KvplanStore` is a storage of HiCache, which SGLang makes by this
module's name. SGLang's cache is hooked when it first asks for the class.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Final

BACKEND: Final = "kvplan"

DISAGGREGATION: Final = "sglang.srt.disaggregation"

LORA: Final = "sglang.srt.lora.lora_manager"


def register() -> None:
    """Let SGLang know the backend. Other backends, and engines without one, stay as they are."""
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # an Enum can't be extended, but it asks for members that it lacks
    TransferBackend._missing_ = classmethod(_missing)
    HookRegistry.register(f"{DISAGGREGATION}.utils.get_kv_class", _get_kv_class, HookType.AROUND)
    add_disagg_transfer_backend_choices([BACKEND])
    # in the process of a scheduler, before it loads adapters
    if LORA in sys.modules:
        load = f"{LORA}.LoRAManager._load_lora_adapter"
        HookRegistry.register(load, _load_adapter, HookType.AROUND)
        HookRegistry.register(f"{load}_from_tensors", _note_adapter, HookType.AFTER)


def _missing(transfer_backend: Any, value: Any) -> Any:
    """Return the backend's member of ``TransferBackend``, None for any other value."""
    return _member(transfer_backend) if value == BACKEND else None


@cache
def _member(transfer_backend: Any) -> Any:
    """Return the backend's one member of ``TransferBackend``, after SGLang's queues are hooked."""
    _hook_queues()
    member = object.__new__(transfer_backend)
    member._name_ = BACKEND.upper()
    member._value_ = BACKEND
    return member


def _hook_queues() -> None:
    """Hook SGLang's queues of managers, senders and receivers, and what changes weights."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvplan_nixl.sglang.changes import hook_changes

    hooks = {
        "prefill.PrefillBootstrapQueue._init_kv_manager": _start,
        "decode.DecodePreallocQueue._init_kv_manager": _start,
        "prefill.PrefillBootstrapQueue.create_sender": _tell_sender,
        "decode.DecodePreallocQueue._create_receiver_and_enqueue": _tell_receiver,
    }
    for target, hook in hooks.items():
        HookRegistry.register(f"{DISAGGREGATION}.{target}", hook, HookType.AFTER)
    HookRegistry.apply_hooks()
    hook_changes()


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


def _uses_kvplan() -> bool:
    """Return whether this engine transfers or stores by kvplan."""
    from sglang.srt.runtime_context import get_disagg, get_memory

    extra = f"{get_memory().hicache_storage_backend_extra_config}"
    return get_disagg().disaggregation_transfer_backend == BACKEND or BACKEND in extra


def _load_adapter(original: Any, manager: Any, lora_ref: Any) -> Any:
    """Load an adapter from a folder, and note its content."""
    if not _uses_kvplan():
        return original(manager, lora_ref)
    from kvplan_nixl.sglang.changes import load_folder

    return load_folder(original, manager, lora_ref)


def _note_adapter(
    result: Any, manager: Any, lora_ref: Any, tensors: Any, config: Any, *_: Any
) -> None:
    """Note the content of an adapter that was loaded from tensors."""
    if _uses_kvplan():
        from kvplan_nixl.sglang.changes import note_tensors

        note_tensors(lora_ref, tensors, config)


def _start(manager: Any, queue: Any) -> None:
    """Give a manager the queue that made it, and with it the pool, which its constructor lacks."""
    from kvplan_nixl.sglang.manager import Manager

    if isinstance(manager, Manager):
        manager.start(queue)


def _tell_sender(is_created: bool, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    """Give a sender its request. SGLang's warm-up has senders of another class."""
    from kvplan_nixl.sglang.prefill import Sender

    if is_created and isinstance(req.disagg_kv_sender, Sender):
        req.disagg_kv_sender.req = req


def _tell_receiver(waiting: Any, *_: Any, **__: Any) -> None:
    """Give a receiver its request. One that was retracted, to be computed again, is refused."""
    from kvplan_nixl.sglang.decode import Receiver

    receiver = waiting.kv_receiver
    if isinstance(receiver, Receiver):
        receiver.req = waiting.req
        if waiting.is_rebootstrap:
            receiver.refuse_rebootstrap()


def __getattr__(name: str) -> Any:
    """Return the store's class, after SGLang's cache is hooked."""
    if name != "KvplanStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvplan_nixl.sglang.changes import hook_changes
    from kvplan_nixl.sglang.store import KvplanStore
    from kvplan_nixl.sglang.store_hooks import hook_cache

    hook_cache()
    hook_changes()
    return KvplanStore
