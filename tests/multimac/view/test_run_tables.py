import pytest

from distributed.run_dir.figures import HostFigures
from multimac.view.run_tables import waits_for_data


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
