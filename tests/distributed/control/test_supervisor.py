"""The lines that a supervisor keeps; with a worker and connections, see launcher/test_worker_link.py."""

import pytest

from distributed.control import supervisor
from distributed.control.supervisor import KeptLines


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr(supervisor, "KEPT", 40)
    kept = KeptLines()
    for number in range(10):
        kept.append(b"line %d\n" % number)  # of 7 bytes
    return kept


def test_lines_are_kept_up_to_a_size(lines):
    assert lines.count == 10
    assert lines.since(10) == [] and lines.since(9) == [b"line 9\n"]
    assert lines.since(5) == [b"line %d\n" % number for number in range(5, 10)]


@pytest.mark.parametrize("number", [4, -1, 11])
def test_lines_that_are_not_kept_are_not_made_up(lines, number):
    with pytest.raises(ValueError, match="wanted"):
        lines.since(number)
