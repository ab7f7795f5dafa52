"""Patterns: each line of a report is read back, and every byte that it names holds what it says, by the oracle."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan import Axis, Blocks, Group, MeshPlan, Region, View, Worker, plan_mesh, verify
from property_tests.oracle import Meaning, contents
from tests.small import engine

REQUEST: dict[str, Any] = {
    "local": {"attn": Blocks([7, 3, 5])},
    "remote": {"attn": Blocks([2, 9, 4])},
    "tokens": (1, 11),
}
SPANS = {f"layers.{layer}": REQUEST["tokens"] for layer in range(4)}
Copies = dict[Any, tuple[Any, Any]]
Coordinates = dict[str, Any]


def copies_of(mesh: MeshPlan, **changed: Any) -> Copies:
    """The copies of a plan by pair of workers."""
    request = REQUEST | changed
    specs = [spec for plan in mesh.plans for spec in plan.bind(**request)]
    copies = Copies()
    for spec in specs:
        if spec.num_bytes:
            local, remote = spec.descriptors()
            copies[spec.local, spec.remote] = local.copy(), remote.copy()
    return copies


def lines_of(mesh: MeshPlan, copies: Copies, **changed: Any) -> list[str]:
    """The report's lines of wrong and missing bytes but that of the first byte."""
    report = verify(mesh, **REQUEST | changed, copies=copies)
    return [
        line
        for code, text in report.failures
        if code in ("VALUE", "COVER")
        for line in text.splitlines()
        if not line.startswith("  first: ")
    ]


def numbers(text: str) -> set[int]:
    """
    >>> sorted(numbers("0-2,5"))
    [0, 1, 2, 5]
    """
    spans = [[int(end) for end in span.split("-")] for span in text.split(",")]
    return {number for span in spans for number in range(span[0], span[-1] + 1)}


def coordinates(meaning: Meaning) -> Coordinates:
    """A byte's coordinates by the names that a report has for them."""
    tensor, position, axes, byte = meaning
    found: Coordinates = {"tensor": tensor, "position": position, **dict(axes)}
    return found | {"byte": found.get("dim", 0) * 2 + byte}


def names_of(folded: str) -> set[str]:
    """The names of ``layers.0-1,3``."""
    return {f"layers.{number}" for number in numbers(folded.removeprefix("layers."))}


