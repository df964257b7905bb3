"""Audio files of any usual kind -> mono float32 waveforms at the model's sample rate.

libsndfile reads WAV, FLAC, OGG and MP3 itself, many times faster than a child process. What it cannot read (M4A/AAC,
video files) goes through ffmpeg or, on a Mac without ffmpeg, through the system's own `afconvert`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import soundfile
import soxr

from whisper_tuner.data.wav_header import Stated
from whisper_tuner.errors import DataError, MissingProgram

SAMPLE_RATE = 16_000  # Hz, of every Whisper model
UNCOUNTED = 2**63 - 1  # the frames that libsndfile gives for a FLAC that was written into a pipe
LONGEST_WAV = 1 << 32  # bytes: more than its header can state
LOWEST_RATE, HIGHEST_RATE = 1000, 768_000  # Hz; others mean a damaged header, and resampling would go on for hours
LOUDEST = 1e6  # full scale is 1; a float WAV may hold more, but infinity and NaN are damage
CLIP_S = 31.0  # what Whisper hears at once, and a second more, for codecs add some
LONG_S = 4 * 3600.0  # of what is held in memory at once, such as a long clip to be cut: 1 GB
LONGEST_S = 12 * 3600.0  # of what becomes a WAV on the disk first
BLOCK = 1 << 22  # values of all channels that are decoded at once: 16 MB
AT_ONCE = 1 << 14  # samples that are resampled at once
MOST_VALUES = 16 * BLOCK  # of a clip whose channels are looked at one by one
MOST_CHANNELS = 64  # of what another program decodes
# What soundfile raises for a file that it cannot read: ValueError for an unknown length or a name that is not UTF-8,
# TypeError for a name that ends in .raw, MemoryError for a header that states an absurd length.
REFUSED = (soundfile.LibsndfileError, ValueError, TypeError, MemoryError)
# Its lines are errors with a place in its source, notes and warnings.
OF_MP3 = re.compile(rb"\[.*src/libmpg123/|Note: |Warning: |Hint: ")
PROBE_S, START_S, SLOWEST = 60, 60, 4  # time for ffprobe; for another decoder, and times as fast as the sound at least
# What ffmpeg may take a file for: playlists (HLS, DASH, concat) have it read other files, whatever their own name is.
CONTAINERS = "aac,ac3,aiff,amr,amrnb,amrwb,ape,asf,au,avi,caf,dts,eac3,flac,flv,gsm,loas,m4v,matroska,mov,mp3,mpc,mpc8,"
CONTAINERS += "mpeg,mpegts,mxf,nistsphere,ogg,rm,shn,tak,tta,voc,w64,wav,wv"
INPUT = ("-v", "error", "-format_whitelist", CONTAINERS)
# A non-interactive SSH session on a Mac starts with a bare PATH that lacks both of Homebrew's folders.
HOMEBREW_FOLDERS = ("/opt/homebrew/bin", "/usr/local/bin")


def load_audio(path: str | Path, sample_rate: int = SAMPLE_RATE, longest_s: float = LONG_S) -> np.ndarray:
    """Mono float32 waveform [n] in [-1, 1] at `sample_rate` Hz; of a longer file, the first `longest_s` seconds.

    Raises DataError (missing, damaged or empty file) or MissingProgram (a format that needs ffmpeg), naming the file.
    """
    waveform = np.concatenate([*blocks(path, sample_rate, longest_s)])
    if len(waveform) == 0:
        raise DataError(f"{path} holds no audio", remedy="Remove it from the manifest.")
    return waveform


def blocks(path: str | Path, sample_rate: int = SAMPLE_RATE, longest_s: float = math.inf) -> Iterator[np.ndarray]:
    """Yield what `load_audio` returns, piece by piece: hours take no more memory than minutes. Raises as it does."""
    return mono(_decoded(Path(path), sample_rate, longest_s), sample_rate)


def read_channels(path: str | Path) -> tuple[np.ndarray, int]:
    """(float32 [n, channels], samples a second) of a clip as it is; SAMPLE_RATE where another program decodes it.

    Of a longer file the first CLIP_S seconds. Raises as `load_audio` does.
    """
    path, found, values = Path(path), [], 0
    for samples, rate in _decoded(path, SAMPLE_RATE, CLIP_S):
        found.append(samples)
        values += samples.size
        if values > MOST_VALUES:
            what = f"{path} has too many samples to look at: {samples.shape[1]} channels at {rate} Hz"
            raise DataError(what, remedy="Convert it to mono, at 48 kHz or less.")
    return np.concatenate(found), rate


def duration(path: str | Path) -> float:
    """Length in seconds, from the header where the format allows. Raises as `load_audio` does."""
    path = Path(path)
    _require_file(path)
    try:
        with open_sound(path) as file:
            return file.frames / file.samplerate
    except REFUSED as error:
        if seconds := _probed_duration(path):
            return seconds
        with _conversion(path, SAMPLE_RATE, LONGEST_S, str(error)) as file:
            return file.frames / file.samplerate


def open_sound(path: Path) -> soundfile.SoundFile:
    """A file whose header libsndfile understands, of which nothing is decoded yet.

    Raises one of REFUSED for what another program may read, DataError for a header that is damaged.
    """
    file = soundfile.SoundFile(path)
    is_wav = file.format in ("WAV", "WAVEX")
    if file.frames == UNCOUNTED or (is_wav and path.stat().st_size > LONGEST_WAV):
        file.close()
        raise ValueError("its header does not say how long it is")
    if is_wav and not file.frames:
        file.close()
        file = soundfile.SoundFile(Stated(path))
    if LOWEST_RATE <= file.samplerate <= HIGHEST_RATE:
        return file
    file.close()
    raise DataError(f"{path} states {file.samplerate} samples a second", remedy="Its header is damaged: copy it again.")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[soundfile.SoundFile]:
    """A recording of any format, to read parts of. Raises DataError, MissingProgram.

    Silence stands where a video's sound begins later than its picture, so that times of subtitles fit.
    """
    try:
        file = open_sound(path)
    except (*REFUSED, OSError):
        with _conversion(path, SAMPLE_RATE, LONGEST_S, "libsndfile cannot read it", by_clock=True) as file:
            yield file
        return
    with file:
        yield file


def parts(file: soundfile.SoundFile, seconds: float, path: Path) -> Iterator[tuple[np.ndarray, int]]:
    """(float32 [n, channels], samples a second) of block after block, from where the file stands. Raises DataError."""
    left, most = round(min(seconds * file.samplerate, file.frames)), max(1, BLOCK // file.channels)
    while left > 0 and len(samples := file.read(min(left, most), dtype="float32", always_2d=True)):
        if not np.abs(samples).max() < LOUDEST:
            raise DataError(f"{path} holds values that cannot be audio", remedy="Convert it again, or remove it.")
        left -= len(samples)
        yield samples, file.samplerate


def mono(found: Iterable[tuple[np.ndarray, int]], sample_rate: int = SAMPLE_RATE) -> Iterator[np.ndarray]:
    """Float32 [n] at `sample_rate` Hz of what `parts` gives."""
    resampler = None
    for samples, rate in found:
        waveform = samples.mean(axis=1)
        if rate == sample_rate:
            yield waveform
            continue
        # What librosa calls soxr_hq, without librosa's two seconds of import. Of more samples at once it is slower.
        resampler = resampler or soxr.ResampleStream(rate, sample_rate, 1, dtype="float32", quality="HQ")
        for at in range(0, len(waveform), AT_ONCE):
            yield resampler.resample_chunk(waveform[at : at + AT_ONCE])
    if resampler:
        yield resampler.resample_chunk(np.empty(0, np.float32), last=True)


@contextlib.contextmanager
def quiet_mp3() -> Iterator[None]:
    """Keep off the screen what the MP3 decoder of libsndfile writes to stderr itself about each damaged frame.

    What else is written there meanwhile by other than Python comes at the end. For a whole command of one process:
    processes that are started meanwhile would write there, too.
    """
    with tempfile.TemporaryFile() as caught, os.fdopen(os.dup(2), "w", 1, sys.stderr.encoding, "replace") as kept:
        python_s = sys.stderr
        python_s.flush()
        os.dup2(caught.fileno(), 2)
        sys.stderr = kept
        try:
            yield
        finally:
            sys.stderr = python_s
            os.dup2(kept.fileno(), 2)
            caught.seek(0)
            for line in caught.read().splitlines(keepends=True):
                if line.strip() and not OF_MP3.match(line):
                    os.write(2, line)


def find_program(name: str) -> str | None:
    """Full path of a program on PATH or in Homebrew's folders, or None."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *HOMEBREW_FOLDERS]))


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"no such audio file: {path}", remedy="Check its path.")


