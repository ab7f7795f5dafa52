"""Handoffs: prefill describes a computed request to decode, in the request's own parameters.

A digest of the prompt binds a handoff to the tokens whose cache it hands over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from kvplan._checks import (
    check_fields,
    having,
    instance,
    integer,
    members,
    name,
    wrong_type,
)
from kvplan._text import brief_repr, few, shown
from kvplan.describe.blocks import POSITION_END, Blocks
from kvplan.errors import KVPlanError
from kvplan.protocol.keys import HINT, SharedKey
from kvplan.protocol.system import PORT_END

MAX_TABLE_IDS: Final = 1 << 22
"""Blocks of one group that a handoff may list: a request of 64 million tokens in blocks of 16."""

MAX_PREFIXES: Final = 16
"""Prefixes that a handoff may digest: a reader digests its own prompt as often."""

GAP: Final = -1
"""The id at a gap of a table, in JSON."""

DIGEST_BYTES: Final = 16
"""The length of a prompt's digest."""


@attrs.frozen
class Source:
    """An engine that others read from.

    ``start`` is a name of this start of the engine. Its :class:`Listener` is at ``host`` and
    ``port``.
    """

    engine_id: str
    start: str
    host: str
    port: int

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        check_fields(self, "a source", name, "engine_id", "start", "host")
        check_fields(self, "a source", integer, "port", high=PORT_END)

    @property
    def address(self) -> str:
        """The address of the listener."""
        return f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.engine_id} at {self.address}"


