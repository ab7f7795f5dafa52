"""Commands about a store: what is in it, whether it is whole, who can load it, what to evict."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import click

from kvplan._text import count, few, fold, intervals, size
from kvplan.cli.commands import read_offer
from kvplan.cli.console import echo_json, print_lines, progress_bar
from kvplan.cli.options import json_option
from kvplan.describe import Worker
from kvplan.errors import KVPlanError
from kvplan.plan import plan_reads
from kvplan.store import (
    Backend,
    FileEntry,
    Limits,
    PageHeader,
    StoredPart,
    evict,
    open_backend,
    read_file,
)
from kvplan.store.pages import read_header
from kvplan.store.parallel import in_batches
from kvplan.store.parts import NAME_DIGITS
from kvplan.store.readers import PIN, of_group, place

GIB: Final = 1 << 30
DAY_S: Final = 86400

location_argument = click.argument("location", metavar="STORE", type=click.Path())


@attrs.define
class PartEntry:
    """A part of a store, with the number of its files and the end of the longest prefix."""

    space: str
    part: StoredPart
    num_files: int = 0
    num_bytes: int = 0
    longest: int = 0

    def lines(self) -> Iterator[str]:
        """Yield the lines that ``ls`` prints."""
        views = self.part.worker.views
        # axes of which the part has all say nothing
        axes = {axis.name: axis for axis in views[0].axes if axis.extent < axis.size}
        held = ", ".join(
            f"{axis.name} {intervals(range(axis.start, axis.stop))} of {axis.size}"
            for axis in axes.values()
        )
        names = fold(view.name for view in views)
        dtypes = "/".join(dict.fromkeys(view.dtype for view in views))
        yield f"    {self.part.name}: {names} {dtypes}{f', {held}' if held else ''}"
        yield f"      {count(self.num_files, 'file')} of {size(self.part.num_bytes)}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        worker = self.part.worker
        return {
            "part": self.part.name,
            "tensors": list(worker.tensors),
            "dtypes": list(dict.fromkeys(view.dtype for view in worker.views)),
            "files": self.num_files,
            "bytes": self.num_bytes,
            "longest_prefix": self.longest,
        }


@attrs.define
class ModelEntry:
    """The pages of one model and page size."""

    name: str
    model: str = ""
    tokens_per_page: int | None = None
    pages: set[str] = attrs.field(factory=set)
    pinned: set[str] = attrs.field(factory=set)
    num_bytes: int = 0
    parts: dict[str, PartEntry] = attrs.field(factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield the lines that ``ls`` prints."""
        of_tokens = "" if self.tokens_per_page is None else f" of {self.tokens_per_page} tokens"
        pinned = f", {len(self.pinned)} pinned" if self.pinned else ""
        yield f"  {self.model}, space {self.name}"
        pages = f"{count(len(self.pages), 'page')}{of_tokens}{pinned}"
        yield f"    {pages}, {size(self.num_bytes)}, prefixes of up to {self.longest} tokens"
        for part in self.parts.values():
            yield from part.lines()

    @property
    def longest(self) -> int:
        """The tokens up to the end of the page that is furthest from a beginning."""
        return max((part.longest for part in self.parts.values()), default=0)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "space": self.name,
            "model": self.model,
            "tokens_per_page": self.tokens_per_page,
            "pages": len(self.pages),
            "pinned": len(self.pinned),
            "bytes": self.num_bytes,
            "longest_prefix": self.longest,
            "parts": [part.to_json() for part in self.parts.values()],
        }


def opened(location: str) -> Backend:
    """Return the store in a folder or at a URL. Raises ``NAME`` if there is no such folder."""
    # a command makes no folder, and a bucket is none of ours to make
    if "://" not in location and not Path(location).is_dir():
        got = f"{location!r}"
        raise KVPlanError("NAME", "open a store", expected="the folder of a store", got=got)
    return open_backend(location)


def is_part(entry: FileEntry) -> bool:
    """Return whether a file has a part of a page: pins and marks of uses have no bytes."""
    return len(entry.name.rpartition("/")[2]) == NAME_DIGITS


def header_of(backend: Backend, entry: FileEntry) -> PageHeader | KVPlanError:
    """Return the header of a file, or why it cannot be read. Raises ``BACKEND``."""
    try:
        return read_header(
            entry.name, lambda start, stop: backend.get(entry.name, start, stop) or b""
        )
    except KVPlanError as error:
        if error.code == "BACKEND":
            raise
        return error


