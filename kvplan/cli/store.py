"""Commands about a store: what is in it, whether it is whole, what to evict."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import click

from kvplan._text import count, few, fold, intervals, size
from kvplan.cli.console import echo_json, print_lines, progress
from kvplan.cli.options import json_option
from kvplan.errors import KVPlanError
from kvplan.protocol.page_shards import DIVIDED, NAME_DIGITS, StoredShard
from kvplan.protocol.pages import PageHeader
from kvplan_nixl.serving.store import Backend, FileEntry, Limits, evict, open_backend
from kvplan_nixl.serving.store.backends import is_pin
from kvplan_nixl.serving.store.page_files import check_file, read_header
from kvplan_nixl.serving.store.parallel import in_batches

GIB: Final = 1 << 30
DAY_S: Final = 86400

location_argument = click.argument("location", metavar="STORE", type=click.Path())


@attrs.define
class ShardEntry:
    """A shard of a store, with the number of its files and the end of the longest prefix."""

    shard: StoredShard
    num_files: int = 0
    num_bytes: int = 0
    longest: int = 0

    def to_json(self) -> dict[str, Any]:
        views = self.shard.worker.views
        # axes that the shard has whole are left out
        axes = {axis.name: axis for axis in views[0].axes if axis.extent < axis.size}
        return {
            "shard": self.shard.name,
            "tensors": list(self.shard.worker.tensors),
            "dtypes": list(dict.fromkeys(view.dtype for view in views)),
            "holds": [
                f"{axis.name} {intervals(range(axis.start, axis.stop))} of {axis.size}"
                for axis in axes.values()
            ],
            "files": self.num_files,
            "file_bytes": self.shard.num_bytes,
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
    shards: dict[str, ShardEntry] = attrs.field(factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "space": self.name,
            "model": self.model,
            "tokens_per_page": self.tokens_per_page,
            "pages": len(self.pages),
            "pinned": len(self.pinned),
            "bytes": self.num_bytes,
            "longest_prefix": max((shard.longest for shard in self.shards.values()), default=0),
            "shards": [shard.to_json() for shard in self.shards.values()],
        }


def space_lines(space: dict[str, Any]) -> Iterator[str]:
    """Yield what ``ls`` prints of a model's pages."""
    of_tokens = f" of {space['tokens_per_page']} tokens" if space["tokens_per_page"] else ""
    pinned = f", {space['pinned']} pinned" if space["pinned"] else ""
    yield f"  {printable(space['model'])}, space {space['space']}"
    pages = f"{count(space['pages'], 'page')}{of_tokens}{pinned}, {size(space['bytes'])}"
    yield f"    {pages}, prefixes of up to {space['longest_prefix']} tokens"
    for shard in space["shards"]:
        words = ", ".join(
            [f"{fold(shard['tensors'])} {'/'.join(shard['dtypes'])}", *shard["holds"]]
        )
        yield f"    {shard['shard']}: {words}"
        yield f"      {count(shard['files'], 'file')} of {size(shard['file_bytes'])}"


def opened(location: str) -> Backend:
    """Return the store in a folder or at a URL. Raises ``NAME`` if there is no such folder."""
    # a command makes no folder, and a bucket is none of ours to make
    if "://" not in location and not Path(location).is_dir():
        got = f"{location!r}"
        raise KVPlanError("NAME", "open a store", expected="the folder of a store", got=got)
    return open_backend(location)


def is_shard(entry: FileEntry) -> bool:
    """Return whether a file has a shard of a page: pins and marks of uses have no bytes."""
    return len(entry.name.rpartition("/")[2]) == NAME_DIGITS


def header_of(backend: Backend, entry: FileEntry) -> PageHeader | KVPlanError:
    """Return the header of a file, or why it cannot be read."""
    try:
        return read_header(backend, entry.name)
    except KVPlanError as error:
        return error


def printable(text: str) -> str:
    """Return a text of a file as one line of a terminal: who has written it is unknown."""
    return text if text.isprintable() else ascii(text)


