"""Rules for the whole test suite."""

from __future__ import annotations

import os
import signal

import pytest
from lab.errors import LabLacks
from loopback_sshd import ssh_server

__all__ = ["ssh_server"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # from `make test &`: what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """There can be one lab on a machine: with several processes (-n), one of them has all its tests, and begins.

    Before xdist's own hook, which reads the groups.
    """
    items.sort(key=lambda item: item.get_closest_marker("lab") is None)
    for item in items:
        if item.get_closest_marker("lab"):
            item.add_marker(pytest.mark.xdist_group("lab"))


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preflight's import of torch takes seconds; it is given up at once."""
    monkeypatch.setattr("distributed.checkup.look.TORCH_ALARM_S", 1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """What this machine cannot do for the lab is skipped by name.

    With CI=true a skip is a failure: there all that tests need can be installed, but a CUDA card.
    """
    report = yield
    if call.excinfo and call.excinfo.errisinstance(LabLacks):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {call.excinfo.value}")
    may_be_skipped = hasattr(report, "wasxfail") or item.get_closest_marker("cuda")
    if report.skipped and os.environ.get("CI") == "true" and not may_be_skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr[-1]}"
    return report
