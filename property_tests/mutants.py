"""An adversary of certify: ``python -m property_tests.mutants --count 100000 --seed 1``.

Plans random engines, changes something in the plans, and asks for a certificate. A changed plan must be refused by a
KVPlanError, or bind every request that a plan made anew for its workers binds, and move the right bytes in it. The
independent oracle judges the bytes, from what NIXL is given: the rows of both tables, the ids, and the name of the
remote worker. Prints the number of each outcome; a proof of a wrong plan, or an end that is no KVPlanError, stops it
with exit status 1.

Any field of any value in a plan may change, also those that are added to the code later: by one, by a block or to an
edge; rows and members dropped, doubled, swapped or cut off; or another pair's in its place.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Final, Literal

import attrs
import numpy as np

from kvplan import (
    Blocks,
    Group,
    KVPlanError,
    ReadSpec,
    TransferPlan,
    Worker,
    certify,
    plan_mesh,
    plan_reads,
    plan_writes,
)
from kvplan.plan.series import TokenSeries
from kvplan.testing.strategies import NUM_CHOICES, case_of
from property_tests.oracle import contents, copies_by_id, copies_of, positions_of, problems
from property_tests.worlds import APART, BEHIND, WITHIN, Side, workers

Path = tuple[Any, ...]
"""The way from a value to a value inside it: names of fields and indices."""

Request = Mapping[str, Any]

Engines = tuple[Sequence[Worker], Sequence[Worker]]
"""The workers of the destination, and of the source."""

EDGES: Final = (0, 1, -1, 2, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 62, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
STEPS: Final = (1, -1, 1, -1, 1, -1, 2, -2, 3, 4, -4, 8, 16, -16)
WEIGHTS: Final = {
    **dict.fromkeys(("pairs", "group_pairs"), 30),
    **dict.fromkeys(("local_table", "remote_table", "runs", "tokens"), 15),
    **dict.fromkeys(("rows", "first", "base", "slot_terms", "blocks", "remotes"), 3),
    "tokens_per_slot": 0,
}
"""How often fields change; others have 1. Most of a description has nothing to do with the proof.

Tokens per slot never change: a worker refuses any number but that of its views' slots."""

OWNERS: Final = "owners"
"""The field of what keeps memory allocated, which is no part of a description."""

TRIES: Final = 6
"""How many requests a changed plan that is proved must move rightly."""


def children(value: Any) -> list[tuple[Any, Any]]:
    """The fields of a value, or the members of a tuple, with their names or indices."""
    if attrs.has(type(value)):
        fields = [field.name for field in attrs.fields(type(value)) if field.init and field.name != OWNERS]
        return [(name, getattr(value, name)) for name in fields]
    return list(enumerate(value)) if isinstance(value, tuple) else []


