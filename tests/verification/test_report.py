"""Reports: what they say, and when they are true."""

from __future__ import annotations

from kvplan.verification.report import Report, Tail


def test_a_report_without_failures_is_one_true_line() -> None:
    """It has the bytes, descriptors, workers, unused slots and promises."""
    report = Report(1, 2, 1, ("VALUE", "COVER"), tails=(Tail("decode/0", "attn", 5, 8),))
    assert report
    assert report.ok
    assert str(report) == "verified: 1 byte in 2 descriptors to 1 worker, 3 unused slots; VALUE, COVER hold"
    assert report.promises == {"VALUE": True, "COVER": True}


def test_a_report_with_failures_lists_them() -> None:
    """Each failure is a line that begins with its code."""
    report = Report(8, 1, 2, ("VALUE", "OWN"), failures=(("OWN", "at decode/0: far off"),))
    assert not report
    assert str(report) == "not verified: 8 bytes in 1 descriptor to 2 workers\nOWN: at decode/0: far off"
    assert report.promises == {"VALUE": True, "OWN": False}
