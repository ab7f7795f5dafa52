"""Which positions of a request an engine keeps, by group: what cannot work is refused at once.

An engine frees the blocks of a layer with a window when no later token attends to them, unless the
layer shares a block table with layers that attend to everything: then it keeps them, and reuses
them as prefixes of other requests, so it also has to get all of them. Such a reader cannot be
served by an engine that has freed them.

Engines also differ in where a prompt ends for them. SGLang's decode begins with the first token
that prefill has generated, so a state has to be that after the whole prompt. vLLM's decode computes
the prompt's last token again, so it needs the state before that token, and a window that begins one
position earlier. vLLM's prefill does either, as a request asks; SGLang's has whole prompts only.

Prompts of some lengths would move and others fail, so the pair of engines is refused when they
shake hands. Workers say both among their extensions: :data:`WINDOWS` has the positions that a group
keeps before the next one, for each group that frees others, and :data:`WHOLE_PROMPTS` is true where
the engine reads and hands over whole prompts only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import attrs

from kvplan._checks import instance, integer, name
from kvplan.describe.worker import Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.plan import TransferPlan

WINDOWS: Final = "kvplan.windows"
WHOLE_PROMPTS: Final = "kvplan.whole_prompts"

COMPUTES_LAST: Final = "this engine computes a prompt's last token itself, and the source has too"


def keeping(worker: Worker, windows: Mapping[str, int], *, whole_prompts: bool = False) -> Worker:
    """Return a worker that says which of its groups keep a window of positions only.

    >>> worker = Worker("prefill", 0, (), (), ())
    >>> keeping(worker, {"swa": 1024}).extensions
    '{"kvplan.windows":{"swa":1024}}'
    >>> keeping(worker, {}, whole_prompts=True).extensions
    '{"kvplan.whole_prompts":true,"kvplan.windows":{}}'
    """
    instance(Worker, worker, "worker")
    kept = {
        name(group, "a group"): integer(window, f"window of {group}", low=1)
        for group, window in instance(Mapping, windows, "windows").items()
    }
    facts = {WINDOWS: kept} | ({WHOLE_PROMPTS: True} if whole_prompts else {})
    return attrs.evolve(worker, extensions=json.loads(worker.extensions) | facts)


def check_kept(plan: TransferPlan) -> None:
    """Refuse a source of which a group keeps fewer positions than the reader's group needs.

    Raises ``GROUP``.
    """
    needed = windows_kept(plan.local)
    kept = {remote.key: windows_kept(remote) for remote in plan.remotes}
    one_more = {
        remote.key: _has_whole_prompts(remote) and not _has_whole_prompts(plan.local)
        for remote in plan.remotes
    }
    for pair in plan.pairs:
        is_one_more = one_more[pair.remote]
        hint = COMPUTES_LAST if is_one_more else "run both engines with the same manager of windows"
        for group_pair in pair.group_pairs:
            local, remote = group_pair.groups
            window = kept[pair.remote].get(remote.name)
            wanted = needed.get(local.name)
            if wanted is not None:
                wanted += is_one_more
            if local.is_state:
                if not is_one_more:
                    continue
                expected = "a source that keeps the state before a prompt's last token"
                got = f"one whose group {remote.name!r} keeps the state after it"
            elif window is not None and (wanted is None or wanted > window):
                expected = f"a source that keeps {_positions(wanted)}"
                got = f"one whose group {remote.name!r} keeps {_positions(window)}"
            else:
                continue
            raise KVPlanError(
                "GROUP",
                f"read group {local.name!r} from {label_of(pair.remote)}",
                expected=expected,
                got=got,
                hint=hint,
                window=window,
            )


def _positions(window: int | None) -> str:
    return "all positions" if window is None else f"the last {window} positions"


def windows_kept(worker: Worker) -> dict[str, int]:
    """Return the positions that a worker's groups keep before the next one, of those with a window.

    A peer's are data: what is no number is left out.
    """
    windows: Any = json.loads(worker.extensions).get(WINDOWS)
    if not isinstance(windows, dict):
        return {}
    return {name: window for name, window in windows.items() if type(window) is int}


def _has_whole_prompts(worker: Worker) -> bool:
    return json.loads(worker.extensions).get(WHOLE_PROMPTS) is True
