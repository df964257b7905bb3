"""A small real set, and defects to plant into copies of it."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile

from whisper_tuner.data.audio import load_audio

BUNDLED = Path(__file__).resolve().parents[4] / "bundled"
CLIPS = {"train": 60, "validation": 12, "test": 12}
AT = 20  # the row of train.csv that a defect is planted in
LINE = AT + 2
HEADER = ("id", "audio_path", "transcription", "duration_s", "speaker")


@dataclass
class Copy:
    """Rows by part, by the names of the header's columns; `write` makes the manifests."""

    folder: Path
    rows: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, str]:
        return self.rows["train"][AT]

    @property
    def audio(self) -> Path:
        return Path(self.row["audio_path"])

    def waveform(self) -> np.ndarray:
        return load_audio(self.audio)

    def record(self, samples: np.ndarray, *, rate: int = 16_000, name: str = "planted.wav") -> None:
        """The row's recording becomes this one."""
        path = self.folder / name
        soundfile.write(path, samples, rate)
        self.row["audio_path"], self.row["duration_s"] = str(path), ""

    def say(self, text: str) -> None:
        self.row["transcription"] = text

    def write(self) -> dict[str, Path]:
        paths = {}
        for part, rows in self.rows.items():
            paths[part] = self.folder / f"{part}.csv"
            with paths[part].open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, HEADER)
                writer.writeheader()
                writer.writerows(rows)
        return paths