def _decoded(path: Path, sample_rate: int, longest_s: float) -> Iterator[tuple[np.ndarray, int]]:
    """Yield parts as `parts` does, by another program from where libsndfile gives up; never nothing."""
    _require_file(path)
    done, rate = 0, sample_rate
    try:
        with open_sound(path) as file:
            for samples, rate in parts(file, longest_s, path):
                yield samples, rate
                done += len(samples)
    except REFUSED as error:
        with _conversion(path, rate, min(longest_s, LONGEST_S), str(error)) as file:
            file.seek(min(done, file.frames))
            for samples, _ in parts(file, longest_s - done / rate, path):
                yield samples, rate
                done += len(samples)
    if not done:
        raise DataError(f"{path} holds no audio", remedy="Remove it from the manifest.")


def _probed_duration(path: Path) -> float:
    """Seconds by ffprobe, which reads only the header; 0 where it is not installed or does not know."""
    if not (ffprobe := find_program("ffprobe")):
        return 0.0
    ask = [*INPUT, "-select_streams", "a:0", "-show_entries", "stream=duration", "-of", "csv=p=0"]
    none = subprocess.DEVNULL
    try:
        command = [ffprobe, *ask, f"file:{path}"]
        said = subprocess.run(command, stdin=none, stdout=subprocess.PIPE, stderr=none, timeout=PROBE_S, check=True)
        seconds = float(said.stdout.split()[0])
    except (subprocess.SubprocessError, IndexError, ValueError):
        return 0.0
    return seconds if 0 < seconds < math.inf else 0.0


