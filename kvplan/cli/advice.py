"""Advice: which layout, kv form or block size, on either side, would move a request in fewer descriptors.

Every figure is that of a plan (:meth:`kvplan.MeshPlan.cost`). Each change of one side is planned by itself. Then the
best pair, one change of each side, is looked for: of the same key, such as two layouts, and of whatever is best alone
with any of the other side. Pairs are weighed by one destination worker of each pipeline stage; the best one is planned
whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from kvplan._text import size
from kvplan.cli.sides import AUTO, Side
from kvplan.cli.trials import undrafted
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.models.layouts import CONV_ORDERS, KV, KV_FORMS, ORDERS, STEP
from kvplan.models.model import Model
from kvplan.plan.cost import Cost
from kvplan.plan.mesh import plan_mesh
from kvplan.verification.progress import Progress, part, told, untold

BLOCKS: Final = (16, 32, 64, 128)
"""The block sizes that are tried, beside the other side's."""

POOL: Final = 4096
"""Blocks of an engine, where a side doesn't say; how many there are changes no figure."""

SHOWN: Final = 9
"""At most so many changes of one side are told."""

HEADINGS: Final = f"{'descriptors':>12}{'fewer':>9}{'mostly of':>13}{'rows':>8}  change"

Engine = tuple[Worker, ...]


@attrs.frozen
class Option:
    """Changes, at most one of each side (``src``, ``dst``), and the cost with them; ``alike`` are others that cost it.

    A change is a key and a value in the words of :class:`Side`.
    """

    changes: Mapping[str, str]
    cost: Cost
    alike: tuple[Mapping[str, str], ...] = ()

    @property
    def usual_bytes(self) -> int:
        """The length of the descriptors that move most bytes; of several, the longest."""
        lengths = self.cost.lengths
        return max(lengths, key=lambda length: (length * lengths[length], length), default=0)

    def __str__(self) -> str:
        sides: dict[str, dict[str, list[str]]] = {}
        for side, change in (item for one in (self.changes, *self.alike) for item in one.items()):
            key, _, value = change.partition("=")
            sides.setdefault(side, {}).setdefault(key, []).append(value)
        told = {
            s: " or ".join(f"{key}={'/'.join(values)}" for key, values in keys.items()) for s, keys in sides.items()
        }
        return " and ".join(f"{side} {changes}" for side, changes in told.items()) or "as it is"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "changes": dict(self.changes),
            "alike": [dict(changes) for changes in self.alike],
            "descriptors": self.cost.num_descriptors,
            "ids": self.cost.num_ids,
            "rows": self.cost.num_rows,
            "usual_bytes": self.usual_bytes,
            "lengths": {str(length): times for length, times in self.cost.lengths.items()},
        }


@attrs.frozen
class Advice:
    """What changes of two engines do to the descriptors of a request: those of each side alone, then the best pair.

    ``options`` are in order of descriptors; ``refused`` are changes that the model or the layout can't have, and why.
    """

    now: Option
    options: tuple[Option, ...]
    refused: tuple[tuple[Mapping[str, str], str], ...]

    @property
    def helpful(self) -> tuple[Option, ...]:
        """The options with fewer descriptors than now."""
        return tuple(o for o in self.options if o.cost.num_descriptors < self.now.cost.num_descriptors)

    def __str__(self) -> str:
        alone = [option for option in self.helpful if len(option.changes) == 1]
        shown = [option for option in self.helpful if option not in alone[SHOWN:]]
        if not shown:
            return "\n".join([HEADINGS, self._line(self.now), f"Nothing helps, of {len(self.options)} changes."])
        return "\n".join([HEADINGS, *map(self._line, [*shown, self.now])])

    def _line(self, option: Option) -> str:
        number = option.cost.num_descriptors
        fewer = f"{self.now.cost.num_descriptors / max(number, 1):,.4g}x"
        return f"{number:>12,}{fewer:>9}{size(option.usual_bytes):>13}{option.cost.num_rows:>8,}  {option}"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "bytes": self.now.cost.num_bytes,
            "now": self.now.to_json(),
            "options": [option.to_json() for option in self.options],
            "refused": [{"changes": dict(changes), "reason": reason} for changes, reason in self.refused],
        }


def advise(model: Model, src: Side, dst: Side, tokens: int, progress: Progress = untold) -> Advice:
    """The advice for a request of so many positions. Raises what planning raises without any change.

    ``progress`` is called now and then with the share of the work that is done, from 0 to 1.

    >>> print(advise(Model.shipped("llama-3.2-1b"), Side(layout="BLNHC"), Side(layout="BLHNC"), 1000))
     descriptors    fewer    mostly of    rows  change
              78   1,629x      512 KiB       4  dst layout=BLNHC
             190   668.8x      512 KiB       4  src layout=BLHNC
           1,008   126.1x       32 KiB      34  dst layout=LBNHC
           1,120   113.5x       32 KiB      34  src layout=LBHNC
           8,064   15.76x   4096 bytes       4  src layout=BHLNC
           8,064   15.76x   4096 bytes      34  src layout=LHBNC
         127,070       1x    256 bytes       2  as it is
    """
    return _Search(model, {"src": src, "dst": dst}, tokens).advice(progress)


