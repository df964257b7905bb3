"""Tables on a terminal that is too narrow for them."""

import itertools

import pytest
from rich.console import Console
from rich.table import Table

from distributed.checkup.findings import Finding, Severity
from distributed.checkup.links import Pair
from distributed.checkup.look import HostFacts
from distributed.checkup.preflight import Report
from distributed.ssh.host import Host
from multimac.view.preflight_view import show
from multimac.view.terminal import fitting


def rendered(width: int, **options) -> list[str]:
    table = Table(title="hosts")
    for column in ("host", "state", "what"):
        table.add_column(column)
    table.add_row("mac-mini.local", "", "a remark that needs some room")
    table.add_row("mac-studio.local", "lost", "")
    console = Console(width=width, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(fitting(console, table, **options))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_table_that_fits_stays_one():
    assert any("┃" in line for line in rendered(80))


def test_a_row_becomes_a_heading_with_its_cells_and_none_that_are_empty():
    found = rendered(30)
    assert found == [
        "hosts",
        "mac-mini.local",
        "  what a remark that needs",
        "  some room",
        "mac-studio.local",
        "  state lost",
    ]
    assert max(map(len, found)) <= 30


def test_from_its_usual_width_on_a_table_folds():
    assert any("┃" in line for line in rendered(45, below=45))


@pytest.mark.parametrize("width", [60, 80])
def test_a_preflight_of_eight_hosts_names_all_of_them_and_their_links(width):
    names = [f"mac-mini-{number}-in-the-attic.local" for number in range(1, 9)]
    hosts = [HostFacts(host=Host(address=name), reached=True, clock_ahead_s=0.0, device="mps") for name in names]
    pairs = [
        Pair(source=a, target=b, mbit=940.0, latency_s=3e-4, failed=None) for a, b in itertools.permutations(names, 2)
    ]
    problems = [Finding(hosts=(names[7],), what="its disk is full", severity=Severity.WARNING, check="disk")]
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as capture:
        show(console, Report(hosts=hosts, pairs=pairs, problems=problems))
    said = capture.get()
    assert "…" not in said and max(map(len, said.splitlines())) <= width
    assert said.count("940 / 0.3") >= 40 and "-> 8" in said
    assert width > 60 or all(f"{number} {name}\n" in said for number, name in enumerate(names, 1))