@attrs.define
class Claim:
    """What a line says: where its bytes are, and what they hold at each coordinate that moves."""

    where: dict[str, set[Any]] = attrs.field(factory=dict)
    holds: dict[str, Any] = attrs.field(factory=dict)
    workers: set[int] = attrs.field(factory=set)
    outside: bool = False
    num_bytes: int = -1
    cut: set[str] = attrs.field(factory=set)

    @classmethod
    def of(cls, line: str, workers: set[int]) -> Claim:
        """The claim of a line, about these workers unless it names fewer."""
        counted = re.match(r"(?:  |at .+?: )(\d+) bytes?( wrong| missing)?: ", line)
        assert counted, line
        claim = cls(workers=workers, num_bytes=int(counted[1]))
        line = line[counted.end() :]
        for text in line.replace(": ", ", ").split(", "):
            claim.read(re.sub(r" and \d+ more$", "", text))
            if text.endswith(" more"):
                # The list of what the axis holds is cut: it does not say where.
                axis = [axis for axis, holds in claim.holds.items() if isinstance(holds, Listed)][-1]
                claim.cut.add(axis)
        return claim

    def read(self, text: str) -> None:
        if text == "everywhere":
            pass
        elif text == "bytes outside the request":
            self.outside = True
        elif place := re.fullmatch(r"at decode/([-,\d]+)", text):
            self.workers = numbers(place[1])
        elif re.fullmatch("K|V|K and V", text):
            self.where["kv"] = {"KV".index(name) for name in text.split(" and ")}
        elif re.fullmatch(r"layers\.[-,\d]+", text):
            self.where["tensor"] = names_of(text)
        elif place := re.fullmatch(r"(position|head|dim|byte)s? ([-,\d]+)(?: of dim)?", text):
            self.where[place[1]] = numbers(place[2])
        elif move := re.fullmatch(r"(K|V) holds (K|V)", text):
            self.listed("kv", {"KV".index(move[1]): "KV".index(move[2])})
        elif move := re.fullmatch(r"(layers\.\d+) holds (layers\.\d+)", text):
            self.listed("tensor", {move[1]: move[2]})
        elif move := re.fullmatch(r"layers\.n holds layers\.n([-+]\d+)", text):
            self.holds["tensor"] = lambda name: f"layers.{int(name[7:]) + int(move[1])}"
        elif move := re.fullmatch(r"(?:every )?(\w+)(?: (\w))?(?: of dim)? holds \1 ([^ ]*[a-z^%()].*|\d+)", text):
            variable, formula = move[2] or "x", move[3]
            if variable.isdigit():
                self.listed(move[1], {int(variable): int(formula)})
            else:
                self.holds[move[1]] = lambda number: eval(formula, {variable: number})
        else:
            move = re.fullmatch(r"(\w+?)s? ([-\d]+)(?: of dim)? holds? \w+ ([-\d]+)(?: of dim)?", text)
            assert move, text
            sides = sorted(numbers(move[2])), sorted(numbers(move[3]))
            self.listed(move[1], dict(zip(*sides, strict=True)))

    def listed(self, axis: str, pairs: dict[Any, Any]) -> None:
        """Each of some coordinates holds another: no others are named."""
        before = self.holds.get(axis)
        known = getattr(before, "pairs", {}) | pairs
        self.holds[axis] = Listed(known)

    def names(self, rank: int, byte: Coordinates) -> bool:
        if rank not in self.workers:
            return False
        listed = {
            axis: set(holds.pairs)
            for axis, holds in self.holds.items()
            if isinstance(holds, Listed) and axis not in self.cut
        }
        return all(byte.get(axis) in at for where in (self.where, listed) for axis, at in where.items())


@attrs.frozen
class Listed:
    pairs: dict[Any, Any]

    def __call__(self, coordinate: Any) -> Any:
        return self.pairs[coordinate]


def check(mesh: MeshPlan, copies: Copies, lines: list[str]) -> None:
    """Hold the lines of a report against what the oracle says of every byte."""
    workers = {plan.local.key: plan.local for plan in mesh.plans}
    for plan in mesh.plans:
        workers |= {worker.key: worker for worker in plan.remotes}
    wrong: dict[tuple[int, Meaning], Meaning | None] = {}
    missing = set[tuple[int, Meaning]]()
    needed: dict[tuple[int, Meaning], Any] = {}
    for plan in mesh.plans:
        cells: dict[Any, Any] = {}
        for (local, remote), (writes, reads) in copies.items():
            if local == plan.local.key:
                there = contents(workers[remote], REQUEST["remote"], dict.fromkeys(SPANS))
                for (write, length, device), (read, _, _) in zip(writes.tolist(), reads.tolist(), strict=True):
                    for byte in range(length):
                        cells[device, write + byte] = there.get((device, read + byte), "foreign")
        wanted = contents(plan.local, REQUEST["local"], SPANS)
        for place, meaning in wanted.items():
            key = plan.local.rank, meaning
            held = cells.get(place)
            needed[key] = held if isinstance(held, tuple) else None
            if held is None:
                missing.add(key)
            elif held != meaning:
                wrong[key] = needed[key]
    named = set[tuple[int, Meaning]]()
    totals = {"wrong": len(wrong), "missing": len(missing)}
    counts = dict.fromkeys(totals, 0)
    for line in lines:
        heading = re.match(r"at decode/([-,\d]+): (\d+) bytes? (wrong|missing)", line)
        if heading:
            kind, workers_of_heading = heading[3], numbers(heading[1])
            assert int(heading[2]) == totals[kind]
            if " wrong, first: " in line:
                counts[kind] += totals[kind]
                continue
            if heading.end() == len(line):
                continue
        if rest := re.fullmatch(r"  (\d+) bytes? in none of these patterns", line):
            counts[kind] += int(rest[1])
            continue
        claim = Claim.of(line, workers_of_heading)
        counts[kind] += claim.num_bytes
        bytes_named = {key for key in needed if claim.names(key[0], coordinates(key[1]))}
        assert len(bytes_named) == claim.num_bytes, line
        assert not named & bytes_named, line
        named |= bytes_named
        for key in bytes_named:
            if kind == "missing":
                assert key in missing, line
            elif claim.outside:
                assert wrong[key] is None, line
            else:
                held = wrong[key]
                assert held is not None, line
                expected = coordinates(key[1])
                for axis, holds in claim.holds.items():
                    if axis not in claim.cut or expected[axis] in holds.pairs:
                        expected[axis] = holds(expected[axis])
                    else:
                        expected[axis] = coordinates(held)[axis]
                if "dim" in claim.holds:
                    expected["byte"] = expected["dim"] * 2 + expected["byte"] % 2
                if "byte" in claim.holds:
                    expected["dim"] = expected["byte"] // 2
                assert coordinates(held) == expected, line
    assert counts == {kind: total if lines else 0 for kind, total in totals.items()}


