"""Text plots: where marks land, and what the axes say; columns of the table of hosts."""

from pathlib import Path

import pytest

from distributed.run_dir.summary import HostFigures, RunSummary
from multimac.view.run_tables import Curve, comparison, facts_table, list_table, plot, waits_for_data
from multimac.view.terminal import Console, fitting


@pytest.mark.parametrize(
    ("figures", "is_long"),
    [
        ({"waiting": 0.1, "clips": 100, "clips_per_s": 10.0}, False),  # of 10 s
        ({"waiting": 0.5, "clips": 100, "clips_per_s": 10.0}, True),
        ({"waiting": None, "clips": 100, "clips_per_s": 10.0}, False),
        ({"waiting": 0.5}, False),
    ],
)
def test_waiting_for_data_is_shown_where_it_was_long(figures, is_long):
    assert waits_for_data(HostFigures(name="a", **figures)) is is_long


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right():
    lines = plot([Curve(mark="*", points=[(step, 10 - step) for step in range(1, 11)])], width=40, height=5)
    rows = lines[:5]
    assert rows[0].split("┤")[0].strip() == "9" and rows[4].split("┤")[0].strip() == "0"
    assert rows[0].index("*") < rows[2].index("*") < rows[4].index("*")
    assert rows[0].split("┤")[1].startswith("*") and len(rows[4]) == 40
    assert lines[-1].split() == ["step", "1", "10"]
    assert max(map(len, lines)) == 40


def test_curves_share_common_cells_and_one_in_front_covers():
    points = [(step, 1.0 + step % 2) for step in range(40)]
    both = "".join(plot([Curve(mark="a", points=points), Curve(mark="b", points=points)], width=60))
    assert "a" in both and "b" in both
    front = [Curve(mark="x", points=points), Curve(mark="V", points=points, in_front=True)]
    assert "x" not in "".join(plot(front, width=60))


def test_nothing_and_a_single_point():
    assert plot([]) == [] and plot([Curve(mark="*", points=[])]) == []
    one = plot([Curve(mark="*", points=[(3, 0.5)])], width=30)
    assert sum(line.count("*") for line in one) == 1 and "0.5" in "".join(one)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_word_is_broken_or_cut(width):
    about = {"path": Path("runs/x"), "created": 1.7e9, "changed": 0.0, "base_model": "openai/whisper-large-v3-turbo"}
    about |= {"hosts": ("mac-studio-in-the-attic.local", "mac-mini.local"), "seconds": 7323.0}
    about |= {"wer_before": 126.2, "wer_after": 114.3, "wer_difference": (-25.1, 3.0), "clips_tested": 1234}
    names = ["20261128-225711-demo", "20261128-225711-french-small-lora", "20261128-225712-a-rather-long-name-of-mine"]
    runs = [RunSummary(id=name, state="interrupted", **about) for name in names]
    console = Console(width=width)
    tables = [list_table([(run, 1.2) for run in runs[:count]], width) for count in (1, 3)]
    tables += [comparison(runs[:count], [1.2] * count) for count in (2, 3)]
    for table in [*tables, facts_table(runs[0], 1.2)]:
        with console.capture() as capture:
            console.print(fitting(console, table, folds=not table.columns[0].header))
        said = capture.get()
        assert "…" not in said and max(map(len, said.splitlines())) <= width
        cells = [str(cell) for column in table.columns for cell in column.cells]
        assert words(" ".join(cells)) <= words(said)


def words(text: str) -> set[str]:
    return {word.strip(",:") for word in text.split()}
