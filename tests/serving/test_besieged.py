"""A server with TLS beside clients that begin handshakes and never finish them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import besieged


def test_engines_are_served_beside_handshakes_that_never_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow, dropped and silent handshakes, garbage and strangers hold up no engine, and leave nothing behind."""
    monkeypatch.setattr("kvplan_nixl.serving.client.KEEP_S", 0.5)
    siege = besieged.run(tmp_path, num_engines=8, num_attackers=20, duration_s=1.0)
    assert siege.errors == []
    assert len(siege.seconds) >= 8
    assert siege.num_attacks >= 20
    assert siege.after.files <= siege.before.files
    # each encrypted connection has some hundred kilobytes while it is open, which a heap keeps
    assert siege.after.mib - siege.before.mib < 100