@st.composite
def faulty(draw: st.DrawFn) -> tuple[MeshPlan, Copies]:
    """A plan, and its copies with a few faults: rows that take turns, that are off, that are left out, other tables."""
    size = st.sampled_from([1, 2, 4])
    order = st.sampled_from(["NH", "HN"])
    mesh = plan_mesh(
        engine("decode", draw(size), order=draw(order)), engine("prefill", draw(size), order=draw(order), blocks=11)
    )
    changed = draw(
        st.sampled_from([{}, {"remote": {"attn": Blocks([9, 2, 4])}}, {"remote": {"attn": Blocks([2, 9, 8])}}])
    )
    copies = copies_of(mesh, **changed)
    for _ in range(draw(st.integers(1, 2))):
        pair = draw(st.sampled_from(sorted(copies)))
        for other in [pair] if draw(st.booleans()) else copies:
            local, remote = copies[other]
            first, step = draw(st.integers(0, 3)), draw(st.integers(1, 4))
            rows = np.arange(len(local))[first::step]
            fault = draw(st.sampled_from(["turn", "off", "missing"]))
            # Rows of one length take each other's places.
            rows = rows[local[rows, 1] == local[rows[0], 1]] if rows.size else rows
            if fault == "turn" and rows.size:
                remote[rows, 0] = np.roll(remote[rows, 0], draw(st.integers(1, 4)))
            elif fault == "off":
                remote[rows, 0] += np.uint64(draw(st.sampled_from([1, 2, 16, 64])))
            elif fault == "missing":
                copies[other] = np.delete(local, rows, 0), np.delete(remote, rows, 0)
    return mesh, copies


@settings(max_examples=40, deadline=None)
@given(faulty())
def test_a_line_is_true_of_every_byte_that_it_names(case: tuple[MeshPlan, Copies]) -> None:
    """Read back from the report, it names as many bytes as it says, each wrong in the way that it says, none twice."""
    check(*case, lines_of(*case))


def kept(tp: int, change: Callable[[Any, Any], Any]) -> list[str]:
    """The lines of a report of whole blocks, where ``change`` gets the copies of each pair."""
    mesh = plan_mesh(engine("decode", tp), engine("prefill", order="NH"))
    copies = {pair: change(*sides) for pair, sides in copies_of(mesh).items()}
    return lines_of(mesh, copies)


def test_heads_that_took_each_others_places_are_one_line_for_all_workers() -> None:
    """Each of four workers has one head: what is wrong of all is said once."""

    def swap(local: Any, remote: Any) -> Any:
        remote[:, 0] ^= np.uint64(16)
        return local, remote

    assert kept(4, swap) == ["at decode/0-3: 1280 bytes wrong: everywhere: head h holds head h^1"]


