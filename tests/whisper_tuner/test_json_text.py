"""Whatever is wrong with a JSON text is a ValueError."""

import pytest

from whisper_tuner.text import parse_json


@pytest.mark.parametrize("text", ["", "{", "[" * 3000, '{"a":' * 3000, "9" * 5000, b"\xff", "\ud800"])
def test_a_text_that_cannot_be_read(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_a_text_that_can():
    assert parse_json('{"a": [1, null]}') == {"a": [1, None]}
