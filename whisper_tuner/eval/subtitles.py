"""Segments as text, SRT, WebVTT or JSON."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whisper_tuner.eval.transcription import Recording, Segment

SUFFIXES = {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json"}


def rendered(recording: Recording, form: str, audio: Path) -> str:
    """The contents of a file of this format; see SUFFIXES."""
    match form:
        case "text":
            return "".join(f"{segment.text}\n" for segment in recording.segments)
        case "json":
            return _json(recording, audio)
        case "srt":  # an arrow inside the text would be read as another line of times
            blocks = (f"{_times(s, ',')}\n{s.text.replace('-->', '->')}\n" for s in recording.segments)
            return "\n".join(f"{number}\n{block}" for number, block in enumerate(blocks, start=1))
    blocks = (f"{_times(s, '.')}\n{html.escape(s.text, quote=False)}\n" for s in recording.segments)
    return "\n".join(["WEBVTT\n", *blocks])


def timestamp(seconds: float, mark: str) -> str:
    """01:02:03,004 with `mark` before the milliseconds."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{mark}{thousandths:03}"


def _json(recording: Recording, audio: Path) -> str:
    segments = [{"start": round(s.start, 3), "end": round(s.end, 3), "text": s.text} for s in recording.segments]
    stored = {
        "audio": str(audio),
        "duration_s": round(recording.duration_s, 3),
        "text": recording.text,
        "segments": segments,
    }
    return json.dumps(stored, ensure_ascii=False, indent=2) + "\n"


def _times(segment: Segment, mark: str) -> str:
    return f"{timestamp(segment.start, mark)} --> {timestamp(segment.end, mark)}"