def spaces_of(backend: Backend) -> tuple[list[ModelEntry], list[str]]:
    """Return the spaces of a store, and what is wrong with files whose headers cannot be read."""
    spaces: dict[str, ModelEntry] = {}
    faults = []
    entries = sorted(backend.entries(), key=lambda entry: entry.name)
    # pins first, which have no header
    for entry in entries:
        space_name, key, part_name = entry.name.split("/")
        space = spaces.setdefault(space_name, ModelEntry(space_name))
        if part_name == PIN:
            space.pinned.add(key)
    files = [entry for entry in entries if is_part(entry)]
    headers = in_batches(partial(header_of, backend), files, backend.at_once)
    for entry, header in zip(files, headers, strict=True):
        # the name of a file says where it belongs, and its header what it has
        space_name, key, part_name = entry.name.split("/")
        space = spaces[space_name]
        if isinstance(header, KVPlanError):
            faults.append(f"{header}")
            continue
        try:
            # equal names have equal descriptions, so one of them is read
            if part_name not in space.parts:
                part = header.part
                space.parts[part_name] = PartEntry(space_name, part)
                space.model = part.worker.model
                space.tokens_per_page = part.tokens_per_page or space.tokens_per_page
        except KVPlanError as error:
            faults.append(f"{error}")
            continue
        stored = space.parts[part_name]
        stored.num_files += 1
        stored.num_bytes += entry.num_bytes
        stored.longest = max(stored.longest, header.stop)
        space.pages.add(key)
        space.num_bytes += entry.num_bytes
    return list(spaces.values()), faults


@click.command("ls")
@location_argument
@json_option
def ls_command(location: str, as_json: bool) -> int:
    """List the models of a store, and the parts of their pages.

    Exit status: 0 listed, 1 some files cannot be read, 2 refused.
    """
    spaces, faults = spaces_of(opened(location))
    if as_json:
        echo_json({"spaces": [space.to_json() for space in spaces], "faults": faults})
    else:
        print_lines([f"{location}: {count(len(spaces), 'model')}"])
        for space in spaces:
            print_lines(space.lines())
        print_lines(f"  {fault}" for fault in faults)
    return 1 if faults else 0


@attrs.frozen
class FileCheck:
    """A file, and what is wrong with it, if anything is."""

    entry: FileEntry
    fault: str = ""
    is_gone: bool = False


def check_of(backend: Backend, entry: FileEntry) -> FileCheck:
    """Read a file and check its digests. Raises ``BACKEND``."""
    try:
        read_file(backend, entry.name)
    except KVPlanError as error:
        # an evictor may have deleted the file since it was listed
        is_gone = backend.get(entry.name, 0, 1) is None
        return FileCheck(entry, f"{error}", is_gone)
    return FileCheck(entry)


@click.command("verify")
@location_argument
@click.option("--delete", is_flag=True, help="Delete damaged files.")
@json_option
def verify_files_command(location: str, delete: bool, as_json: bool) -> int:
    """Read all pages of a store and check their digests.

    Exit status: 0 all are whole, 1 some are damaged, 2 refused.
    """
    backend = opened(location)
    num_files = 0
    num_bytes = 0
    faults = []
    # all bytes are read, which takes minutes for a large store
    with progress_bar(as_json) as bar:
        bar.add_task("verify", total=None)
        files = filter(is_part, backend.entries())
        # as many files are in memory as are read at once
        for check in in_batches(partial(check_of, backend), files, backend.at_once):
            if check.is_gone:
                continue
            num_files += 1
            num_bytes += check.entry.num_bytes
            if check.fault:
                faults.append(check.fault)
            if check.fault and delete:
                backend.delete(check.entry.name)
    if as_json:
        echo_json({"files": num_files, "bytes": num_bytes, "faults": sorted(faults)})
    else:
        verb = "deleted" if delete else "damaged"
        whole = f"{count(num_files - len(faults), 'file')} of {num_files} whole"
        print_lines([f"{location}: {whole}, {len(faults)} {verb}, {size(num_bytes)}"])
        print_lines(f"  {fault}" for fault in sorted(faults))
    return 1 if faults else 0