def copy_of_bundled(folder: Path) -> Copy:
    copy = Copy(folder)
    for part, count in CLIPS.items():
        with (BUNDLED / "data" / f"{part}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))[:count]
        for row in rows:
            row |= {"audio_path": str(BUNDLED / "data" / row["audio_path"]), "speaker": part}
        copy.rows[part] = rows
    return copy


def _say(text: str) -> Callable[[Copy], None]:
    return lambda copy: copy.say(text)


def _changed(change: Callable[[np.ndarray], np.ndarray], **settings) -> Callable[[Copy], None]:
    return lambda copy: copy.record(change(copy.waveform()), **settings)


def _with(column: str, value: str) -> Callable[[Copy], None]:
    return lambda copy: copy.row.__setitem__(column, value)


def _file(content: bytes, name: str = "planted.wav") -> Callable[[Copy], None]:
    def plant(copy: Copy) -> None:
        path = copy.folder / name
        path.write_bytes(content)
        copy.row["audio_path"] = str(path)

    return plant


def _truncated(copy: Copy) -> None:
    copy.record(copy.waveform())
    copy.audio.write_bytes(copy.audio.read_bytes()[:-20_000])


def _damaged_inside(copy: Copy) -> None:
    """Both ends decode, and what is between does not."""
    copy.record(copy.waveform(), name="planted.flac")
    data = bytearray(copy.audio.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 2000] = bytes(2000)
    copy.audio.write_bytes(data)


def _infinite(copy: Copy) -> None:
    """A float WAV whose header and both ends are sound."""
    samples = copy.waveform()
    samples[len(samples) // 2] = np.inf
    path = copy.folder / "planted.wav"
    soundfile.write(path, samples, 16_000, subtype="FLOAT")
    copy.row["audio_path"] = str(path)


def _same_samples(copy: Copy) -> None:
    """The recording of an earlier row, in a file of another format; its text goes with it."""
    first = copy.rows["train"][3]
    copy.record(load_audio(first["audio_path"]), name="planted.flac")
    samples, _ = soundfile.read(copy.folder / "planted.flac", dtype="int16")
    copy.say(first["transcription"])
    first["audio_path"], first["duration_s"] = str(copy.folder / "first.wav"), ""
    soundfile.write(first["audio_path"], samples, 16_000)


def _re_encoded(copy: Copy) -> None:
    first = copy.rows["train"][3]
    quieter = np.pad(0.5 * load_audio(first["audio_path"]), (3000, 0))
    copy.record(quieter, name="planted.mp3")
    copy.say(first["transcription"])


def _leaked_audio(copy: Copy) -> None:
    copy.row.update(copy.rows["test"][4] | {"id": "leaked", "speaker": "train"})


def _alike_in_two(copy: Copy) -> None:
    quieter = np.pad(0.5 * load_audio(copy.rows["test"][4]["audio_path"]), (3000, 0))
    copy.record(quieter, name="planted.mp3")
    copy.say("Meet me at the seaside.")


def _leaked_text(copy: Copy) -> None:
    copy.say(copy.rows["test"][4]["transcription"].upper().rstrip("."))


def _five_times(copy: Copy) -> None:
    for row in copy.rows["train"][AT : AT + 6]:
        row["transcription"] = "Please say your name."


def _sound(seconds: float, level: float) -> Callable[[Copy], None]:
    chance = np.random.default_rng(0)
    return lambda copy: copy.record(level * chance.standard_normal(round(16_000 * seconds)))


def _stereo(left: float, right: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda mono: np.stack([left * mono, right * mono], axis=1)


DEFECTS: dict[str, tuple[str, Callable[[Copy], None]]] = {  # what is planted -> (the kind that is to be found, how)
    "no such file": ("missing audio", _with("audio_path", "nowhere.wav")),
    "an empty file": ("empty audio", _file(b"")),
    "no audio file": ("unreadable audio", _file(b"this is no audio" * 100)),
    "a file cut short": ("truncated audio", _truncated),
    "damage inside": ("damaged audio", _damaged_inside),
    "infinity inside": ("undecodable audio", _infinite),
    "no text": ("no text", _say("")),
    "31 s": ("too long", _changed(lambda mono: np.resize(mono, 31 * 16_000))),
    "460 tokens": ("too many tokens", _say("supercalifragilistic " * 120)),
    "another duration": ("wrong duration", _with("duration_s", "9.5")),
    "zeros": ("silent", _changed(np.zeros_like)),
    "a whisper": ("very quiet", _changed(lambda mono: 0.01 * mono)),
    "too much gain": ("clipped", _changed(lambda mono: np.clip(6 * mono, -1, 1))),
    "too much gain, then less": ("clipped", _changed(lambda mono: 0.3 * np.clip(6 * mono, -1, 1))),
    "an end in a vowel": ("cut off", _changed(lambda mono: mono[: 200 + np.argmax(np.abs(mono))])),
    "a beginning in a vowel": ("cut off", _changed(lambda mono: mono[np.argmax(np.abs(mono)) - 20 :])),
    "an offset": ("DC offset", _changed(lambda mono: 0.5 * mono + 0.1)),
    "a dead channel": ("dead channel", _changed(_stereo(1, 0))),
    "a channel upside down": ("cancelling channels", _changed(_stereo(1, -1))),
    "8 kHz": ("low sample rate", _changed(lambda mono: mono[::2], rate=8_000)),
    "noise": ("no rise and fall", _sound(3.0, 0.1)),
    "a pause before it": ("long silence at an edge", _changed(lambda mono: np.pad(mono, (4 * 16_000, 0)))),
    "a word in a minute": ("mostly silence", _changed(lambda mono: np.pad(mono, (8 * 16_000, 8 * 16_000)))),
    "far quieter than the rest": ("loudness outlier", _changed(lambda mono: 0.08 * mono)),
    "the same samples": ("duplicate recording", _same_samples),
    "the same, re-encoded": ("near-duplicate recording", _re_encoded),
    "a clip of the test set": ("audio in two parts", _leaked_audio),
    "a clip like one of the test set": ("similar recording in two parts", _alike_in_two),
    "a text of the test set": ("text in two parts", _leaked_text),
    "a speaker of the test set": ("speaker in two parts", _with("speaker", "test")),
    "one text six times": ("repeated text", _five_times),
    "five words in 0.4 s": ("impossible speaking rate", _changed(lambda mono: mono[3000:9400])),
    "far too much text": (
        "unusual speaking rate",
        lambda copy: copy.say(f"{copy.row['transcription']} " * 2 + "Wake me at ten."),
    ),
    "a placeholder": ("placeholder", _say("N/A")),
    "the file's name": ("placeholder", lambda copy: copy.say(copy.audio.name)),
    "a note in brackets": ("described sound", lambda copy: copy.say(f"[laughter] {copy.row['transcription']}")),
    "a sound": ("described sound", _say("beep sound")),
    "Russian": ("wrong script", _say("Выключи свет на кухне, пожалуйста.")),
    "a Cyrillic letter": (
        "look-alike letters",
        lambda copy: copy.say(copy.row["transcription"].replace("e", "\u0435", 1)),
    ),
    "French": ("wrong language", _say("Il faut que nous allions dans la maison avec les enfants.")),
    "a lost character": ("lost characters", _say("Meet me at the caf\ufffd in the morning.")),
    "a token": ("special tokens", _say("<|0.00|> Play some music in the garden.")),
    "misread UTF-8": ("misread encoding", _say("Meet me at the cafÃ© in the morning.")),
    "misread quotes": ("misread encoding", _say("Itâ€™s time to go to the garden.")),
    "an entity": ("markup", _say("Buy bread &amp; butter for me.")),
    "a tag": ("markup", _say("Buy <b>bread</b> and butter for me.")),
    "a soft hyphen": ("control characters", _say("Switch off the dish\u00adwasher now.")),
    "two spaces": ("odd whitespace", _say("Switch off  the lamp.")),
    "an accent of its own": ("decomposed letters", _say("Meet me at the cafe\u0301 in the morning.")),
    "a digit": ("digits and words", _say("Wake me at 7 in the morning.")),
    "capitals": ("two ways of casing", lambda copy: copy.say(copy.row["transcription"].upper())),
    "no capital": ("two ways of casing", lambda copy: copy.say(copy.row["transcription"].lower())),
    "no full stop": ("two ways of punctuation", lambda copy: copy.say(copy.row["transcription"].rstrip(".?!"))),
}