def test_workers_that_are_right_are_not_named() -> None:
    """Ranks 0 to 3 of two heads receive heads 0, 1, 0, 1: ranks 1 and 2 are wrong, in one way."""
    mesh = plan_mesh(engine("decode", 4, heads=2), engine("prefill", heads=2, order="NH"))
    copies = copies_of(mesh)
    for (_, rank), remote in [(local, sides[1]) for (local, _), sides in copies.items()]:
        remote[:, 0] = remote[:, 0] - np.uint64(16 * (rank // 2)) + np.uint64(16 * (rank % 2))
    assert lines_of(mesh, copies) == ["at decode/1-2: 640 bytes wrong: everywhere: head h holds head h^1"]


def noisy() -> tuple[MeshPlan, Copies]:
    """Copies of 16 bytes, each from anywhere."""
    mesh = plan_mesh(engine("decode"), engine("prefill", order="NH"))
    copies = copies_of(mesh)
    ((_, remote),) = copies.values()
    remote[:, 0] = np.random.default_rng(7).permutation(remote[:, 0])
    return mesh, copies


def test_bytes_of_no_pattern_are_counted() -> None:
    """Of bytes that are wrong each in its own way, a few lines name some, and the last one has the number of others."""
    mesh, copies = noisy()
    lines = lines_of(mesh, copies)
    check(mesh, copies, lines)
    assert len(lines) < 9
    assert re.fullmatch(r"  \d+ bytes in none of these patterns", lines[-1])


def test_bytes_that_the_search_does_not_reach_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that finds only what joins with nothing ends."""
    monkeypatch.setattr("kvplan.verification.pattern_search.MAX_UNJOINED", -1)
    mesh, copies = noisy()
    (line,) = lines_of(mesh, copies)
    assert re.match(r"at decode/0: \d+ bytes wrong, first: ", line)


def two_tensors(name: str, *views: tuple[str, str, int, int]) -> Worker:
    """A worker with one byte for each head, of tensors given by name, group and heads."""
    groups = sorted({group for _, group, _, _ in views})
    return Worker(
        name,
        0,
        [Region(str(at), 4096 * (1 + at), 144) for at in range(len(views))],
        [Group(group, 4) for group in groups],
        [
            View(
                tensor,
                group,
                str(at),
                "uint8",
                (Axis("token", 0, 4, 4, 4), Axis("head", start, stop, stop, 1)),
                9,
                16,
            )
            for at, (tensor, group, start, stop) in enumerate(views)
        ],
    )


def report_on(worker: Callable[[str], Worker], tables: dict[str, Blocks]) -> list[str]:
    """The lines of a report where all bytes of the first region are read from the second."""
    mesh = plan_mesh([worker("decode")], [worker("prefill")])
    request = {"local": tables, "remote": tables, "tokens": (0, 4)}
    copies = copies_of(mesh, **request)
    ((_, remote),) = copies.values()
    remote[:, 0] += np.where(remote[:, 0] < 8192, np.uint64(4096), np.uint64(0))
    return lines_of(mesh, copies, **request)


def test_bytes_of_no_request_are_named_where_there_is_one_tensor() -> None:
    """What is copied from a block of another request has no label of any tensor."""
    mesh = plan_mesh(engine("decode", layers=1), engine("prefill", layers=1))
    copies = copies_of(mesh)
    for _, remote in copies.values():
        remote[0, 0] = engine("prefill", layers=1)[0].regions[0].address
    (heading,) = lines_of(mesh, copies)
    assert ": bytes outside the request" in heading


def test_a_tensor_with_other_axes_has_no_coordinates_to_compare() -> None:
    """A tensor of 3 heads receives bytes of one of 4."""
    lines = report_on(lambda name: two_tensors(name, ("a", "g", 0, 3), ("b", "g", 0, 4)), {"g": Blocks([5])})
    assert lines == ["at decode/0: 12 bytes wrong: a: bytes of a tensor with other axes"]


def test_a_byte_that_a_worker_has_twice_is_in_no_pattern() -> None:
    """A tensor in two groups, of which one is wrong: a line would name the right one too."""
    lines = report_on(
        lambda name: two_tensors(name, ("a", "g", 0, 4), ("b", "g", 0, 4), ("a", "h", 0, 4)),
        {"g": Blocks([5]), "h": Blocks([5])},
    )
    (line,) = lines
    assert line.startswith("at decode/0: 32 bytes wrong, first: a head 0 ")
