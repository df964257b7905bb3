"""What a model has written for a test set, so that an unchanged model need not transcribe it again.

The base model of several runs is the same, and so is its test set. Only texts are kept; rates are computed anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from whisper_tuner.data.dataset import Sample
from whisper_tuner.errors import TunerError
from whisper_tuner.eval.evaluation import FALLBACK, Evaluation, Transcript, compared
from whisper_tuner.fact_store import FactStore, file_stamp
from whisper_tuner.files import content_hash, hash_of
from whisper_tuner.hub import base_of, is_adapter, model_folder

TEXTS, CONTENT = "texts of a test set 1", "content of a file 1"  # kinds of facts
LIBRARIES = ("torch", "transformers", "peft")
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
    """Keeps what models have written, under the hash of all that decides on the texts.

    That is the content of the model's files and of the clips, the libraries' versions and this program's own source.
    How many clips are computed at once is left out: it changes no text but where two tokens are as likely.
    """

    def __init__(self, store: FactStore):
        self._store = store

    def key(self, model: str, samples: Sequence[Sample], decoding: Decoding) -> str | None:
        """Return the hash for a model, with an adapter's base, and a test set; None if a file cannot be read."""
        try:
            folders = [model_folder(model)]
            if is_adapter(folders[0]):
                folders.append(model_folder(str(base_of(folders[0]))))
            files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
            files = [path for path in files if not path.name.startswith(".") and path.suffix != ".md"]
            digests = self._digests([*files, *(Path(sample.audio) for sample in samples)])
        except (OSError, TunerError):
            return None
        named = [(path.name, digest) for path, digest in zip(files, digests[: len(files)], strict=True)]
        versions = [version(name) for name in LIBRARIES]
        decides = [versions, _program(), astuple(decoding), named, digests[len(files) :]]
        return hash_of(json.dumps(decides).encode()).hex()

    def read(self, key: str | None, samples: Sequence[Sample]) -> Evaluation | None:
        """Return the evaluation that was kept; its rates are computed anew."""
        kept = self._store.known(TEXTS, {key: ""}).get(key) if key else None
        if not kept or len(kept["texts"]) != len(samples):
            return None
        heard = [
            Transcript(text, temperature=temperature, greedy=greedy, logprob=logprob)
            for text, temperature, greedy, logprob in kept["texts"]
        ]
        return compared(samples, heard, kept["written"], kept["seconds"], cached=True)

    def write(self, key: str | None, result: Evaluation) -> None:
        """Nothing is kept of a test set with clips that could not be read: another program may be all that lacks."""
        if key and not result.problems:
            texts = [[row.hypothesis, row.temperature, row.greedy, row.logprob] for row in result.rows]
            kept = {"texts": texts, "written": result.written, "seconds": result.seconds}
            self._store.keep(TEXTS, {key: ""}, {key: kept})

    def _digests(self, paths: Sequence[Path]) -> list[str]:
        """Hash the content of files. Each is read again only if its size, a time or its place on the disk changed."""
        stamps = {}
        for path in paths:
            stat = path.stat()
            stamps[str(path.resolve())] = f"{file_stamp(stat)} {stat.st_ctime_ns} {stat.st_ino}"
        known = self._store.known(CONTENT, stamps)
        fresh = {name: content_hash(Path(name)).hex() for name in stamps.keys() - known.keys()}
        self._store.keep(CONTENT, stamps, fresh)
        return [(known | fresh)[str(path.resolve())] for path in paths]


@cache
def _program() -> str:
    """Hash this program's own source."""
    files = sorted(_PROGRAM.rglob("*.py"))
    return hash_of(b"".join(f"{file.relative_to(_PROGRAM)}\n".encode() + file.read_bytes() for file in files)).hex()
