"""Text plots: where marks land, and what the axes say; columns of the table of hosts."""

import pytest

from distributed.run_dir.summary import HostFigures
from multimac.view.run_tables import Curve, plot, waits_for_data


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
