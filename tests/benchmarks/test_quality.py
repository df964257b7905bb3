"""What `benchmarks/quality.py` counts in a recording, on cases whose figures are known."""

import pytest

from benchmarks.quality import Said, aligned

SAID = [Said(1.0, 3.0, ("one", "two")), Said(10.0, 14.0, ("three", "four", "five", "six"))]


@pytest.mark.parametrize(
    ("heard", "counts", "off"),
    [
        ([(1.0, "One two."), (10.5, "three four"), (12.0, "five six")], [[0, 2], [0, 4]], [0.0, 0.5, 0.0]),
        ([(0.8, "one two three four five six")], [[0, 2], [0, 4]], [0.2]),
        ([(1.0, "one two")], [[0, 2], [4, 4]], [0.0]),  # a passage that was left out
        ([(1.0, "one two two two"), (10.0, "tree four five six")], [[0, 2], [3, 4]], [0.0]),
        ([], [[2, 2], [4, 4]], []),
    ],
)
def test_errors_are_those_of_their_clip_and_times_those_of_first_words(heard, counts, off):
    found, late = aligned(SAID, heard)
    assert found == counts and late == pytest.approx(off)
