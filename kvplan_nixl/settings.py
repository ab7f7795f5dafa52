"""Settings: what operators give a connector by name. Each is checked, and none is ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import attrs

from kvplan import Budget, KVPlanError
from kvplan.protocol import Claims, HandshakeResult, Handshakes, Leases
from kvplan.protocol.page_keys import PAGE_TOKENS
from kvplan.protocol.system import PORT_END
from kvplan.staging import Rates
from kvplan.support import instance, integer, meant, members, name, seconds, shown
from kvplan_nixl.backends import UCX, Backends, checked_backends
from kvplan_nixl.serving import Access, tls_contexts
from kvplan_nixl.serving.host_key import key_in_file
from kvplan_nixl.serving.store import Limits
from kvplan_nixl.serving.store.client import BUFFER_BYTES
from kvplan_nixl.serving.store.stalls import STALL_S

SEARCH_S: Final = 2.0

EARLY_TOKENS: Final = 1024
"""Positions that prefill has computed when decode may read them, before the rest is there."""

STAGING_BYTES: Final = 64 << 20
"""Bytes of the staging region of a worker that reads."""

Check = Callable[[Any, str], Any]
"""A function that takes a value and what messages call it, and returns the checked value."""


SECRETS: Final = MappingProxyType({"key": "KVPLAN_KEY", "key_file": "KVPLAN_KEY_FILE"})
"""Settings that may be variables of the environment too, which no list of processes shows."""


def secrets_of_environment(
    settings: Iterable[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the key or its file as an environment has it, unless ``settings`` names one of them.

    >>> secrets_of_environment(["port"], {"KVPLAN_KEY": "a secret of all engines"})
    {'key': 'a secret of all engines'}
    >>> secrets_of_environment(["key_file"], {"KVPLAN_KEY": "a secret of all engines"})
    {}
    """
    if not SECRETS.keys().isdisjoint(settings):
        return {}
    return {
        label: environment[variable]
        for label, variable in SECRETS.items()
        if variable in environment
    }


def setting(check: Check, default: Any) -> Any:
    """Return a field of a class of settings, whose values ``check`` reads."""
    return attrs.field(default=default, repr=check is not _secret, metadata={"check": check})


def switch(value: Any, subject: str) -> bool:
    """Return ``value``, which must be true or false."""
    is_on: bool = instance(bool, value, subject)
    return is_on


def at_least_one(value: Any, subject: str) -> int:
    """Return ``value``, which must be an integer of 1 or more."""
    return integer(value, subject, low=1)


def texts(value: Any, subject: str) -> tuple[str, ...]:
    """Return ``value``, which must be a list of texts."""
    return members(str, value, subject)


def host_name(value: Any, subject: str) -> str:
    """Return ``value``, which must be a name or an address; IPv6 may have the brackets of a URL."""
    return name(value, subject).removeprefix("[").removesuffix("]")


def _port(value: Any, subject: str) -> int:
    return integer(value, subject, high=PORT_END)


def _secret(value: Any, subject: str) -> bytes:
    if not isinstance(value, str) or not value:
        raise KVPlanError(
            "TYPE", f"read {subject}", expected="a non-empty string", got="what is not shown"
        )
    return value.encode()


def backends_of(value: Any, subject: str) -> Backends:
    """Return the options of backends: those that kvplan sets, unless ``value`` has others."""
    if not isinstance(value, Mapping):
        value = {backend: {} for backend in members(str, value, subject)}
    return {
        backend: {**UCX.get(backend, {}), **options}
        for backend, options in checked_backends(value).items()
    }


def read_rates(path: str) -> Rates:
    """Return the rates in a file of ``python -m kvplan_nixl calibrate --save``.

    Raises ``MESSAGE`` for a file that cannot be read or is not JSON, ``KEY`` for another object,
    and what :class:`~kvplan.staging.Rates` does.
    """
    action = f"read rates from {path}"
    try:
        rates = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        got = f"{error.strerror}"
        raise KVPlanError("MESSAGE", action, expected="a file", got=got) from None
    except ValueError as error:
        raise KVPlanError("MESSAGE", action, expected="JSON", got=str(error)) from None
    names = [field.name for field in attrs.fields(Rates)]
    if not isinstance(rates, dict) or sorted(rates) != sorted(names):
        raise KVPlanError("KEY", action, expected=f"the keys {', '.join(names)}", got=shown(rates))
    return Rates(**rates)


