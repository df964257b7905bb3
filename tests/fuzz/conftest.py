"""Memory is limited while a test here runs, and the inputs are counted at the end."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fuzzing
import pytest

SPARE_BYTES = 4 << 30  # of address space: a thread takes a tenth of a gigabyte, a length that was believed far more


@pytest.fixture(scope="module", autouse=True)
def limited_memory() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all inputs of a module."""
    return tmp_path_factory.mktemp("fuzz")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and fuzzing.INPUTS:
        report.user_properties.append(("fuzzed", dict(fuzzing.INPUTS)))
        fuzzing.INPUTS.clear()
    return report


def pytest_terminal_summary(terminalreporter) -> None:
    found: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        for name, inputs in getattr(report, "user_properties", ()):
            if name == "fuzzed":
                found.update(inputs)
    if found and fuzzing.MANY:
        terminalreporter.section("inputs")
        for form, count in [*found.most_common(), ("together", found.total())]:
            terminalreporter.write_line(f"{count:>8,}  {form}")