def spaces_of(backend: Backend) -> tuple[list[ModelEntry], list[str]]:
    """Return the spaces of a store, and what is wrong with files whose headers cannot be read."""
    spaces: dict[str, ModelEntry] = {}
    faults: list[str] = []
    entries = sorted(backend.entries(faults), key=lambda entry: entry.name)
    # pins first, which have no header
    for entry in entries:
        space_name, key, shard_name = entry.name.split("/")
        space = spaces.setdefault(space_name, ModelEntry(space_name))
        if is_pin(shard_name):
            space.pinned.add(key)
    files = [entry for entry in entries if is_shard(entry)]
    headers = in_batches(partial(header_of, backend), files, backend.at_once)
    for entry, header in zip(files, headers, strict=True):
        # the name of a file says where it belongs, and its header what it has
        space_name, key, shard_name = entry.name.split("/")
        space = spaces[space_name]
        if isinstance(header, KVPlanError):
            faults.append(f"{header}")
            continue
        try:
            # equal names have equal descriptions, so one of them is read
            if shard_name not in space.shards:
                shard = header.shard
                space.shards[shard_name] = ShardEntry(shard)
                space.model = shard.worker.model
                space.tokens_per_page = shard.tokens_per_page or space.tokens_per_page
        except KVPlanError as error:
            faults.append(f"{error}")
            continue
        stored = space.shards[shard_name]
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
    """List the models of a store, and the shards of their pages.

    Exit status: 0 listed, 1 some files cannot be read, 2 refused.
    """
    entries, faults = spaces_of(opened(location))
    spaces = [entry.to_json() for entry in entries]
    if as_json:
        echo_json({"spaces": spaces, "faults": faults})
    else:
        print_lines([f"{location}: {count(len(spaces), 'model')}"])
        print_lines(line for space in spaces for line in space_lines(space))
        print_lines(f"  {printable(fault)}" for fault in faults)
    return 1 if faults else 0


def check_of(backend: Backend, entry: FileEntry) -> PageHeader | str | None:
    """Read a file and check its digests: its header, or its fault, or ``None`` if it is gone."""
    try:
        return check_file(backend, entry.name)
    except KVPlanError as error:
        # an evictor may have deleted the file since it was listed
        with contextlib.suppress(KVPlanError):
            if backend.get(entry.name, 0) is None:
                return None
        return f"{error}"


@attrs.define
class PageChecks:
    """What whole files say about the pages that they make up together."""

    stops: dict[str, dict[str, int]] = attrs.field(factory=dict)
    shards: dict[str, StoredShard] = attrs.field(factory=dict)

    def add(self, name: str, header: PageHeader) -> None:
        """Take a file that is whole."""
        page, _, shard_name = name.rpartition("/")
        self.stops.setdefault(page, {})[shard_name] = header.stop
        if shard_name not in self.shards:
            self.shards[shard_name] = header.shard

    def misplaced(self) -> dict[str, str]:
        """Return the files that do not end where most of their page's files do, and the reason."""
        faults = {}
        for page, stops in self.stops.items():
            (stop, number), *others = Counter(stops.values()).most_common(2) or [(0, 0)]
            if not others:
                continue
            # of as many on both sides, any may be wrong
            is_tie = others[0][1] == number
            for shard_name, own_stop in stops.items():
                if is_tie or own_stop != stop:
                    name = f"{page}/{shard_name}"
                    ends = few(sorted(map(str, {*stops.values()})), ", ")
                    faults[name] = f"cannot read page {name}: its files end at {ends}"
        return faults

    def incomplete(self) -> list[str]:
        """Return the pages that have only some of the heads, or channels, of a tensor."""
        lacks: dict[frozenset[str], str] = {}
        faults = []
        for page, stops in self.stops.items():
            names = frozenset(stops)
            # pages of one writer have the same shards
            if names not in lacks:
                lacks[names] = lacking([self.shards[name] for name in sorted(names)])
            if lacks[names]:
                faults.append(f"page {page} lacks {lacks[names]}")
        return faults


def lacking(shards: Iterable[StoredShard]) -> str:
    """Return what shards lack of the tensors that they have, or an empty text."""
    held: dict[tuple[str, str, int, int], set[int]] = {}
    for shard in shards:
        worker, context = shard.worker, shard.group.context
        for view, index in zip(worker.views, worker.geometry_of, strict=True):
            of_ranks = ("context rank", view.name, context.size, 0)
            held.setdefault(of_ranks, set()).add(context.rank)
            geometry = worker.geometries[index]
            for axis in geometry.sizes.keys() & {*DIVIDED}:
                of_axis = held.setdefault(
                    (axis, view.name, geometry.sizes[axis], context.rank), set()
                )
                for start, stop in geometry.segments[axis].covered:
                    of_axis.update(range(start, stop))
    missing: dict[str, None] = {}
    for (label, name, total, _), present in held.items():
        absent = [f"{number}" for number in range(total) if number not in present]
        if absent:
            missing[f"{label} {few(absent, ', ')} of {total} of {name}"] = None
    return few([*missing], ", ")