TEXTS: Final = (name, host_name, _secret)
"""The checks of settings that are text. Others are JSON where they are given as text."""


@attrs.frozen(kw_only=True)
class NamedSettings:
    """Settings that operators give by name: fields made by :func:`setting`."""

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Self:
        """Return the settings in ``values``, which were given at ``where``, as messages call it.

        Raises ``SETTING`` for a name that is unknown, ``TYPE`` and ``RANGE`` for wrong values.

        >>> Settings.read({"port": 5600}, "settings").port
        5600
        >>> Settings.read({"prot": 5600}, "settings")
        Traceback (most recent call last):
        kvplan.errors.KVPlanError: SETTING: cannot read settings: expected known names,
        got 'prot' (did you mean 'port'?)
        """
        fields = attrs.fields_dict(cls)
        checked = {}
        for label, value in values.items():
            if label not in fields:
                hint = meant(f"{label}", fields) or f"they are {', '.join(fields)}"
                expected = "known names"
                raise KVPlanError(
                    "SETTING", f"read {where}", expected=expected, got=shown(label), hint=hint
                )
            checked[label] = fields[label].metadata["check"](value, f"{label} in {where}")
        return cls(**checked)

    @classmethod
    def read_texts(cls, texts: Mapping[str, str], where: str) -> Self:
        """Return the settings in ``texts``, as :meth:`read` does; numbers and lists are JSON.

        >>> settings = Settings.read_texts({"key": "7", "lease_s": "7"}, "settings")
        >>> settings.key, settings.lease_s
        (b'7', 7.0)
        """
        fields = attrs.fields_dict(cls)
        values: dict[str, Any] = dict(texts)
        for label in texts.keys() & fields.keys():
            if fields[label].metadata["check"] not in TEXTS:
                try:
                    values[label] = json.loads(texts[label])
                except (ValueError, RecursionError):
                    # the check says what was expected
                    continue
        return cls.read(values, where)


@attrs.frozen(kw_only=True)
class ModelSettings(NamedSettings):
    """The settings that say which model an engine runs, empty where the engine says it.

    ``model`` and ``weights`` replace the engine's name for its model and the fingerprint of its
    weights; ``kv_heads``, unless 0, the number of KV heads of a layer that has one on each rank.
    ``ignored_facts`` are those of the engine's identity (:mod:`kvplan_nixl.identity`) that the
    operator knows to be harmless; ``*`` stands for any text.
    """

    model: str = setting(name, "")
    weights: str = setting(name, "")
    ignored_facts: tuple[str, ...] = setting(texts, ())
    kv_heads: int = setting(integer, 0)


@attrs.frozen(kw_only=True)
class StoreSettings(ModelSettings):
    """The settings of connectors to a store.

    ``folder``, or the bucket of that URL, has the pages, of ``tokens_per_page``. Each worker copies
    through ``buffer_bytes`` of host memory to load, and as much to save. A request waits at most
    ``search_timeout_s`` for a search, and ``stall_s`` for a load that makes no step. The engine
    keeps the store below ``max_bytes``, each model below ``max_model_bytes``, and evicts what was
    not used for ``max_age_s``; 0 is no limit. Requests may pin pages of ``max_pinned_bytes``, and
    none where that is 0.
    """

    folder: str = setting(name, "")
    tokens_per_page: int = setting(integer, PAGE_TOKENS)
    buffer_bytes: int = setting(integer, BUFFER_BYTES)
    search_timeout_s: float = setting(seconds, SEARCH_S)
    stall_s: float = setting(seconds, STALL_S)
    max_bytes: int = setting(integer, 0)
    max_model_bytes: int = setting(integer, 0)
    max_age_s: float = setting(seconds, 0.0)
    max_pinned_bytes: int = setting(integer, 0)

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Self:
        """Return the settings in ``values``, which have a folder. Raises as others do."""
        settings = super().read(values, where)
        if not settings.folder:
            raise store_refusal("folder", "the folder of a store", "none")
        return settings

    @property
    def limits(self) -> Limits:
        """The limits within which the engine keeps the store."""
        return Limits(
            self.max_bytes or None,
            self.max_model_bytes or None,
            self.max_age_s or None,
            self.max_pinned_bytes or None,
        )