@attrs.frozen
class Handoff:
    """A request that an engine has computed for others, which may read it while ``lease`` is valid.

    The first ``num_tokens`` positions are computed, of tokens whose
    :func:`~kvplan.protocol.prompt_digest` is ``prompt``. ``prefixes`` has the digests of fewer of
    them, by their number: those of a prompt before the answer to it. ``blocks`` has a table for
    each group, of the blocks that the engine still has. ``kept`` has the position from which on a
    group's blocks are all there and whole. ``weights_version`` says which weights have computed it,
    if not those that the engine started with. :meth:`params` are plain values, for JSON;
    :meth:`of_params` reads them. They are signed with the key that all engines share, so a client
    cannot send a reader to another address, lease or block.

    >>> source = Source("prefill", "a1", "10.0.0.1", 5600)
    >>> blocks = {"attn": Blocks([12, 5, 31]), "swa": Blocks([0, 7], null=0)}
    >>> handoff = Handoff(source, "request 1", 40, "8f2c", blocks, kept={"swa": 16})
    >>> key = SharedKey.of(b"a secret of all engines")
    >>> handoff.params(key)["remote_block_ids"]
    {'attn': [0, [12, 5, 31]], 'swa': [1, [7]]}
    >>> Handoff.of_params(handoff.params(key), key).blocks["swa"]
    Blocks([7], first=1)
    """

    source: Source
    lease: str
    num_tokens: int
    prompt: str
    blocks: Mapping[str, Blocks]
    kept: Mapping[str, int] = attrs.field(factory=dict)
    prefixes: Mapping[int, str] = attrs.field(factory=dict)
    weights_version: str = ""

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        instance(Source, self.source, "source of a handoff")
        check_fields(self, "a handoff", name, "lease", "prompt")
        check_fields(self, "a handoff", integer, "num_tokens", high=POSITION_END)
        tables = instance(Mapping, self.blocks, "blocks of a handoff")
        members(Blocks, tables.values(), "blocks of a handoff")
        for group, position in instance(Mapping, self.kept, "kept of a handoff").items():
            integer(position, f"kept of group {shown(group)}", high=POSITION_END)
            if group not in tables:
                expected = f"a group of {few([repr(name) for name in tables], ', ') or 'none'}"
                got = shown(group)
                raise KVPlanError("NAME", "read kept of a handoff", expected=expected, got=got)
        for num_tokens, digest in instance(Mapping, self.prefixes, "prefixes").items():
            integer(num_tokens, "length of a prefix", high=self.num_tokens + 1)
            name(digest, "digest of a prefix")
        if instance(str, self.weights_version, "weights_version of a handoff"):
            check_fields(self, "a handoff", name, "weights_version")

    def params(self, key: SharedKey) -> dict[str, Any]:
        """Return the handoff as plain values, signed with a key."""
        tables = {group: _table_values(blocks) for group, blocks in self.blocks.items()}
        params = {
            "remote_engine_id": self.source.engine_id,
            "remote_start": self.source.start,
            "remote_host": self.source.host,
            "remote_port": self.source.port,
            "remote_lease": self.lease,
            "remote_num_tokens": self.num_tokens,
            "remote_prompt": self.prompt,
            "remote_block_ids": tables,
            "remote_kept": dict(self.kept),
            "remote_prefixes": [[*prefix] for prefix in self.prefixes.items()],
            "remote_weights_version": self.weights_version,
        }
        signature = instance(SharedKey, key, "key of a handoff").sign(PURPOSE, _signed_text(params))
        return {**params, SIGNATURE: signature}

    @classmethod
    def of_params(cls, params: Mapping[str, Any], key: SharedKey) -> Handoff:
        """Read the handoff in a request's parameters, which may have others too.

        Raises ``MESSAGE`` if they are not signed with the key; ``KEY`` if one lacks; ``TYPE``,
        ``NAME``, ``RANGE`` or ``BLOCKS`` for a bad value.

        >>> key = SharedKey.of(b"a secret of all engines")
        >>> source = Source("prefill", "a1", "10.0.0.1", 5600)
        >>> params = Handoff(source, "request 1", 40, "8f2c", {}).params(key)
        >>> Handoff.of_params({**params, "remote_host": "10.6.6.6"}, key)
        Traceback (most recent call last):
        kvplan.errors.KVPlanError: MESSAGE: cannot read a handoff:
        expected the signature of an engine with the same key, got a different one, or none
        (the handoff was changed, or keys differ: set one key on all engines: the setting key or
        key_file, or KVPLAN_KEY)
        """
        given = instance(Mapping, params, "parameters of a request").keys()
        missing = sorted({*PARAMS} - given)
        if missing:
            raise KVPlanError(
                "KEY",
                "read a handoff",
                expected=f"a key {missing[0]!r}",
                got="none",
                hint="a proxy passes kv_transfer_params of prefill's answer on as they are, "
                "and prefill has kvplan's connector too",
                keys=tuple(missing),
            )
        _check_signature(params, instance(SharedKey, key, "key of a handoff"))
        tables = instance(Mapping, params["remote_block_ids"], "remote_block_ids")
        kept = instance(Mapping, params["remote_kept"], "remote_kept")
        return cls(
            source=Source(
                engine_id=params["remote_engine_id"],
                start=params["remote_start"],
                host=params["remote_host"],
                port=params["remote_port"],
            ),
            lease=params["remote_lease"],
            num_tokens=params["remote_num_tokens"],
            prompt=params["remote_prompt"],
            blocks={name(group, "a group"): _read_table(table) for group, table in tables.items()},
            kept={name(group, "a group"): position for group, position in kept.items()},
            prefixes=_read_prefixes(params["remote_prefixes"]),
            weights_version=params["remote_weights_version"],
        )

    def count_shared(self, digest_of: Callable[[int], str]) -> int:
        """Return the number of computed positions that another prompt begins with.

        ``digest_of`` digests the first tokens of that prompt. Raises ``PROMPT`` if it begins with
        none of the digested ones.

        >>> source = Source("decode", "a1", "10.0.0.1", 5600)
        >>> answered = Handoff(source, "request 1", 40, "8f2c", {}, prefixes={30: "51aa"})
        >>> same_answer, another_answer = {40: "8f2c", 30: "51aa"}, {40: "d104", 30: "51aa"}
        >>> [answered.count_shared(each.__getitem__) for each in (same_answer, another_answer)]
        [40, 30]
        """
        having("__call__", digest_of, "digest_of", "a function")
        digest = digest_of(self.num_tokens)
        if digest == self.prompt:
            return self.num_tokens
        for num_tokens in sorted(self.prefixes, reverse=True):
            if digest_of(num_tokens) == self.prefixes[num_tokens]:
                return num_tokens
        raise self._refusal(digest)

    def check_prompt(self, digest: str) -> None:
        """Refuse a request whose prompt is not the one that was computed. Raises ``PROMPT``."""
        if name(digest, "digest of a prompt") != self.prompt:
            raise self._refusal(digest)

    def check_weights(self, version: str = "") -> None:
        """Refuse a request of other weights than an engine has now. Raises ``MODEL``.

        ``version`` is that of the engine, empty for the weights that it started with: those are
        compared in the handshake.

        >>> source = Source("prefill", "a1", "10.0.0.1", 5600)
        >>> handoff = Handoff(source, "request 1", 40, "8f2c", {}, weights_version="step 7")
        >>> handoff.check_weights("step 7")
        >>> handoff.check_weights("step 8")
        Traceback (most recent call last):
        kvplan.errors.KVPlanError: MODEL: cannot read 'request 1' from prefill at 10.0.0.1:5600:
        expected weights_version 'step 8', got 'step 7'
        (give the weights of both engines the same version, after each change)
        """
        if version != self.weights_version:
            raise KVPlanError(
                "MODEL",
                f"read {self.lease!r} from {self.source}",
                expected=f"weights_version {_version(version)}",
                got=_version(self.weights_version),
                hint="give the weights of both engines the same version, after each change",
                local=version,
                remote=self.weights_version,
            )

    def first_kept(self, group: str, attended: int) -> int:
        """Return the position from which on a group of a reader finds all positions and blocks.

        If the source names its groups differently, it is the last position up to ``attended`` from
        which on any group has them. The reader's group attends to positions from ``attended`` on,
        which the source has: its own group there begins no later.

        >>> source = Source("prefill", "a1", "10.0.0.1", 5600)
        >>> blocks = {"attn": Blocks([12, 5, 31]), "swa": Blocks([0, 7], null=0)}
        >>> handoff = Handoff(source, "request 1", 40, "8f2c", blocks, kept={"swa": 16})
        >>> handoff.first_kept("swa", 20), handoff.first_kept("group1", 20)
        (16, 16)
        """
        name(group, "a group")
        integer(attended, "attended", high=POSITION_END)
        if group in self.blocks:
            return self.kept.get(group, 0)
        positions = [position for position in self.kept.values() if position <= attended]
        return max(positions, default=0)

    def _refusal(self, digest: str) -> KVPlanError:
        return KVPlanError(
            "PROMPT",
            f"read {self.lease!r} from {self.source}",
            expected=f"the prompt that was computed, of digest {self.prompt}",
            got=f"one of digest {digest}",
            hint="a handoff serves one prompt, with one adapter, salt and set of images",
            lease=self.lease,
            source=self.source,
        )


