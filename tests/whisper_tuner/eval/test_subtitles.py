import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisper_tuner.eval.subtitles import LINE, cues, rendered, timestamp, width
from whisper_tuner.eval.transcription import Recording, Segment, Word

RECORDING = Recording(
    duration_s=3725.5,
    segments=(Segment(0.0, 1.9996, "Good --> morning, <you> & me."), Segment(3661.25, 3725.5, "Ça va ?")),
)


def test_times():
    assert timestamp(0, ",") == "00:00:00,000"
    assert timestamp(3661.25, ",") == "01:01:01,250"
    assert timestamp(59.9996, ".") == "00:01:00.000"


def test_srt():
    blocks = rendered(RECORDING, "srt", Path("a.wav")).strip().split("\n\n")
    assert blocks[0] == "1\n00:00:00,000 --> 00:00:02,000\nGood -> morning, <you> & me."
    assert blocks[1] == "2\n01:01:01,250 --> 01:02:05,500\nÇa va ?"


def test_vtt():
    text = rendered(RECORDING, "vtt", Path("a.wav"))
    assert text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nGood --&gt; morning, &lt;you&gt; &amp; me.\n\n")
    assert len(re.findall("-->", text)) == 2


def test_json_and_text():
    stored = json.loads(rendered(RECORDING, "json", Path("a.wav")))
    assert stored["segments"][1] == {"start": 3661.25, "end": 3725.5, "text": "Ça va ?"}
    assert stored["text"] == "Good --> morning, <you> & me. Ça va ?" and stored["duration_s"] == 3725.5
    assert rendered(RECORDING, "text", Path("a.wav")) == "Good --> morning, <you> & me.\nÇa va ?\n"


@pytest.mark.parametrize(("form", "expected"), [("srt", ""), ("vtt", "WEBVTT\n"), ("text", "")])
def test_silence_gives_an_empty_file(form, expected):
    assert rendered(Recording(duration_s=1.0, segments=()), form, Path("a.wav")) == expected


SPEECH = (
    "The quick brown fox jumped over the lazy dog, and then it ran away. Nobody saw it again until the spring, when it "
    "came back to the very same garden. It had grown."
)
JAPANESE = "これは長い字幕の例です。日本語には空白がありませんから、どこで切るかは句読点で決めます。" * 2


def segment_cues(text: str, seconds: float = 12.0):
    return list(cues(Recording(duration_s=seconds, segments=(Segment(1.0, 1.0 + seconds, text),))))


def test_long_segments_become_cues_of_two_lines():
    found = segment_cues(SPEECH)
    assert [cue.text.replace("\n", "|") for cue in found] == [
        "The quick brown fox jumped over the|lazy dog, and then it ran away.",
        "Nobody saw it again until the spring,|when it came back to the very same garden.",
        "It had grown.",
    ]
    assert found[0].start == 1.0 and found[-1].end == pytest.approx(13.0)
    assert all(one.end == other.start for one, other in pairwise(found))


def test_cues_begin_and_end_with_their_words():
    times = [float(2 * number) for number in range(len(SPEECH.split()) + 1)]
    words = tuple(Word(a, b, f" {text}") for (a, b), text in zip(pairwise(times), SPEECH.split(), strict=True))
    segment = Segment(0.0, times[-1] + 1, SPEECH, words)
    found = list(cues(Recording(duration_s=99, segments=(segment,))))
    assert [cue.start for cue in found] == [0.0, 2.0 * 14, 2.0 * 30] and found[-1].end == segment.end
    assert found[1].text.startswith(words[14].text.strip()) and found[2].text.startswith(words[30].text.strip())
    stored = json.loads(rendered(Recording(duration_s=99, segments=(segment,)), "json", Path("a.wav")))
    assert stored["segments"][0]["words"][1] == {"start": 2.0, "end": 4.0, "text": "quick"}


def test_wide_letters_are_cut_anywhere_but_before_a_sign():
    found = segment_cues(JAPANESE)
    lines = [line for cue in found for line in cue.text.split("\n")]
    assert len(lines) > 2 and "".join(lines) == JAPANESE and all(width(line) <= LINE for line in lines)
    assert not any(line[0] in "。、" for line in lines)


def test_a_sign_after_a_space_stays_with_its_word():
    text = f"{'Voulez-vous que je vous rappelle demain ? ' * 3}Merci !"
    assert all(line[0] not in "?!" for cue in segment_cues(text) for line in cue.text.split("\n"))


@given(text=st.text(st.sampled_from("ab ,.字é"), min_size=1, max_size=400), seconds=st.floats(0.02, 40))
def test_no_letter_is_lost_and_no_line_too_long(text, seconds):
    text = " ".join(text.split())
    if not text:
        return
    found = segment_cues(text, seconds)
    assert "".join("".join(cue.text.split()) for cue in found) == text.replace(" ", "")
    for cue in found:
        lines = cue.text.split("\n")
        assert len(lines) <= 2 and cue.end >= cue.start
        assert all(width(line) <= LINE or len(line.split()) == 1 for line in lines)
