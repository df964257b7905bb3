"""The checks of `doctor --deep`: a minute of real work on the accelerator, in processes and on audio.

What ranks exchange is checked here: copies between an accelerator and the flat CPU tensors that are sent, and two ranks
over gloo. Of each audio format one file is written and read back.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distributed.checkup.findings import Check, Finding, Tell, ok, problem, warning
from exogym import flat
from exogym.flat import FlatParameters, digest
from exogym.strategy import AllReduceStrategy
from exogym.trainer import LocalTrainer
from whisper_tuner.config import Profile
from whisper_tuner.data.audio import SAMPLE_RATE, find_program, load_audio
from whisper_tuner.errors import TunerError
from whisper_tuner.text import size

from .gradients import (
    DO_NOT_TRAIN,
    Parity,
    check_decoding,
    compare,
    compare_checkpointed,
    large_shapes,
    profile_shapes,
    small_whisper,
    wide_shapes,
    wide_whisper,
)

REPEATS = 2
SAMPLES, RANKS, STEPS = 24, 2, 5
LIMIT = 1e-3  # of the weights, relative: an accelerator and the CPU round differently
QUIT_VPN = "Quit VPN and firewall programs, and try again. If this persists, please send us the --json report."
FORMATS = {"wav": "PCM_16", "flac": "PCM_16", "ogg": "VORBIS", "mp3": "MPEG_LAYER_III"}
SECONDS, PITCH = 2.0, 440.0  # Hz
ALIKE = 0.98  # cosine similarity; lossy codecs give 0.999 and more
SLACK = 0.15  # seconds that a codec may add


def deep_checks(profile: Profile | None, device: torch.device, tell: Tell) -> list[Check]:
    whisper = functools.cache(small_whisper)

    def gradients(precision: str = "float32") -> Finding:
        shapes, source = profile_shapes(whisper(), profile, device)
        if precision == "bf16" and device.type == "cpu":  # which computes it many times slower than float32
            shapes = [shapes[1]]
        return compare(Parity(whisper(), device, precision), shapes, source, tell)

    def large_batch() -> Finding:
        shapes = large_shapes(whisper(), device)
        return compare(Parity(whisper(), device), shapes, "batch sizes that change", tell, tidy=False)

    def vocabulary() -> Finding:
        wide = wide_whisper()
        return compare(Parity(wide, device), wide_shapes(wide), "51,866 tokens", tell, tidy=False)

    return [
        Check("gradients", gradients),
        Check("large batch", large_batch),
        Check("vocabulary", vocabulary),
        *([Check("bf16", lambda: gradients("bf16"))] if profile and profile.precision == "bf16" else []),
        Check("checkpointing", lambda: compare_checkpointed(device, tell)),
        Check("decoding", lambda: check_decoding(device, tell)),
        Check("staging", lambda: check_staging(device, tell)),
        Check("two ranks", lambda: check_ranks(device, tell)),
        Check("audio formats", lambda: check_audio_formats(tell)),
    ]


class Holder(nn.Module):
    """Holds parameters of these shapes, and a buffer."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.register_buffer("mean", torch.zeros(3))