@click.command("verify")
@location_argument
@click.option("--delete", is_flag=True, help="Delete damaged files.")
@json_option
def verify_files_command(location: str, delete: bool, as_json: bool) -> int:
    """Read all pages of a store and check their digests.

    A page is incomplete if it has only some heads of a tensor, as while ranks save it.

    Exit status: 0 all are whole, 1 some are damaged or incomplete, 2 refused.
    """
    backend = opened(location)
    num_files = 0
    num_bytes = 0
    unlisted: list[str] = []
    damaged: dict[str, str] = {}
    pages = PageChecks()
    files = filter(is_shard, backend.entries(unlisted))
    # all bytes are read, a chunk of each file at once, which takes minutes for a large store
    checks = in_batches(lambda entry: (entry, check_of(backend, entry)), files, backend.at_once)
    for entry, check in progress(checks, "verify"):
        num_files += check is not None
        num_bytes += entry.num_bytes if check is not None else 0
        if isinstance(check, PageHeader):
            pages.add(entry.name, check)
        elif check is not None:
            damaged[entry.name] = check
    damaged |= pages.misplaced()
    undeleted = deleted_of(backend, damaged) if delete else []
    # pages with damaged files are named once
    pages_damaged = {name.rpartition("/")[0] for name in damaged}
    incomplete = [fault for fault in pages.incomplete() if fault.split()[1] not in pages_damaged]
    faults = [*sorted(damaged.values()), *unlisted, *undeleted]
    if as_json:
        document = {"files": num_files, "bytes": num_bytes, "faults": faults}
        echo_json({**document, "incomplete": incomplete})
    else:
        verb = "deleted" if delete else "damaged"
        whole = f"{count(num_files - len(damaged), 'file')} of {num_files} whole"
        number = len(damaged) - len(undeleted)
        pages_lacking = f", {count(len(incomplete), 'page')} incomplete" if incomplete else ""
        print_lines([f"{location}: {whole}, {number} {verb}{pages_lacking}, {size(num_bytes)}"])
        print_lines(f"  {printable(fault)}" for fault in [*faults, *incomplete])
    return 1 if faults or incomplete else 0


def deleted_of(backend: Backend, names: Iterable[str]) -> list[str]:
    """Delete files, as many as can be, and return why others could not."""
    faults = []
    for name in names:
        try:
            backend.delete(name)
        except KVPlanError as error:
            faults.append(f"{error}")
    return faults


@click.command("gc")
@location_argument
@click.option("--max-gib", type=click.FloatRange(min=0), help="Bytes of the whole store.")
@click.option("--max-model-gib", type=click.FloatRange(min=0), help="Bytes of each model.")
@click.option("--max-days", type=click.FloatRange(min=0), help="Days since the last use.")
@click.option("--max-pinned-gib", type=click.FloatRange(min=0), help="Bytes of pinned pages.")
@json_option
def gc_command(
    location: str,
    max_gib: float | None,
    max_model_gib: float | None,
    max_days: float | None,
    max_pinned_gib: float | None,
    as_json: bool,
) -> int:
    """Delete the pages that exceed limits, and what killed writers have left.

    Pages that were used longest ago go first. Pinned pages stay, those that were pinned first if
    they have a limit.

    Exit status: 0 done, 1 something could not be listed or deleted, 2 refused.

    \b
    kvplan store gc /kv --max-gib 500 --max-days 7
    """
    # limits that are not given are none
    limits = Limits(
        _scaled(max_gib, GIB),
        _scaled(max_model_gib, GIB),
        _scaled(max_days, DAY_S),
        _scaled(max_pinned_gib, GIB),
    )
    evicted = evict(opened(location), limits, time.time())
    if as_json:
        echo_json(attrs.asdict(evicted))
    else:
        pages = f"{count(evicted.num_pages, 'page')} of {size(evicted.num_bytes)}"
        unfinished = count(evicted.num_unfinished, "unfinished file")
        left = size(evicted.left_bytes)
        print_lines([f"{location}: deleted {pages}, and {unfinished}; {left} left"])
        print_lines(f"  {printable(fault)}" for fault in evicted.faults)
    return 1 if evicted.faults else 0


def _scaled(number: float | None, unit: int) -> int | None:
    return None if number is None else round(number * unit)


@click.group("store", commands=[ls_command, verify_files_command, gc_command])
def store_command() -> None:
    """List, check and clean a store of caches.

    \b
    kvplan store ls STORE
    """
