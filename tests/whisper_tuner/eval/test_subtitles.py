import json
import re
from pathlib import Path

import pytest

from whisper_tuner.eval.subtitles import rendered, timestamp
from whisper_tuner.eval.transcription import Recording, Segment

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
