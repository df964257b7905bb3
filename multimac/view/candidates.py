"""Evaluating several models on several test sets: which ones, in which order, and where their predictions go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.run_dir.summary import RunSummary
from whisper_tuner.errors import ModelError, TunerError
from whisper_tuner.export.final import base_of, load_model
from whisper_tuner.hub import is_adapter
from whisper_tuner.paths import shown

from .models import origin_of, slug


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A model to evaluate; equal to itself alone. `origin` is the run that it came from, or that it was the base of."""

    path: str
    untouched: bool = False  # a base, put in for comparison
    origin: RunSummary | None = None

    @property
    def name(self) -> str:
        return f"{self.path} (base)" if self.untouched else self.path

    def predictions_folder(self, out: Path | None, manifest: Path, data: str) -> Path:
        """Return OUT/<data>/<model>; without --out it is below the run's own folder or ./evaluation."""
        if out is None and self.origin:
            test = self.origin.test
            if test and Path(test).stem == data and not _same(test, manifest):
                data = _whole(manifest)  # the run's predictions of its own test set must stay
            model = "base" if self.untouched else slug(Path(self.path).name)
            return self.origin.path / "evaluation" / data / model
        model = "-".join(Path(self.path).resolve().parts[-2:]) if Path(self.path).is_dir() else self.path
        return (out or Path("evaluation")) / data / slug(model)


def labels(paths: Sequence[Path]) -> dict[Path, str]:
    """Name a folder for each manifest: by its stem, or by its whole path if another one has the same stem."""
    stems = Counter(path.stem for path in paths)
    return {path: path.stem if stems[path.stem] == 1 else _whole(path) for path in paths}


def candidates(models: Sequence[str], *, with_base: bool = True) -> list[Candidate]:
    """Return the named models, after the untouched bases that they were trained from."""
    named = [Candidate(path=path, origin=origin_of(path)) for path in dict.fromkeys(models)]
    bases: dict[str, Candidate] = {}
    for candidate in named if with_base else ():
        base = base_model_of(candidate)
        if base and not any(_same(base, other.path) for other in named):
            bases.setdefault(base, Candidate(path=base, untouched=True, origin=candidate.origin))
    return [*bases.values(), *named]


def base_model_of(candidate: Candidate) -> str:
    """Return what a model was trained from, '' if nothing says so; a folder below this one as a relative path."""
    base = ""
    if candidate.origin:
        base = candidate.origin.base_model
    elif is_adapter(candidate.path):
        base = str(base_of(Path(candidate.path)))
    return str(shown(Path(base).resolve())) if base and Path(base).is_dir() else base


def check_models(chosen: Sequence[Candidate]) -> None:
    """Load each model once, one at a time. Raises the first ModelError."""
    for candidate in chosen:
        try:
            load_model(candidate.path)
        except TunerError as error:
            if not candidate.untouched:
                raise
            remedy = "It is the base that another model was trained from; leave it out with --no-base."
            raise ModelError(str(error).splitlines()[0], remedy=remedy) from None


def _same(one: str | Path, other: str | Path) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _whole(path: Path) -> str:
    return slug("-".join(path.absolute().parts[1:]))