@contextlib.contextmanager
def _conversion(
    path: Path, sample_rate: int, longest_s: float, reason: str, *, by_clock: bool = False
) -> Iterator[soundfile.SoundFile]:
    """Run an external program on the first `longest_s` of a file that libsndfile refuses.

    Channels stay as they are: ffmpeg's own mix to mono is louder than their mean, and can clip.
    Raises DataError, MissingProgram. by_clock: see `opened`.
    """
    with tempfile.TemporaryDirectory(prefix="multimac-audio-") as folder:
        wav = Path(folder) / "audio.wav"
        command = _conversion_command(path, wav, sample_rate, longest_s, reason, by_clock)
        room = min(4 * MOST_CHANNELS * sample_rate * longest_s, shutil.disk_usage(folder).free / 2)
        if (wrong := _failure(command, wav, room, START_S + longest_s / SLOWEST)) is not None:
            said = wrong.removeprefix(f"file:{path}: ") or reason.splitlines()[-1]
            raise DataError(f"{path} cannot be decoded: {said}", remedy="Convert it to WAV or FLAC, or remove it.")
        with soundfile.SoundFile(wav) as file:
            if file.frames >= LONGEST_S * file.samplerate:
                what = f"{path} lasts more than {LONGEST_S / 3600:g} h, which only WAV, FLAC, OGG and MP3 may"
                raise DataError(what, remedy="Convert it to FLAC.")
            yield file


def _failure(command: list[str], wav: Path, room: float, limit_s: float) -> str | None:
    """Run a program that writes `wav`, and say why it has not; None if it has.

    It is killed after limit_s, or once it has written `room` bytes: a few kilobytes may decode to terabytes.
    """
    limited = ["/bin/sh", "-c", 'ulimit -c 0; ulimit -f "$0"; exec "$@"', str(math.ceil(room / 512)), *command]
    with tempfile.TemporaryFile() as told:
        try:  # without an input of its own, it would read the user's keyboard
            none, both = subprocess.DEVNULL, subprocess.STDOUT
            ended = subprocess.run(limited, stdin=none, stdout=told, stderr=both, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"{Path(command[0]).name} was at it for {limit_s:.0f} s, and was ended"
        if ended.returncode == -signal.SIGXFSZ:
            return f"it becomes a WAV of more than {room / 1e6:.0f} MB"
        if ended.returncode == 0 and wav.exists():
            return None
        told.seek(max(0, told.tell() - 4096))
        return "".join(told.read().decode(errors="replace").strip().splitlines()[-1:])


def _conversion_command(path: Path, wav: Path, rate: int, longest_s: float, reason: str, by_clock: bool) -> list[str]:
    if ffmpeg := find_program("ffmpeg"):
        # The file: prefix stops a name such as `http:x.m4a` from being taken for a protocol.
        decode = [ffmpeg, "-nostdin", "-y", *INPUT, "-i", f"file:{path}", "-map", "0:a:0", "-t", f"{longest_s}"]
        padded = ["-af", "aresample=async=1:first_pts=0"] if by_clock else []
        return [*decode, *padded, "-ar", str(rate), "-c:a", "pcm_f32le", "-rf64", "auto", str(wav)]
    if afconvert := find_program("afconvert"):
        return [afconvert, "-f", "WAVE", "-d", f"LEF32@{rate}", str(path), str(wav)]
    raise MissingProgram(
        f"{path} needs ffmpeg: {reason}",
        remedy="Install it with `brew install ffmpeg` or `apt-get install ffmpeg`, or convert the file to WAV or FLAC.",
    )