def _version(version: str) -> str:
    return shown(version) if version else "that of the start"


SIGNATURE: Final = "remote_signature"
"""The parameter that has the signature of all others."""

PURPOSE: Final = "handoff"

PARAMS: Final = (
    "remote_engine_id",
    "remote_start",
    "remote_host",
    "remote_port",
    "remote_lease",
    "remote_num_tokens",
    "remote_prompt",
    "remote_block_ids",
    "remote_kept",
    "remote_prefixes",
    "remote_weights_version",
)
"""The parameters that are signed."""


def _signed_text(params: Mapping[str, Any]) -> bytes:
    """Return a handoff's parameters as one text. Raises TypeError for what JSON cannot say."""
    # one text for equal values, in whatever order they came
    values = {label: params[label] for label in PARAMS}
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _check_signature(params: Mapping[str, Any], key: SharedKey) -> None:
    """Refuse parameters that were not signed with a key, before they are read."""
    try:
        is_signed = key.has_signed(f"{params.get(SIGNATURE)}", PURPOSE, _signed_text(params))
    except (TypeError, ValueError, RecursionError):
        is_signed = False
    if not is_signed:
        raise KVPlanError(
            "MESSAGE",
            "read a handoff",
            expected="the signature of an engine with the same key",
            got="a different one, or none",
            hint=f"the handoff was changed, or keys differ: {HINT}",
        )


def _table_values(blocks: Blocks) -> list[Any]:
    """Return a table as plain values: the first ordinal, and an id for each one from there on."""
    # one element for each ordinal, also of gaps
    ids = np.full(blocks.stop - blocks.first, GAP)
    ids[blocks.ordinals - blocks.first] = blocks.ids
    return [blocks.first, ids.tolist()]


def _read_table(values: Any) -> Blocks:
    """Read what :func:`_table_values` returns. Raises ``TYPE``, ``RANGE`` or ``BLOCKS``."""
    if not isinstance(values, list | tuple) or len(values) != 2:
        raise wrong_type("a block table", "[first, ids]", values)
    first, ids = values
    ids = members(int, ids, "block ids")
    if len(ids) > MAX_TABLE_IDS:
        expected = f"at most {MAX_TABLE_IDS} ids"
        raise KVPlanError("RANGE", "read a block table", expected=expected, got=f"{len(ids)}")
    # most tables have no gap
    if GAP not in ids:
        return Blocks(ids, first)
    first = integer(first, "first of a block table", high=POSITION_END)
    block_ids = [block for block in ids if block != GAP]
    ordinals = [ordinal for ordinal, block in enumerate(ids, start=first) if block != GAP]
    return Blocks(block_ids, ordinals=ordinals)


def _read_prefixes(values: Any) -> dict[int, str]:
    """Read pairs of a number of tokens and their digest. Raises ``TYPE`` or ``RANGE``."""
    prefixes = dict[int, str]()
    pairs = members(list, values, "remote_prefixes")
    if len(pairs) > MAX_PREFIXES:
        expected = f"at most {MAX_PREFIXES} prefixes"
        raise KVPlanError("RANGE", "read a handoff", expected=expected, got=f"{len(pairs)}")
    for pair in pairs:
        if len(pair) != 2:
            raise wrong_type("a prefix", "[number of tokens, digest]", pair)
        prefixes[integer(pair[0], "length of a prefix", high=POSITION_END)] = pair[1]
    return prefixes


def prompt_digest(tokens: Sequence[int], facts: Iterable[str] = ()) -> str:
    """Digest the token ids of positions 0, 1, ..., and the facts that decide their cache too.

    ``facts`` are strings that both engines derive alike: an adapter, a salt, hashes of images or
    embeddings with their positions. Their order counts. Raises ``TYPE``.

    >>> prompt_digest([3, 17, 5])
    'c3fda288cda031ab788deda19738ab02'
    >>> prompt_digest([3, 17, 5]) == prompt_digest([3, 17, 5], ["adapter sql"])
    False
    """
    try:
        ids = np.asarray(tokens)
    except Exception:
        # of a ragged list, or of a tensor that is no array, in its framework's own words
        raise wrong_type("token ids", "a flat sequence of integers", tokens) from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise wrong_type("token ids", "a flat sequence of integers", tokens)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(ids.size.to_bytes(8, "little"))
    digest.update(ids.astype("<i8").tobytes())
    for fact in members(str, facts, "facts of a prompt"):
        text = fact.encode()
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()
