"""Tables on a terminal that is too narrow for them."""

from rich.console import Console
from rich.table import Table

from multimac.view.narrow import fitting


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
