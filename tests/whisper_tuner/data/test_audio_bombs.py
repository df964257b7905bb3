"""Files of some kilobytes that decode to gigabytes, and programs that never end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from whisper_tuner.data import audio
from whisper_tuner.data.audio import CLIP_S, blocks, duration, load_audio
from whisper_tuner.data.audio_check import examine
from whisper_tuner.errors import DataError
from whisper_tuner.problems import Kind

HOUR = 3600
MORE_MB = 120  # than a clip of 30 s takes: some blocks of 16 MB
READ = """
import resource, sys
from pathlib import Path
from multimac.report.template import encoded
from whisper_tuner.data.audio import CLIP_S, blocks, duration, load_audio
from whisper_tuner.data.audio_check import AudioIndex
from whisper_tuner.data.checks.facts import measure
from whisper_tuner.data.cutting import Recording, _decoded
path = Path(sys.argv[1])
for read in (duration, AudioIndex().__getitem__, measure, encoded):
    read(path)
load_audio(path, longest_s=CLIP_S)
recording = Recording(path)
recording.span(recording.seconds / 2, 30.0)
recording.close()
_decoded(path.read_bytes(), path.suffix, 31.0)
assert sum(map(len, blocks(path))) >= 30 * 16_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000)
"""
STREAM = """
import resource, sys
from whisper_tuner.data.audio import blocks
assert sum(map(len, blocks(sys.argv[1]))) >= 30 * 16_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000)
"""


def silence(path: Path, seconds: int, rate: int = 16_000, channels: int = 1, **more) -> Path:
    with soundfile.SoundFile(path, "w", rate, channels, **more) as file:
        for _ in range(seconds):
            file.write(np.zeros((rate, channels), np.int16))
    return path


def peak_mb(program: str, *files: Path) -> int:
    return int(subprocess.run([sys.executable, "-c", program, *files], check=True, capture_output=True).stdout)


@pytest.fixture(scope="module")
def usual_mb(tmp_path_factory) -> int:
    return peak_mb(READ, silence(tmp_path_factory.mktemp("clip") / "clip.flac", 30))


def encoded(source: Path, suffix: str, ffmpeg: str) -> Path:
    path = source.with_suffix(suffix)
    codec = "alac" if suffix == ".m4a" else "copy"
    subprocess.run([ffmpeg, "-v", "error", "-i", source, "-c:a", codec, path], check=True)
    return path


@pytest.mark.parametrize(
    "suffix", [".flac", *(pytest.param(suffix, marks=pytest.mark.slow) for suffix in (".m4a", ".mkv"))]
)
def test_an_hour_in_some_kilobytes_takes_no_more_memory_than_a_clip(tmp_path, usual_mb, suffix, need_program):
    path = silence(tmp_path / "hour.flac", HOUR)
    if suffix != ".flac":
        path = encoded(path, suffix, need_program("ffmpeg"))
    assert path.stat().st_size < 2_000_000
    assert peak_mb(READ, path) < usual_mb + MORE_MB
    assert len(load_audio(path, longest_s=CLIP_S)) == CLIP_S * 16_000
    assert duration(path) == pytest.approx(HOUR, abs=1)


HLS = "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:2,\nfile://{}\n#EXT-X-ENDLIST\n"
DASH = """<MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" mediaPresentationDuration="PT2S">
<Period duration="PT2S"><AdaptationSet mimeType="audio/mp4" contentType="audio">
<Representation id="1" bandwidth="64000" codecs="alac">
<BaseURL>file://{}</BaseURL></Representation></AdaptationSet></Period></MPD>"""


@pytest.mark.parametrize("list_of_files", [HLS, DASH], ids=["HLS", "DASH"])
def test_a_playlist_with_the_name_of_a_recording_has_no_other_file_read(tmp_path, list_of_files, need_program):
    private = encoded(silence(tmp_path / "private.flac", 2), ".m4a", need_program("ffmpeg"))
    assert duration(private) == pytest.approx(2, abs=0.1)
    (tmp_path / "clip.m4a").write_text(list_of_files.format(private))
    for read in (load_audio, duration):
        with pytest.raises(DataError, match=r"clip\.m4a cannot be decoded"):
            read(tmp_path / "clip.m4a")


@pytest.mark.slow
def test_many_channels_at_a_high_rate(tmp_path, usual_mb):
    """30 s in 80 kB: 630 MB as float32."""
    path = silence(tmp_path / "high.flac", 30, rate=655_350, channels=8)
    assert peak_mb(STREAM, path) < usual_mb + MORE_MB
    with pytest.raises(DataError, match=r"high\.flac has too many samples.*8 channels at 655350 Hz"):
        audio.read_channels(path)


@pytest.mark.parametrize("rate", [1, 4_000_000_000])
def test_a_rate_that_no_audio_has_is_refused_before_anything_is_decoded(tmp_path, audio_file, rate):
    path = audio_file(tmp_path / "a.wav", seconds=1)
    data = path.read_bytes()
    path.write_bytes(data[:24] + rate.to_bytes(4, "little") + data[28:])
    _, kind, what = examine(path)
    assert kind == Kind.UNREADABLE and "a.wav" in what
    for read in (load_audio, duration):
        with pytest.raises(DataError, match=r"a\.wav"):
            read(path)


def test_blocks_are_the_whole(tmp_path, audio_file, monkeypatch):
    path = audio_file(tmp_path / "a.mp3", seconds=9, rate=44_100, channels=2)
    whole = load_audio(path)
    monkeypatch.setattr(audio, "BLOCK", 100_000)
    pieces = [*blocks(path)]
    assert len(pieces) > 7 and np.array_equal(np.concatenate(pieces), whole)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Stands in for ffmpeg."""

    def made(script: str) -> Path:
        path = tmp_path / "ffmpeg"
        path.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nfor wav; do :; done\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        sound = tmp_path / "a.m4a"
        sound.write_bytes(b"\0\0\0\x20ftypM4A ")
        return sound

    return made


def test_a_program_that_never_ends_is_ended(tmp_path, program, monkeypatch):
    monkeypatch.setattr(audio, "START_S", 1)
    monkeypatch.setattr(audio, "SLOWEST", 100)
    with pytest.raises(DataError, match=r"a\.m4a cannot be decoded: ffmpeg was at it for 1 s, and was ended"):
        load_audio(program("exec sleep 600"), longest_s=CLIP_S)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_program_that_writes_without_end_is_ended(tmp_path, program, monkeypatch):
    monkeypatch.setattr(audio, "MOST_CHANNELS", 1)
    with pytest.raises(DataError, match=r"a\.m4a cannot be decoded: it becomes a WAV of more than 2 MB"):
        load_audio(program('exec cat /dev/zero > "$wav"'), longest_s=CLIP_S)