class _Search:
    """The engines that changes make, and what they cost with each other."""

    def __init__(self, model: Model, sides: Mapping[str, Side], tokens: int) -> None:
        self.model, self.tokens = model, tokens
        self.refused: list[tuple[Mapping[str, str], str]] = []
        self.engines: dict[str, dict[str, Engine]] = {}
        for name, other in (("src", "dst"), ("dst", "src")):
            found = {"": sides[name].engine(model, name, sides[name].blocks or POOL)}
            for change, side in changes(model, sides[name], sides[other]):
                try:
                    engine = side.engine(model, name, side.blocks or POOL)
                except KVPlanError as error:
                    self.refuse({name: change}, error)
                else:
                    if engine not in found.values():
                        found[change] = engine
            self.engines[name] = found

    def refuse(self, changed: Mapping[str, str], error: KVPlanError) -> None:
        self.refused.append((changed, " ".join(str(error).splitlines())))

    def cost(self, changed: Mapping[str, str], few: bool = False) -> Cost:
        """The cost with some changes; with ``few`` that of one destination worker of each stage."""
        src, dst = (self.engines[name][changed.get(name, "")] for name in ("src", "dst"))
        destinations = tuple({tuple(worker.tensors): worker for worker in dst}.values()) if few else dst
        return plan_mesh(destinations, src, not_transferred=undrafted(dst, src)).cost(self.tokens)

    def alone(self, progress: Progress) -> Iterator[Option]:
        """The changes of one side each, those of one side together that cost the same."""
        every = [(name, change) for name, engines in self.engines.items() for change in engines if change]
        alike: dict[Any, list[Option]] = {}
        for name, change in told(every, progress):
            option = Option({name: change}, self.cost({name: change}))
            key = name, option.cost.num_rows, tuple(option.cost.lengths.items())
            alike.setdefault(key, []).append(option)
        for first, *others in alike.values():
            yield attrs.evolve(first, alike=tuple(other.changes for other in others))

    def best_pair(self, alone: Option, progress: Progress) -> Option | None:
        """The pair of changes that costs least, if there is any; ``alone`` is the best change of one side."""

        def weight(changed: Mapping[str, str]) -> tuple[int, int]:
            cost = self.cost(changed, few=True)
            return cost.num_descriptors, cost.num_rows

        def tried(changed: Mapping[str, str]) -> bool:
            keys = {change.partition("=")[0] for change in changed.values()}
            return len(keys) == 1 or alone.changes.items() <= changed.items()

        pairs = itertools.product(*(filter(None, engines) for engines in self.engines.values()))
        every = [changed for src, dst in pairs if tried(changed := {"src": src, "dst": dst})]
        found = min(told(every, progress), key=weight, default=None)
        return None if found is None else Option(found, self.cost(found))

    def advice(self, progress: Progress) -> Advice:
        alone, paired = (part(progress, i, 2) for i in (0, 1))
        now, options = Option({}, self.cost({})), sorted(self.alone(alone), key=_order)
        pair = self.best_pair(options[0], paired) if options else None
        if pair is not None and pair.cost.num_descriptors < options[0].cost.num_descriptors:
            options.insert(0, pair)
        return Advice(now, tuple(options), tuple(self.refused))


def _order(option: Option) -> tuple[int, int]:
    return option.cost.num_descriptors, option.cost.num_rows


def changes(model: Model, side: Side, other: Side) -> Iterator[tuple[str, Side]]:
    """The changes of a side that mean something to a model, and the side with each.

    >>> found = changes(Model.shipped("deepseek-v3"), Side(), Side(block=48))
    >>> [change for change, _ in found][4:]
    ['layout=BHLNC', 'block=32', 'block=64', 'block=128', 'block=48']
    """
    tensors = model.tensors
    axes = {axis for tensor in tensors for axis, _ in tensor.axes}
    tried: dict[str, Sequence[Any]] = {
        "layout": ORDERS,
        "kv": KV_FORMS if KV in axes else (),
        "conv": CONV_ORDERS if STEP in axes else (),
        "block": tuple(dict.fromkeys((*BLOCKS, other.block))) if any(tensor.paged for tensor in tensors) else (),
    }
    for key, values in tried.items():
        for value in values:
            if value != getattr(side, key):
                yield f"{key}={AUTO if value is None else value}", attrs.evolve(side, **{key: value})
