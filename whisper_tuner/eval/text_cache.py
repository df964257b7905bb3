"""What a model has written for a test set, so that an unchanged model need not transcribe it again.

The base model of several runs is the same, and so is its test set. Only texts are kept; rates are computed anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from whisper_tuner.data.dataset import Sample
from whisper_tuner.errors import TunerError
from whisper_tuner.eval.evaluation import FALLBACK, Evaluation, Transcript, compared
from whisper_tuner.export.final import base_of
from whisper_tuner.files import write_atomically
from whisper_tuner.hub import is_adapter, model_folder
from whisper_tuner.json_text import parse_json

TEXTS = "texts"  # the folder below a project's cache
_DIGEST_BYTES = 16
_LIBRARIES = ("torch", "transformers", "peft")
_PROGRAM = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a test set is transcribed, apart from the model. `device` is its kind, as in torch.device.type."""

    device: str
    language: str | None
    task: str | None
    audio_context: str = "full"
    temperatures: tuple[float, ...] = FALLBACK


class TextCache:
    """A JSON file for each model, test set and Decoding, named by the hash of all that decides on the texts.

    That is the content of the model's files and of the clips, the libraries' versions and this program's own source.
    How many clips are computed at once is left out: it changes no text but where two tokens are as likely.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._index = folder / "hashes.json"

    def key(self, model: str, samples: Sequence[Sample], decoding: Decoding) -> str | None:
        """None if a file cannot be read: then nothing is kept."""
        try:
            known = _loaded(self._index)
            before = dict(known)
            files = [(path.name, _digest(path, known)) for path in _model_files(model)]
            clips = [_digest(Path(sample.audio), known) for sample in samples]
        except (OSError, TunerError):
            return None
        if known != before:
            self._write(self._index, known)
        versions = [version(name) for name in _LIBRARIES]
        return _hash(json.dumps([versions, _program(), astuple(decoding), files, clips]).encode())

    def read(self, key: str | None, samples: Sequence[Sample]) -> Evaluation | None:
        found = _loaded(self._folder / f"{key}.json") if key else {}
        match found:
            case {"texts": [*texts], "written": str() | None as written, "seconds": float() as seconds}:
                heard = [_transcript(text) for text in texts]
                if len(heard) == len(samples) and None not in heard:
                    return compared(samples, heard, written, seconds, cached=True)
        return None

    def write(self, key: str | None, result: Evaluation) -> None:
        """Nothing is kept of a test set with clips that could not be read: another program may be all that lacks."""
        if key and not result.problems:
            texts = [[row.hypothesis, row.temperature, row.greedy, row.logprob] for row in result.rows]
            self._write(
                self._folder / f"{key}.json", {"texts": texts, "written": result.written, "seconds": result.seconds}
            )

    def _write(self, path: Path, content: dict) -> None:
        text = json.dumps(content)
        with contextlib.suppress(OSError):  # disk full, no permission: it is computed again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{_hash(text.encode())}\n{text}", durable=False)


def _transcript(kept: object) -> Transcript | None:
    """None if it is not what `TextCache.write` has made of one."""
    match kept:
        case [str() as text, float() as temperature, str() as greedy, float() | None as logprob]:
            return Transcript(text, temperature=temperature, greedy=greedy, logprob=logprob)
    return None


def _loaded(path: Path) -> dict:
    """What `TextCache` has written; empty if it is not there, or damaged."""
    try:
        digest, text = path.read_text(encoding="utf-8").split("\n", 1)
        found = parse_json(text) if digest == _hash(text.encode()) else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _model_files(model: str) -> list[Path]:
    """Of a folder or a hub id; of an adapter, also those of its base."""
    folders = [model_folder(model)]
    if is_adapter(folders[0]):
        folders.append(model_folder(str(base_of(folders[0]))))
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    return [path for path in files if not path.name.startswith(".") and path.suffix != ".md"]


def _digest(path: Path, known: dict[str, list]) -> str:
    """Of a file's content. It is read again only if its size, a time or its place on the disk has changed."""
    stat, name = path.stat(), str(path.resolve())
    facts = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    match known.get(name):
        case [*same, str(digest)] if same == facts:
            return digest
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()
    known[name] = [*facts, digest]
    return digest


@cache
def _program() -> str:
    files = sorted(_PROGRAM.rglob("*.py"))
    return _hash(b"".join(f"{file.relative_to(_PROGRAM)}\n".encode() + file.read_bytes() for file in files))


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
