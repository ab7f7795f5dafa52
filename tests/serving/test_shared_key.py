"""The key of a host: who can make it, read it and replace it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvplan import KVPlanError
from kvplan.protocol.keys import SharedKey
from kvplan_nixl.serving import Access
from kvplan_nixl.serving.host_key import MAX_FILE_BYTES, host_key, key_in_file, key_of

KEY = "a secret of all engines"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the host's key, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvplan"


def test_engines_of_a_host_share_a_key(folder: Path) -> None:
    """The first one makes it, and nobody else can read it."""
    key = Access().key
    assert key.is_of_host
    assert key == Access().key == key_of(None)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert (folder / "key").read_bytes() not in f"{key!r}".encode()


def test_engines_that_start_at_once_make_one_key(folder: Path) -> None:
    """Whichever is first: none reads a key that is not whole, or makes a second one."""
    code = "from kvplan_nixl.serving.host_key import host_key; print(host_key().sign('x'))"
    command = [sys.executable, "-c", code]
    with ExitStack() as stack:
        engines = [stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)) for _ in range(8)]
        assert len({engine.communicate()[0] for engine in engines}) == 1
    assert [path.name for path in folder.iterdir()] == ["key"]


def link(folder: Path) -> None:
    (folder / "key").rename(folder.parent / "elsewhere")
    (folder / "key").symlink_to(folder.parent / "elsewhere")


def linked_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def fifo(folder: Path) -> None:
    (folder / "key").unlink()
    os.mkfifo(folder / "key", 0o600)


CHANGES = {
    "readable": lambda folder: (folder / "key").chmod(0o604),
    "readable by a group": lambda folder: (folder / "key").chmod(0o640),
    "another owner": lambda folder: os.chown(folder / "key", 12345, -1),
    "another owner of the folder": lambda folder: os.chown(folder, 12345, -1),
    "a folder that others write": lambda folder: folder.chmod(0o777),
    "a link": link,
    "a link to the folder": linked_folder,
    "a fifo": fifo,
    "empty": lambda folder: (folder / "key").write_bytes(b""),
    "long": lambda folder: (folder / "key").write_bytes(bytes(MAX_FILE_BYTES + 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_key_that_others_could_know_is_refused(folder: Path, change: str) -> None:
    """A file or folder that somebody else may have put there, or can read, is not used."""
    if "owner" in change and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    host_key()
    CHANGES[change](folder)
    with pytest.raises(KVPlanError) as refusal:
        host_key()
    assert refusal.value.code == ("RANGE" if change == "empty" else "SETTING")
    assert change == "empty" or "set one key on all engines" in f"{refusal.value}"


@pytest.mark.parametrize("variables", [{"XDG_CACHE_HOME": "cache"}, {"XDG_CACHE_HOME": "/proc/none"}])
def test_a_host_without_a_folder_needs_a_key(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without a home says what to set."""
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(KVPlanError, match=r"SETTING: cannot use the key of this host .*set one key on all engines"):
        Access()


def test_a_key_file_is_private(tmp_path: Path) -> None:
    """An operator's file may be a link, as those of Kubernetes are, and readable by a group, but by nobody else."""
    file, link = tmp_path / "key", tmp_path / "link"
    file.write_text(f"{KEY}\n")
    link.symlink_to(file)
    file.chmod(0o440)
    assert key_in_file(link) == SharedKey.of(KEY.encode())
    for mode in (0o444, 0o644, 0o602, 0o666):
        file.chmod(mode)
        with pytest.raises(KVPlanError, match=r"SETTING: cannot read key_file .* mode \d+"):
            key_in_file(link)
    with pytest.raises(KVPlanError, match=r"SETTING: cannot read key_file .*: expected a regular file"):
        key_in_file(Path("/dev/null"))
    for content in ("", "short", " " * 32, f"{KEY}\n{KEY}2\n{KEY}3"):
        file.chmod(0o600)
        file.write_text(content)
        with pytest.raises(KVPlanError, match="RANGE: cannot use a key"):
            key_in_file(file)
