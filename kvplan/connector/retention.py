"""Which positions of a request an engine keeps, by group: what cannot work is refused at once.

An engine frees the blocks of a layer with a window when no later token attends to them, unless the
layer shares a block table with layers that attend to everything: then it keeps them, and reuses
them as prefixes of other requests, so it also has to get all of them. Such a reader cannot be
served by an engine that has freed them. Prompts shorter than the window would move and longer ones
fail, so the pair of engines is refused when they shake hands.

Workers say it among their extensions, under :data:`WINDOWS`: the positions that a group keeps
before the next one, for each group that frees others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import attrs

from kvplan.describe.worker import Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.plan import TransferPlan

WINDOWS: Final = "kvplan.windows"


def keeping(worker: Worker, windows: Mapping[str, int]) -> Worker:
    """Return a worker that says which of its groups keep a window of positions only.

    >>> worker = Worker("prefill", 0, (), (), ())
    >>> keeping(worker, {"swa": 1024}).extensions
    '{"kvplan.windows":{"swa":1024}}'
    """
    extensions = json.loads(worker.extensions) | {WINDOWS: dict(windows)}
    return attrs.evolve(worker, extensions=extensions)


def check_kept(plan: TransferPlan) -> None:
    """Refuse a source of which a group keeps fewer positions than the reader's group needs.

    Raises ``GROUP``.
    """
    needed = _windows(plan.local)
    kept = {remote.key: _windows(remote) for remote in plan.remotes}
    for pair in plan.pairs:
        for group_pair in pair.group_pairs:
            local, remote = (group.name for group in group_pair.groups)
            window = kept[pair.remote].get(remote)
            wanted = needed.get(local)
            if window is not None and (wanted is None or wanted > window):
                raise KVPlanError(
                    "GROUP",
                    f"read group {local!r} from {label_of(pair.remote)}",
                    expected=f"a source that keeps {_positions(wanted)}",
                    got=f"one whose group {remote!r} keeps {_positions(window)}",
                    hint="run both engines with the same manager of windows",
                    window=window,
                )


def _positions(window: int | None) -> str:
    return "all positions" if window is None else f"the last {window} positions"


def _windows(worker: Worker) -> dict[str, int]:
    """Return the windows of a worker's groups. A peer's are data: what is none is left out."""
    windows: Any = json.loads(worker.extensions).get(WINDOWS)
    if not isinstance(windows, dict):
        return {}
    return {name: window for name, window in windows.items() if type(window) is int}
