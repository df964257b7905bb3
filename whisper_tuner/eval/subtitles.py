"""Segments as text, SRT, WebVTT or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whisper_tuner.eval.transcription import Recording, Segment

SUFFIXES = {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json"}


def rendered(recording: Recording, form: str, audio: Path) -> str:
    """The contents of a file of this format; see SUFFIXES."""
    if form == "text":
        return "".join(f"{segment.text}\n" for segment in recording.segments)
    if form == "json":
        return _json(recording, audio)
    return _srt(recording) if form == "srt" else _vtt(recording)


def timestamp(seconds: float, mark: str) -> str:
    """01:02:03,004 with `mark` before the milliseconds."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{mark}{thousandths:03}"


def _srt(recording: Recording) -> str:
    # An arrow inside the text would be read as another line of times.
    parts = (
        f"{number}\n{_times(segment, ',')}\n{segment.text.replace('-->', '->')}\n"
        for number, segment in enumerate(recording.segments, start=1)
    )
    return "\n".join(parts)


def _vtt(recording: Recording) -> str:
    return "\n".join(["WEBVTT\n", *(f"{_times(s, '.')}\n{_escaped(s.text)}\n" for s in recording.segments)])


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


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
