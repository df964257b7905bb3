import struct
import subprocess

import numpy as np
import pytest

from whisper_tuner.data import audio
from whisper_tuner.data.audio import duration, find_program, load_audio, opened
from whisper_tuner.data.audio_check import examine
from whisper_tuner.data.checks.facts import measure
from whisper_tuner.errors import DataError, MissingProgram
from whisper_tuner.problems import Kind


def loudest_frequency(waveform: np.ndarray, rate: int = 16_000) -> float:
    return float(np.argmax(np.abs(np.fft.rfft(waveform))) * rate / len(waveform))


def check_is_the_tone(path, seconds=1.0):
    waveform = load_audio(path)
    assert waveform.dtype == np.float32 and waveform.ndim == 1
    assert len(waveform) == pytest.approx(16_000 * seconds, abs=1700)  # MP3 and AAC add up to 0.1 s of padding
    assert loudest_frequency(waveform) == pytest.approx(440, abs=3)
    assert np.abs(waveform).max() == pytest.approx(0.36, abs=0.1)
    assert duration(path) == pytest.approx(seconds, abs=0.11)


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2), (8_000, 1)])
def test_reads_usual_formats_at_any_rate_and_channel_count(tmp_path, audio_file, suffix, rate, channels):
    check_is_the_tone(audio_file(tmp_path / f"a.{suffix}", seconds=1, rate=rate, channels=channels))


def test_reads_24_bit_six_channels(tmp_path, audio_file):
    check_is_the_tone(audio_file(tmp_path / "a.wav", seconds=1, rate=48_000, channels=6, subtype="PCM_24"))


def test_reads_m4a_through_ffmpeg(tmp_path, audio_file, need_program):
    wav = audio_file(tmp_path / "a.wav", seconds=1, rate=44_100, channels=2)
    m4a = tmp_path / "with space.m4a"
    subprocess.run([need_program("ffmpeg"), "-v", "error", "-i", wav, "-c:a", "aac", m4a], check=True)
    check_is_the_tone(m4a)


def test_a_sample_at_16_khz_is_not_touched(tmp_path, audio_file):
    import soundfile

    path = audio_file(tmp_path / "a.wav", seconds=0.1, subtype="FLOAT")
    np.testing.assert_array_equal(load_audio(path), soundfile.read(path, dtype="float32")[0])


def test_missing_file_is_named(tmp_path):
    for read in (load_audio, duration):
        with pytest.raises(DataError, match=r"no such audio file: .*gone\.wav"):
            read(tmp_path / "gone.wav")


def test_damaged_file_is_named(tmp_path, need_program):
    need_program("ffmpeg")
    path = tmp_path / "damaged.wav"
    path.write_bytes(b"this is no audio" * 50)
    with pytest.raises(DataError, match=r"damaged\.wav cannot be decoded"):
        load_audio(path)


def test_file_without_samples_is_refused(tmp_path, audio_file):
    with pytest.raises(DataError, match="holds no audio"):
        load_audio(audio_file(tmp_path / "empty.wav", seconds=0))


def wav_of(stated: int, samples: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    form = struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16)
    head = b"RIFF" + struct.pack("<I", min(stated + 36, 0xFFFFFFFF)) + b"WAVEfmt " + struct.pack("<I", 16) + form
    return head + before + b"data" + struct.pack("<I", stated) + samples + after


LIST = b"LIST" + struct.pack("<I", 4) + b"INFO"
TONE = (8000 * np.sin(np.arange(16_000) / 20)).astype("<i2").tobytes()


@pytest.mark.parametrize(
    "stated",
    [0, 2_000_000_000, 2_000_000_000 - 36, 0x7FFFF000, 0x7FFFFF00, 0x7FFFFFFF - 36, 0xFFFFFFFF - 36, 0xFFFFFFFF],
)
def test_a_wav_that_was_written_into_a_pipe_is_read_to_its_end(tmp_path, stated):
    path = tmp_path / "a.wav"
    path.write_bytes(wav_of(stated, TONE, before=LIST))
    assert duration(path) == 1 and examine(path) == (1, "", "")
    np.testing.assert_array_equal(load_audio(path), np.frombuffer(TONE, "<i2") / np.float32(32768))
    assert measure(path).seconds == 1 and not measure(path).missing_s
    with opened(path) as file:
        file.seek(8000)
        assert len(file.read()) == 8000


@pytest.mark.parametrize("after", [b"", LIST], ids=["nothing", "another chunk"])
def test_a_wav_without_samples_is_none_that_was_written_into_a_pipe(tmp_path, after):
    path = tmp_path / "a.wav"
    path.write_bytes(wav_of(0, b"", after=after))
    assert examine(path)[1] == Kind.EMPTY_AUDIO


@pytest.mark.parametrize("stated", [32_000, 2_100_000_000])
def test_a_wav_that_was_cut_is_not_either(tmp_path, stated):
    path = tmp_path / "a.wav"
    path.write_bytes(wav_of(stated, TONE[:-2]))
    assert examine(path)[1] == Kind.TRUNCATED


def test_a_wav_of_unknown_length_beyond_4_gib_is_not_cut_there(tmp_path, need_program):
    need_program("ffprobe")
    path = tmp_path / "a.wav"
    path.write_bytes(wav_of(0, b""))
    with path.open("r+b") as file:
        file.truncate(44 + (5 << 30))  # takes no room on the disk
    assert duration(path) == pytest.approx((5 << 30) / 32_000)


def test_a_format_that_needs_ffmpeg_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(audio, "HOMEBREW_FOLDERS", ())
    path = tmp_path / "a.m4a"
    path.write_bytes(b"\0\0\0\x20ftypM4A ")
    with pytest.raises(MissingProgram, match=r"(?s)a\.m4a needs ffmpeg.*brew install ffmpeg"):
        load_audio(path)


def test_programs_are_found_in_homebrews_folders_too(tmp_path, monkeypatch):
    program = tmp_path / "brew" / "afconvert"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(audio, "HOMEBREW_FOLDERS", (str(program.parent),))
    assert find_program("afconvert") == str(program)
    assert find_program("ffmpeg") is None


def test_afconvert_serves_where_there_is_no_ffmpeg(tmp_path, monkeypatch, audio_file):
    """The command line is macOS's; this stand-in checks that its output is what gets read."""
    wav = audio_file(tmp_path / "source.wav", seconds=1)
    program = tmp_path / "afconvert"
    program.write_text(f'#!/bin/sh\n[ "$1 $2 $3 $4" = "-f WAVE -d LEF32@16000" ] && /bin/cp {wav} "$6"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(audio, "HOMEBREW_FOLDERS", ())
    path = tmp_path / "a.m4a"
    path.write_bytes(b"\0\0\0\x20ftypM4A ")
    check_is_the_tone(path)
