"""Changes in a running SGLang: updates of its weights, and adapters that are loaded and dropped.

Both happen in the scheduler's process, whose functions are hooked. :data:`WEIGHTS` and
:data:`ADAPTERS` have the version of the weights and the content of each adapter, which are in the
handoff of a request and in the keys of a store. After a change, pages that were stored before are
not found, and requests that were handed over before are refused.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from contextlib import suppress
from functools import cache
from typing import Any, Final

import attrs
import torch
from sglang.srt.runtime_context import get_serving

from kvplan import KVPlanError
from kvplan_nixl.identity import DIGEST_BYTES, FIRST_WEIGHTS
from kvplan_nixl.serving import fingerprint
from kvplan_nixl.weights import folder_of

UPDATER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
MANAGER: Final = "sglang.srt.managers.scheduler_components.weight_updater"
SCHEDULER: Final = "sglang.srt.managers.scheduler"
ADAPTER_CONFIG: Final = "adapter_config.json"


@attrs.define
class Weights:
    """The version of the weights with which requests are computed now.

    An update may load weights in several parts, between ``begin`` and ``end``, and a request that
    is computed meanwhile mixes two versions. The operator names the version in the update. It has a
    private name, from ``token``, until the update has ended, the operator has named it, and SGLang
    has flushed its cache, which the weights before have computed. For weights that have changed,
    neither the name that they had ``before`` nor that of the first ones counts, at any time.
    """

    token: str = ""
    before: str = ""
    is_changing: bool = False
    is_named: bool = True
    is_flushed: bool = True

    def change(self) -> None:
        """Note that weights change."""
        # other engines may have flushed their caches of weights that this one has not
        if self.is_named and not self.is_changing:
            self.before = get_serving().weight_version
        self.token = uuid.uuid4().hex
        self.is_named = False
        self.is_flushed = False

    def begin(self) -> None:
        """Note that an update begins, which may have several parts."""
        self.change()
        self.is_changing = True

    def end(self, *, loads_now: bool) -> None:
        """Note that an update ends, and that it loads weights only now if ``loads_now``."""
        if loads_now:
            self.change()
        self.is_changing = False

    def name(self, version: str | None) -> None:
        """Note that an operator has named the version."""
        if version is not None and self.token:
            self.is_named = version not in ("", FIRST_WEIGHTS, self.before)

    def flush(self) -> None:
        """Note that SGLang has flushed its prefix cache."""
        self.is_flushed = True

    @property
    def is_known(self) -> bool:
        """Whether another engine may have the same version."""
        return self.is_named and self.is_flushed and not self.is_changing

    @property
    def version(self) -> str:
        """The version's name, empty for the weights that the engine has started with."""
        if not self.is_known:
            return f"unnamed {self.token}"
        named: str = get_serving().weight_version
        return "" if named == FIRST_WEIGHTS else named


WEIGHTS: Final = Weights()


@attrs.define
class Adapters:
    """The content of LoRA adapters when they were loaded, by SGLang's ids.

    SGLang makes an id from name and path, so an overwritten folder keeps its id.
    """

    contents: dict[str, str] = attrs.field(factory=dict)

    def note(self, lora_id: str, content: str) -> None:
        """Note the content of an adapter that is loaded. A second content gets a private name."""
        if self.contents.setdefault(lora_id, content) != content:
            # SGLang's prefix cache has pages of the adapter before under this id
            self.contents[lora_id] = uuid.uuid4().hex

    def content_of(self, lora_id: str) -> str:
        """Return the content of an adapter, or a private name if its loading was not seen."""
        return self.contents.setdefault(lora_id, uuid.uuid4().hex)

    def split(self, extra_key: str | None) -> tuple[str | None, str | None]:
        """Return what an ``extra_key`` has before an adapter's id, and that id, if it has one.

        >>> Adapters({"5f1a": "content"}).split("mine5f1a")
        ('mine', '5f1a')
        """
        for lora_id in self.contents:
            if extra_key is not None and extra_key.endswith(lora_id):
                return extra_key.removesuffix(lora_id) or None, lora_id
        return extra_key, None


ADAPTERS: Final = Adapters()


def request_facts(salt: str | None, lora_id: str | None) -> list[str]:
    """Return what decides a request's cache besides tokens, weights and the engine."""
    facts = []
    if salt is not None:
        facts.append(f"salt {salt}")
    if lora_id is not None:
        facts.append(f"adapter {ADAPTERS.content_of(lora_id)}")
    return facts


@cache
def hook_changes() -> None:
    """Hook what changes the weights, names their version, or flushes SGLang's prefix cache."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    loads = ("from_disk", "from_tensor", "from_ipc")
    hooks = {f"{UPDATER}.update_weights_{load}": (_change, HookType.BEFORE) for load in loads}
    hooks |= {
        f"{UPDATER}.load_weights_from_distributed": (_change, HookType.BEFORE),
        f"{UPDATER}.begin_weight_update": (_begin, HookType.BEFORE),
        f"{UPDATER}.end_weight_update": (_end, HookType.AFTER),
        f"{MANAGER}.SchedulerWeightUpdaterManager.flush_cache_after_weight_update": (
            _flush_after,
            HookType.AFTER,
        ),
        f"{SCHEDULER}.Scheduler.flush_cache": (_flush, HookType.AFTER),
        f"{SCHEDULER}.Scheduler.record_weight_version_change": (_name, HookType.AFTER),
    }
    for target, (hook, kind) in hooks.items():
        # SGLang wraps each target once, and leaves out what another plugin has wrapped before
        if target in getattr(HookRegistry, "_patched", ()):
            raise KVPlanError(
                "LAYOUT",
                "see updates of weights",
                expected=f"no other plugin's hook of {target}",
                got="one",
            )
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()


def _change(*_: Any, **__: Any) -> None:
    WEIGHTS.change()


def _begin(*_: Any, **__: Any) -> None:
    WEIGHTS.begin()


def _end(result: Any, updater: Any, *, run_post_load: bool) -> None:
    WEIGHTS.end(loads_now=run_post_load)


def _name(result: Any, scheduler: Any, new_version: str | None) -> None:
    WEIGHTS.name(new_version)


def _flush(is_flushed: bool, *_: Any, **__: Any) -> None:
    if is_flushed:
        WEIGHTS.flush()


def _flush_after(result: Any, updates: Any, request: Any, *_: Any) -> None:
    is_right, _ = result
    if is_right and request.flush_cache:
        WEIGHTS.flush()


def load_folder(original: Any, manager: Any, lora_ref: Any) -> Any:
    """Note what an adapter's folder has while SGLang loads it."""
    before = _adapter(lora_ref.lora_path)
    result = original(manager, lora_ref)
    after = _adapter(lora_ref.lora_path)
    # a repository of a hub is fetched now
    is_same = before in (None, after)
    ADAPTERS.note(lora_ref.lora_id, after if after and is_same else uuid.uuid4().hex)
    return result


def note_tensors(lora_ref: Any, tensors: Any, config: Any) -> None:
    """Note the content of an adapter whose tensors a request has."""
    text = json.dumps(config, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    ADAPTERS.note(lora_ref.lora_id, digest.hexdigest())


def _adapter(path: str) -> str | None:
    """Return a fingerprint of an adapter's folder, or of its snapshot of a hub's repository."""
    folder = folder_of(path, file=ADAPTER_CONFIG)
    with suppress(KVPlanError):  # of broken files
        return None if folder is None else fingerprint(folder)
    return None