def check_staging(device: torch.device, tell: Tell) -> Finding:
    """Write, compute on the device and read back at once: a copy that does not wait would read what was before."""
    chance = torch.Generator().manual_seed(0)
    copies = moved = 0
    # Small tensors that are sent together, one chunk and a little more, more than one, and rows in two chunks.
    small: list[tuple[int, ...]] = [(7,), (1,), (33, 65), (1000,)]
    chunk = flat.CHUNK
    for shapes in (small, [(chunk - 1,), (5,)], [(chunk + 1,)], [(3,), (chunk // 4096 + 3, 4096)]):
        parameters = FlatParameters(Holder(shapes).to(device))
        tell(f"{size(4 * parameters.numel)} in {len(shapes)} tensors")
        for _ in range(REPEATS):
            sent = torch.rand(parameters.numel, generator=chance) - 0.5
            kept = sent.clone()
            parameters.write(sent)
            first = parameters.read()
            with torch.no_grad():
                for tensor in (*parameters.parameters, *parameters.buffers):
                    tensor.mul_(2)  # exact in floating point
            second = parameters.read()
            copies, moved = copies + 3, moved + 12 * parameters.numel
            for what, expected, found in (("back", kept, first), ("after a computation", kept * 2, second)):
                if wrong := int((expected.view(torch.int32) != found.view(torch.int32)).sum()):
                    detail = f"{device}: {wrong:,} of {found.numel():,} values were not the same when read {what}"
                    return problem(detail, DO_NOT_TRAIN, wrong=wrong, numel=found.numel())
    return ok(f"{device}: {copies} copies of {size(moved)} in all, bit for bit the same", copies=copies, bytes=moved)


class Regression(nn.Module):
    """Computes a mean loss on (inputs [B, 8], targets [B, 1])."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return (self.layers(inputs) - targets).square().mean()


def check_ranks(device: torch.device, tell: Tell) -> Finding:
    """Train two ranks with half of the samples each: they must come to what one on the CPU does with all of them."""
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    pair, alone = LocalTrainer(Regression(), data), LocalTrainer(Regression(), data)
    fit = {"strategy": AllReduceStrategy(lr=1e-2), "max_steps": STEPS, "seed": 3, "timeout": 120.0}
    tell("starting two processes")
    found = FlatParameters(pair.fit(num_nodes=RANKS, batch_size=SAMPLES // RANKS, device=device.type, **fit)).read()
    result = pair.result
    assert result is not None
    if digest(found) != result.digest:
        return problem(f"{device}: rank 0 returned other weights than the ranks agreed on", QUIT_VPN)
    tell("the same with one")
    expected = FlatParameters(alone.fit(num_nodes=1, batch_size=SAMPLES, device="cpu", **fit)).read()
    off = float((found - expected).norm() / expected.norm())
    moved = float((expected - FlatParameters(Regression()).read()).norm())
    figures = {"steps": result.steps, "bytes": result.bytes_sent, "off": off, "moved": moved}
    if not off <= LIMIT:
        return problem(f"{device}: the weights of two ranks are {off:.1e} off those of one", QUIT_VPN, **figures)
    detail = f"{RANKS} processes on {device}, {STEPS} AllReduce steps over gloo: digests agree"
    return ok(f"{detail}, and one process on the CPU comes to the same ({off:.0e} off)", **figures)


def check_audio_formats(tell: Tell) -> Finding:
    """Write a tone in each format, and read it back."""
    wrong: list[str] = []
    read: list[str] = []
    with tempfile.TemporaryDirectory(prefix="multimac-doctor-") as folder:
        source = Path(folder) / "tone.wav"
        soundfile.write(source, tone(44_100), 44_100, subtype="PCM_16")
        for kind in (*FORMATS, "m4a"):
            tell(kind)
            try:
                path = _encode(source, kind)
            except TunerError as error:
                return warning(f"read: {', '.join(read)}; not m4a: {error.args[0]}", error.remedy)
            said = _problem(path)
            (wrong if said else read).append(said or kind)
    if wrong:
        return problem("; ".join(wrong), "Reinstall soundfile (`make setup`) and ffmpeg. Send us this with --json.")
    return ok(f"{', '.join(read)} decode to what was encoded")


def tone(rate: int) -> np.ndarray:
    """Make a tone, float32 [n, 2]: both channels alike, as most recordings of one microphone."""
    time = np.arange(int(SECONDS * rate)) / rate
    wave = (0.3 * np.sin(2 * np.pi * PITCH * time)).astype(np.float32)
    return np.stack([wave, wave], axis=1)


def _encode(source: Path, kind: str) -> Path:
    path = source.with_name(f"encoded.{kind}")
    if kind != "m4a":
        samples, rate = soundfile.read(source, dtype="float32")
        soundfile.write(path, samples, rate, format=kind.upper(), subtype=FORMATS[kind])
        return path
    if ffmpeg := find_program("ffmpeg"):
        command = [ffmpeg, "-nostdin", "-v", "error", "-i", str(source), "-c:a", "aac", str(path)]
    elif afconvert := find_program("afconvert"):
        command = [afconvert, "-f", "m4af", "-d", "aac", str(source), str(path)]
    else:
        raise TunerError("neither ffmpeg nor afconvert", remedy="`brew install ffmpeg`, for M4A and video files.")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if done.returncode or not path.exists():
        said = done.stderr.strip().splitlines() or ["it wrote nothing"]
        raise TunerError(f"{Path(command[0]).name} cannot write AAC: {said[-1]}")
    return path


def _problem(path: Path) -> str:
    """Say what is wrong with an encoded tone as it is read; empty if nothing is."""
    try:
        found = load_audio(path)
    except TunerError as error:
        return error.args[0]
    if abs(len(found) / SAMPLE_RATE - SECONDS) > SLACK:
        return f"{path.suffix[1:]} lasts {len(found) / SAMPLE_RATE:.2f} s instead of {SECONDS:g}"
    time = np.arange(len(found)) / SAMPLE_RATE
    waves = [np.sin(2 * np.pi * PITCH * time), np.cos(2 * np.pi * PITCH * time)]  # of any phase: codecs add a delay
    share = sum(float(found @ wave) ** 2 / float(wave @ wave) for wave in waves) / max(float(found @ found), 1e-12)
    return "" if share**0.5 >= ALIKE else f"{path.suffix[1:]} decodes to something else (similarity {share**0.5:.2f})"