def store_refusal(label: str, expected: str, got: str) -> KVPlanError:
    """Return the error for a wrong setting of a store."""
    return KVPlanError("SETTING", f"set {label} of a store", expected=expected, got=got)


@attrs.frozen(kw_only=True)
class Settings(ModelSettings):
    """The settings that connectors have in common, with their defaults.

    An engine announces ``host`` and listens on ``bind``, or on ``host`` if that is empty, at
    ``port``, or at a free one if that is 0. Prefill publishes a request early, each time that
    ``early_tokens`` more positions are computed. With ``map_memory`` GPUs of one host are read out
    of their mapped memory. ``rates`` names the file of a calibration, by which decode chooses what
    it stages. ``bootstrap_servers`` are those that requests may name besides this machine's and
    ``host``: SGLang's, or listeners. The other settings of the network are those of :meth:`access`.
    """

    host: str = setting(host_name, "")
    bind: str = setting(host_name, "")
    port: int = setting(_port, 0)
    lease_s: float = setting(seconds, Leases.DEFAULT_S)
    max_lease_s: float = setting(seconds, Leases.MAX_S)
    staging_bytes: int = setting(integer, STAGING_BYTES)
    rates: str = setting(name, "")
    map_memory: bool = setting(switch, False)
    handshake_timeout_s: float = setting(seconds, Handshakes().timeout_s)
    budget_bytes: int = setting(integer, Budget.DEFAULT_BYTES)
    max_peers: int = setting(at_least_one, Claims.MAX_SOURCES)
    early_tokens: int = setting(at_least_one, EARLY_TOKENS)
    key: bytes = setting(_secret, b"")
    key_file: str = setting(name, "")
    bootstrap_servers: tuple[str, ...] = setting(texts, ())
    tls_certificate: str = setting(name, "")
    tls_private_key: str = setting(name, "")
    tls_authority: str = setting(name, "")
    backends: Backends = setting(backends_of, UCX)  # noqa: RUF009

    def handshakes(
        self, report: Callable[[HandshakeResult], object] = lambda result: None
    ) -> Handshakes:
        """Return how handshakes with other engines go."""
        return Handshakes(self.handshake_timeout_s, self.budget_bytes, report)

    def measured_rates(self) -> Rates | None:
        """Return what the file ``rates`` has, if one is named, as :func:`read_rates` does."""
        return read_rates(self.rates) if self.rates else None

    def access(self) -> Access:
        """Return the engine's access to the network.

        Its key is ``key``, or what ``key_file`` has, or that of this host's engines. With the files
        of TLS, which are in PEM, connections are encrypted. Raises ``SETTING`` for settings that do
        not go together and for a key that others can read, ``RANGE`` for a weak one.
        """
        if self.key and self.key_file:
            expected = "key or key_file"
            raise KVPlanError("SETTING", "use a key", expected=expected, got="both")
        access = Access(
            key=key_in_file(Path(self.key_file)) if self.key_file else self.key or None,
            servers=(*self.bootstrap_servers, *filter(None, [self.host])),
        )
        # each side shows a certificate, and checks the other's
        files = (self.tls_certificate, self.tls_private_key, self.tls_authority)
        if any(files) and not all(files):
            expected = "tls_certificate, tls_private_key and tls_authority"
            raise KVPlanError("SETTING", "use TLS", expected=expected, got="some of them")
        if all(files):
            access.server_tls, access.client_tls = tls_contexts(*map(Path, files))
        return access