def within(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value inside a value, and the way to it."""
    yield path, value
    for key, child in children(value):
        yield from within(child, (*path, key))


def replaced(value: Any, path: Path, new: Any) -> Any:
    """The value with another one at the end of a way."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, tuple):
        return (*value[:key], replaced(value[key], tuple(rest), new), *value[key + 1 :])
    return attrs.evolve(value, **{key: replaced(getattr(value, key), tuple(rest), new)})


def field_of(path: Path) -> str:
    """The names of the fields on a way, without indices."""
    return ".".join(key for key in path if isinstance(key, str))


def is_same(new: Any, old: Any) -> bool:
    """Whether a value changed into itself."""
    if isinstance(new, np.ndarray) and isinstance(old, np.ndarray):
        return new.dtype == old.dtype and np.array_equal(new, old)
    if isinstance(new, tuple) and isinstance(old, tuple):
        return len(new) == len(old) and all(map(is_same, new, old))
    return new is old or bool(type(new) is type(old) and new == old)


class Adversary:
    """Changes plans; everything in them may take the place of something of its kind."""

    def __init__(self, plans: tuple[TransferPlan, ...], random: Random) -> None:
        self.plans, self.random = plans, random
        self.kinds: dict[Any, list[Any]] = {}
        for path, value in within(plans):
            self.kinds.setdefault(self.kind(path, value), []).append(value)

    def kind(self, path: Path, value: Any) -> Any:
        """What may take a value's place: values of one type in fields of one name."""
        return type(value), next((key for key in reversed(path) if isinstance(key, str)), "")

    def mutant(self) -> tuple[str, tuple[TransferPlan, ...]]:
        """Changed plans, and the field that changed. Raises KVPlanError for a description that cannot be."""
        path, value = self.choice()
        new = self.changed(path, value)
        while is_same(new, value):
            path, value = self.choice()
            new = self.changed(path, value)
        plans, same = self.plans, self.random.random() < 0.3
        for other, found in list(within(self.plans)) if same else [(path, value)]:
            if found is value and (other == path or isinstance(value, np.ndarray) or attrs.has(type(value))):
                plans = replaced(plans, other, new)
        if path[-1:] == ("rows",) and new.shape[1:] == (5,) and self.random.random() < 0.5:
            counts = new[:, 4].astype(np.int64)  # rows that are numbered as they are now
            plans = replaced(plans, (*path[:-1], "first"), np.cumsum(counts) - counts)
        return field_of(path), plans

    def choice(self) -> tuple[Path, Any]:
        """Something in the plans: a random walk, that mostly goes to the pairs and seldom into descriptions."""
        path: Path = ()
        value: Any = self.plans
        while True:
            below = children(value)
            if not below or (self.random.random() < 0.06 and (path or len(below) > 1)):
                return path, value
            weights = [WEIGHTS.get(key, 0.03 if getattr(child, "group_pairs", 1) == () else 1) for key, child in below]
            ((key, value),) = self.random.choices(below, weights)
            path = (*path, key)

    def changed(self, path: Path, value: Any) -> Any:
        """A value in the place of another."""
        if path[-1:] == ("tokens",) and self.random.random() < 0.2:
            return self.runs_as_tokens(path)
        donors = self.kinds[self.kind(path, value)]
        if attrs.has(type(value)) or (self.random.random() < 0.25 and len(donors) > 1):
            return self.random.choice(donors)
        if isinstance(value, np.ndarray):
            return self.array(value)
        if isinstance(value, tuple):
            return tuple(value[i] for i in self.order(len(value)))
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            step = self.random.choice(STEPS)
            return self.random.choice((value + step, value + step, value * 2, -value, self.random.choice(EDGES)))
        if value is None:
            return np.full(self.random.randrange(4), self.random.randrange(2), self.random.choice("iq"))
        return self.random.choice((None, "READ", "WRITE", f"{value}.")) if isinstance(value, str) else None

    def runs_as_tokens(self, path: Path) -> tuple[TokenSeries, ...]:
        """Longer runs in the place of the tokens at the ends of a range."""
        groups: Any = self.plans
        for key in path[:-1]:
            groups = groups[key] if isinstance(key, int) else getattr(groups, key)
        sub = [np.zeros(group.tokens_per_block or 1, np.int32) for group in groups.groups]
        return tuple(
            TokenSeries(runs.base, runs.step, runs.starts, runs.period, (sub[0], sub[1]), True) for runs in groups.runs
        )

    def array(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """An array with numbers changed, or with rows of any axis in another order."""
        new, kind = value.copy(), self.random.randrange(8)
        edge, step = self.random.choice(EDGES), self.random.choice(STEPS)
        signed = new.view(np.dtype(f"i{new.itemsize}"))
        with np.errstate(over="ignore"):
            if kind < 3 and new.size:
                at = self.random.randrange(new.size)
                to = int(signed.reshape(-1)[at]) + step if kind else edge
                signed.reshape(-1)[at] = np.array(to % (1 << 64), np.uint64).astype(signed.dtype)
            elif kind < 5 and new.size:
                at = self.random.randrange(new.shape[-1] if new.ndim > 1 else 1)
                part = signed[..., at] if new.ndim > 1 else signed
                part += step
            elif kind == 5:
                return new.astype(self.random.choice((np.int32, np.int64, np.uint64, np.int16, np.float64)))
            elif new.ndim:
                axis = self.random.randrange(new.ndim)
                new = new.take(self.order(new.shape[axis]), axis)
        return new

    def order(self, size: int) -> list[int]:
        """The indices of ``size`` members, with some dropped, doubled, swapped, reversed or cut off."""
        order = list(range(size))
        if not size:
            return order
        i, j = self.random.randrange(size), self.random.randrange(size)
        kind = self.random.randrange(7)
        if kind == 0:
            del order[i]
        elif kind == 1:
            order.insert(j, i)
        elif kind == 2:
            order[i], order[j] = order[j], order[i]
        elif kind == 3:
            order.reverse()
        elif kind == 4:
            order = order[:i]
        elif kind == 5:
            order = order[i:] + order[:i]
        else:
            order[i] = j
        return order


def pool(workers: Sequence[Worker], name: str) -> int:
    """The blocks of a group's smallest pool."""
    return min((view.num_blocks for worker in workers for view in worker.views if view.group == name), default=0)


def tables(workers: Sequence[Worker], spans: tuple[Any, Any], random: Random, gaps: bool) -> dict[str, Blocks] | None:
    """Block tables for ranges of positions and of states, in no block of another group; ``None`` if they do not fit."""
    found: dict[str, Blocks] = {}
    taken: set[int] = set()
    for group in {group.name: group for worker in workers for group in worker.groups}.values():
        ranks = [each for worker in workers for each in worker.groups if each.name == group.name]
        start, stop = spans[group.is_state]
        ordinals = sorted({at for rank in ranks for at in ordinals_of(rank, start, stop)})
        size = pool(workers, group.name)
        free = [block for block in range(size) if block not in taken]
        random.shuffle(free)
        if size and free and random.random() < 0.5:
            free.sort(key=lambda block: block != size - 1)  # the last block of the pool is where ids are highest
        whole = list(range(ordinals[0], ordinals[-1] + 1)) if ordinals else []
        if len(whole) > len(free):
            return None
        if gaps and whole and random.random() < 0.5:
            end = whole[-1] + 1
            whole = [at for at in whole if random.random() < 0.6]
            found[group.name] = Blocks(free[: len(whole)], ordinals=whole, listed=(0, end))
        else:
            found[group.name] = Blocks(free[: len(whole)], first=whole[0] if whole else 0)
        taken.update(free[: len(whole)])
    return found


def ordinals_of(group: Group, start: int, stop: int) -> set[int]:
    """The block ordinals in which a group has positions of a range."""
    slots = group.tokens_per_block or 1
    return {i // slots for i, at in enumerate(positions_of(group, stop)) if at >= start}


def requests(engines: Engines, operation: str, random: Random) -> Iterator[tuple[Request, dict[str, Any]]]:
    """Requests that these engines have blocks for: the arguments of bind, and the ranges of token and state groups."""
    for _ in range(8 * TRIES):
        start, length = random.choice((0, 0, random.randrange(40))), random.randrange(1, 25)
        state = random.randrange(3)
        spans = (start, start + length), (state, state + random.randrange(3))
        into = tables(engines[0], spans, random, gaps=True)
        out_of = tables(engines[1], spans, random, gaps=False)
        if into is not None and out_of is not None:
            local, remote = (into, out_of) if operation == "READ" else (out_of, into)
            near = engines[operation == "WRITE"]
            names = {group.name: spans[group.is_state] for one in near for group in one.groups}
            yield {"local": local, "remote": remote, "tokens": names}, {"tokens": spans[0], "states": spans[1]}


def spans_of(worker: Worker, spans: Mapping[str, Any], skipped: Sequence[str]) -> dict[str, Any]:
    """The range of each tensor that a worker needs."""
    paged = {group.name for group in worker.groups if not group.is_state}
    return {
        view.name: spans["tokens" if view.group in paged else "states"]
        for view in worker.views
        if view.name not in skipped
    }


def own(given: Mapping[str, Any], workers: Sequence[Worker]) -> dict[str, Any]:
    """The entries for the groups of some workers."""
    names = {group.name for worker in workers for group in worker.groups}
    return {name: value for name, value in given.items() if name in names}


def bound(plan: TransferPlan, request: Request) -> Sequence[ReadSpec] | None:
    """The specs of a request; ``None`` if bind refuses it."""
    arguments: dict[str, Any] = {
        "local": own(request["local"], [plan.local]),
        "remote": own(request["remote"], plan.remotes),
        "tokens": own(request["tokens"], [plan.local]),
    }
    try:
        return plan.bind(**arguments)
    except KVPlanError:
        return None


def anew(plan: TransferPlan) -> TransferPlan | None:
    """The plan that the workers of a changed one should have; ``None`` if there is none."""
    skipped = plan.not_transferred
    try:
        if plan.operation == "READ":
            return plan_reads(plan.local, plan.remotes, not_transferred=skipped)
        return plan_writes(plan.local, plan.remotes, plan.siblings, not_transferred=skipped)
    except KVPlanError:
        return None


def faults(plans: Sequence[TransferPlan], request: Request, spans: Mapping[str, Any], complete: bool) -> list[str]:
    """What is wrong with a request, by the oracle."""
    copies: dict[Any, list[Any]] = {}
    moved: dict[Any, list[Any]] = {}
    destinations: dict[Any, tuple[Worker, TransferPlan]] = {}
    sources: dict[Any, tuple[Worker, Mapping[str, Blocks]]] = {}
    for plan in plans:
        reads = plan.operation == "READ"
        for worker in (plan.local,) if reads else plan.remotes:
            destinations[worker.key] = worker, plan
        for worker in plan.remotes if reads else (plan.local,):
            sources[worker.key] = worker, request["remote" if reads else "local"]
        specs = bound(plan, request)
        right = anew(plan) if specs is None else None
        if right is not None and bound(right, request) is not None:
            return [f"{plan} refuses it"]
        complete &= specs is not None
        for spec in specs or ():
            if spec.local != plan.local.key or spec.operation not in ("READ", "WRITE"):
                return [f"{spec} of {plan}"]
            key = spec.local if reads else spec.remote
            copies.setdefault(key, []).extend(copies_by_id(spec))
            moved.setdefault(key, []).extend(copies_of(spec))
    try:
        held = {key: contents(worker, own_, everything(worker)) for key, (worker, own_) in sources.items()}
        for worker, plan in destinations.values():
            contents(worker, request["local" if plan.operation == "READ" else "remote"], everything(worker))
    except AssertionError:
        return []  # blocks of two groups that share bytes, as a changed description has them: nobody owns both
    wrong = [f"copies to {key}, which is no destination" for key in copies if key not in destinations]
    for key, (worker, plan) in destinations.items():
        side = request["local" if plan.operation == "READ" else "remote"]
        needed = contents(worker, side, spans_of(worker, spans, plan.not_transferred))
        found = problems(needed, held, copies.get(key, ())) + problems(needed, held, moved.get(key, ()))
        wrong += [text for text in found if complete or "not written: " not in text]
    return wrong


def everything(worker: Worker) -> dict[str, Any]:
    return dict.fromkeys((view.name for view in worker.views), None)


def judged(engines: Engines, plans: tuple[TransferPlan, ...], seed: int, certify: Callable[..., Any] = certify) -> str:
    """What certify says of changed plans, and what they deserve: a code, or ``harmless``; else AssertionError."""
    try:
        proof = certify(plans)
    except KVPlanError as error:
        return error.code
    random = Random(seed)
    operation = plans[0].operation if plans else "READ"
    for request, spans in itertools.islice(requests(engines, operation, random), TRIES):
        wrong = faults(plans, request, spans, proof.complete)
        assert not wrong, f"proved, but in {request}: {wrong[:3]}"
    return "harmless"


def dense(random: Random) -> Engines:
    """Two engines without padding, whose tokens often are contiguous on both sides."""
    heads = tuple(random.choice((1, 2, 4)) for _ in range(random.choice((1, 1, 2))))
    made: list[Side] = []
    same = random.choice(("bhtkd", "bkhtd", "hbtkd", "btkhd"))
    while len(made) < 2:
        order = random.sample("bhtkd", 5) if random.random() < 0.2 else same
        spread = (random.choice((1, 1, 2)), random.choice((1, 2, 3)))
        tokens = tuple(random.randrange(1, 7) for _ in range(random.choice((1, len(heads)))))
        packing, first = random.choice((APART, APART, BEHIND, WITHIN)), random.randrange(2)
        side = Side(random.choice((1, 1, 2)), tokens, "".join(order), spread, packing, first)
        made += [side] * side.possible(heads)
    full = [workers(name, at, heads, side, 20) for name, at, side in zip("dp", (4096, 1 << 44), made, strict=True)]
    ours, theirs = ([roomy(worker) for worker in side] if random.random() < 0.5 else side for side in full)
    return ours, theirs


def roomy(worker: Worker) -> Worker:
    """A worker with room for one more block in its regions."""
    views = [attrs.evolve(view, num_blocks=view.num_blocks - 1) for view in worker.views]
    return attrs.evolve(worker, views=views)


def subject(random: Random) -> tuple[Engines, tuple[TransferPlan, ...]]:
    """Random engines with the plans of all reads, or of all writes, or with one of them."""
    while True:
        way: Literal["READ", "WRITE"] = random.choice(("READ", "READ", "WRITE"))
        case = case_of(random.randbytes(NUM_CHOICES))
        engines: Engines = (case.destinations, case.sources)
        skipped = case.not_transferred
        if random.random() < 0.8:
            engines, skipped = dense(random), ()
        plans = plan_mesh(*engines, way, not_transferred=skipped).plans
        plans = plans if random.random() < 0.4 else (random.choice(plans),)
        found = [groups for plan in plans for pair in plan.pairs for groups in pair.group_pairs]
        if any(groups.runs for groups in found) or (found and random.random() < 0.3):
            return engines, plans


def mutants(count: int, seed: int) -> Iterator[tuple[str, Engines, tuple[TransferPlan, ...]]]:
    """Changed plans: the field that changed, the engines, and the plans. Asserts that the plans before have a proof."""
    random, made = Random(seed), 0
    while made < count:
        engines, plans = subject(random)
        adversary = Adversary(plans, random)
        certify(plans)
        for _ in range(min(40, count - made)):
            try:
                field, worse = adversary.mutant()
            except KVPlanError:
                continue
            made += 1
            yield field, engines, worse


def hunt(count: int, seed: int) -> Counter[tuple[str, str]]:
    """The number of each field and outcome for ``count`` mutants; any other end raises an ExceptionGroup."""
    outcomes = Counter[tuple[str, str]]()
    for number, (field, engines, plans) in enumerate(mutants(count, seed)):
        try:
            outcomes[field, judged(engines, plans, number)] += 1
        except Exception as error:
            raise ExceptionGroup(f"mutant {number} of seed {seed}: {field}", [error]) from None
    return outcomes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Change plans and certify them.")
    parser.add_argument("--count", type=int, default=100_000, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which mutants: the same for the same seed")
    options = parser.parse_args()
    outcomes, start = Counter[tuple[str, str]](), time.perf_counter()
    for part in range(0, options.count, 2_000):
        outcomes += hunt(min(2_000, options.count - part), options.seed * 1_000_003 + part)
        codes = Counter[str]()
        for (_, code), number in outcomes.items():
            codes[code] += number
        rate = outcomes.total() / (time.perf_counter() - start)
        print(f"{outcomes.total()} mutants, {rate:.0f} a second: {dict(codes.most_common())}", flush=True)
    for field in sorted({field for field, _ in outcomes}):
        print(field, {code: number for (name, code), number in outcomes.items() if name == field})


if __name__ == "__main__":
    main()
