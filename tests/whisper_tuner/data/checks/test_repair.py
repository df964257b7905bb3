"""What is certain is mended, and what may be meant so is left alone."""

import pytest

from whisper_tuner.data.checks.text import decoded, described_sound, probably_decoded, repaired


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("Ã©tÃ©", "été"),
        ("ÐŸÑ€Ð¸Ð²ÐµÑ‚", "Привет"),
        ("â€œhiâ€\x9d", "“hi”"),
        ("GrÃ¼Ã\x9fe", "Grüße"),  # read as Latin-1
        ("â\x80\x9chiâ\x80\x9d", "“hi”"),
        ("Tom &amp; Jerry&#39;s", "Tom & Jerry's"),
        ("one<br>two <i>three</i>", "one two three"),
        ("dish\u00adwasher\u200b", "dishwasher"),
        ("cafe\u0301", "café"),
        ("a\u00a0 b\r\nc", "a b c"),
        ("", ""),
    ],
)
def test_mended(text, mended):
    assert repaired(text) == mended
    assert repaired(mended) == mended


@pytest.mark.parametrize(
    "text",
    [
        "CAFÉ»",
        "IRMÃ»",
        "«Élan»",
        "Ñandú São",
        "a < b and b > c",
        "R&D",
        "x &copy y",
        "می\u200cخواهم",
        "こんにちは",
    ],
)
def test_left_alone(text):
    assert repaired(text) == text


def test_what_can_be_repaired_in_part_only_is_found_and_left_alone():
    text = "ã“ã‚“ã«"  # bytes were lost when it was read
    assert probably_decoded(text) != text
    assert decoded(text) == text


@pytest.mark.parametrize("text", ["[laughter] yes", "(music)", "beep sound", "*sighs*", "♪", "Beep.", "<noise>"])
def test_notes_are_found(text):
    assert described_sound(text)


@pytest.mark.parametrize("text", ["Music", "silence", "Turn the music off.", "(that is, mine)", "breathing", "a * b"])
def test_what_may_be_said_is_not(text):
    assert not described_sound(text)