@attrs.frozen
class PageCost:
    """What a page costs a group of a reader: files to read, and pieces to copy."""

    group: str
    num_files: int
    file_bytes: int
    num_bytes: int
    num_descriptors: int

    def __str__(self) -> str:
        pieces = f"{count(self.num_descriptors, 'piece')} of {size(self.num_bytes)}"
        files = f"{count(self.num_files, 'file')} of {size(self.file_bytes)}"
        return f"group {self.group!r} loads a page from {files}, in {pieces}"


def costs_of(worker: Worker, space: ModelEntry) -> tuple[list[PageCost], list[str]]:
    """Return what a worker loads of a space, and why it cannot load the rest."""
    # each reason once, in order of the parts
    refusals = {entry.part.misfit(worker): None for entry in space.parts.values()}
    parts = [entry.part for entry in space.parts.values() if not entry.part.misfit(worker)]
    reasons = [reason for reason in refusals if reason]
    costs = []
    for group in worker.groups:
        own = of_group(worker, group)
        is_state = group.tokens_per_block is None
        candidates = [part for part in parts if (part.tokens_per_page is None) is is_state]
        if not own.views:
            continue
        try:
            workers, _, _ = (
                place(candidates, "store", 1 << 12, 1 << 40) if candidates else ([], 0, 0)
            )
            plan = plan_reads(own, workers)
        except KVPlanError as error:
            reasons.append(f"group {group.name!r}: {error}")
            continue
        # files from which nothing is needed are not read
        pairs = zip(candidates, plan.pairs, strict=True)
        used = [part for part, pair in pairs if pair.group_pairs]
        cost = plan.cost(space.tokens_per_page)
        file_bytes = sum(part.num_bytes for part in used)
        costs.append(
            PageCost(group.name, len(used), file_bytes, cost.num_bytes, cost.num_descriptors)
        )
    return costs, reasons


@click.command("explain")
@location_argument
@click.argument("offer")
@json_option
def explain_pages_command(location: str, offer: str, as_json: bool) -> int:
    """Say what a worker can load of a store, and at what cost.

    OFFER is a file with the message that kvplan.encode makes of the worker.

    Exit status: 0 it can load some model, 1 it can load none, 2 refused.
    """
    spaces, _ = spaces_of(opened(location))
    worker = read_offer(offer)
    # every model of the store is tried, also ones of other names
    documents = []
    is_any = False
    for space in spaces:
        costs, reasons = costs_of(worker, space)
        # one model that can be loaded is enough
        is_any |= bool(costs)
        documents.append({"space": space.name, "costs": costs, "reasons": reasons})
        if not as_json:
            print_lines([f"{worker.label} from {space.name}, {space.model}"])
            print_lines(f"  {cost}" for cost in costs)
            print_lines([f"  not: {few(reasons, '; ')}"] if reasons else ())
    if as_json:
        echo_json({"worker": worker.label, "spaces": documents})
    return 0 if is_any else 1


@click.command("gc")
@location_argument
@click.option("--max-gib", type=click.FloatRange(min=0), help="Bytes of the whole store.")
@click.option("--max-model-gib", type=click.FloatRange(min=0), help="Bytes of each model.")
@click.option("--max-days", type=click.FloatRange(min=0), help="Days since the last use.")
@json_option
def gc_command(
    location: str,
    max_gib: float | None,
    max_model_gib: float | None,
    max_days: float | None,
    as_json: bool,
) -> int:
    """Delete the pages that exceed limits, and what killed writers have left.

    Pages that were used longest ago go first. Pinned pages stay.

    \b
    kvplan store gc /kv --max-gib 500 --max-days 7
    """
    # limits that are not given are none
    limits = Limits(_scaled(max_gib, GIB), _scaled(max_model_gib, GIB), _scaled(max_days, DAY_S))
    evicted = evict(opened(location), limits, time.time())
    if as_json:
        echo_json(attrs.asdict(evicted))
    else:
        pages = f"{count(evicted.num_pages, 'page')} of {size(evicted.num_bytes)}"
        unfinished = count(evicted.num_unfinished, "unfinished file")
        left = size(evicted.left_bytes)
        print_lines([f"{location}: deleted {pages}, and {unfinished}; {left} left"])
    return 0


def _scaled(number: float | None, unit: int) -> int | None:
    return None if number is None else round(number * unit)


@click.group(
    "store", commands=[ls_command, verify_files_command, explain_pages_command, gc_command]
)
def store_command() -> None:
    """List, check and clean a store of caches (kvplan.store).

    \b
    kvplan store ls STORE
    """
