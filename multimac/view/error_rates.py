"""`multimac evaluate` of several models on several test sets: which ones, where their predictions go, what is printed.

That is a table of error rates, clips that are in doubt, and the worst ones word by word.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from distributed.run_dir.summary import RunSummary
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.errors import ModelError, TunerError
from whisper_tuner.eval.predictions import (
    EMPTY,
    REPETITION,
    TOO_LONG,
    TOO_SHORT,
    Aligned,
    Prediction,
    align,
    difference,
    worst,
)
from whisper_tuner.files import shown
from whisper_tuner.hub import base_of, is_adapter
from whisper_tuner.text import counted, duration, wer_told

from .models import origin_of, slug
from .terminal import Console

if TYPE_CHECKING:
    from whisper_tuner.eval.evaluation import Evaluation

LIST = "list.txt"  # beside predictions: of which list of clips they are
FIGURES = {"wer": "WER", "cer": "CER", "wer_raw": "WER as\nwritten"}  # --json has more
NAMED = 8  # clips of a kind
TERMS_SHOWN = 20
KINDS = {
    REPETITION: "repeats itself",
    EMPTY: "nothing was heard",
    TOO_LONG: "far more was heard than said",
    TOO_SHORT: "far less was heard than said",
}
STYLES = {"S": "yellow", "D": "red", "I": "cyan", "": ""}
NAMES = ("  said   ", "  heard  ", "         ")
GAP = "*"  # stands where the other text has a word


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
            folder = self.origin.path / "evaluation"
            if test and Path(test).stem == data and not _same(test, manifest):
                data = _whole(manifest)  # the run's predictions of its own test set must stay
            model = "base" if self.untouched else slug(Path(self.path).name)
        else:
            folder = out or Path("evaluation")
            model = slug("-".join(Path(self.path).resolve().parts[-2:]) if Path(self.path).is_dir() else self.path)
        with contextlib.suppress(OSError, UnicodeDecodeError):  # nothing is there, or of an earlier version
            if (folder / data / LIST).read_text(encoding="utf-8").strip() != str(manifest.resolve()):
                data = _whole(manifest)
        return folder / data / model


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


def check_models(chosen: Sequence[Candidate], tell: Callable[[str], None]) -> None:
    """Load each model once, one at a time. Raises the first ModelError."""
    from whisper_tuner.export.final import load_model

    for number, candidate in enumerate(chosen, start=1):
        tell(f"loading model {number} of {len(chosen)}")
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


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One model on one test set; `record` holds its figures, as --json prints them."""

    model: Candidate
    manifest: Manifest
    result: Evaluation
    record: dict

    @property
    def predictions(self) -> Sequence[Prediction]:
        return self.result.rows


def described_set(manifest: Manifest) -> str:
    """Tell the path of a test set, and how much is to be heard."""
    seconds = sum(sample.duration_s for sample in manifest.samples)
    return f"{shown(manifest.path.absolute())}: {counted(len(manifest.samples), 'clip')}, {duration(seconds)}"


def rates_table(manifests: Sequence[Manifest], measured: Sequence[Measured]) -> Table:
    """Tell the rates of all models, in a section for each test set."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    for column in FIGURES.values():
        table.add_column(column, justify="right", no_wrap=True)
    for manifest in manifests:
        if len(manifests) == 1:
            table.title = described_set(manifest)
        else:
            table.add_section()
            table.add_row(described_set(manifest), style="bold")
        for one in measured:
            if one.manifest is manifest:
                rates = [f"{one.record[key]:.1f}" for key in FIGURES]
                if between := one.record["wer_interval"]:
                    rates[0] += f"\n{between[0]:.1f}-{between[1]:.1f}"
                table.add_row(one.model.name, *rates)
    return table


def terms_table(measured: Sequence[Measured]) -> Table:
    """Tell of each term that was said in one test set how often each model writes it, those missed most first."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    short = ["base" if one.model.untouched else Path(one.model.path).name for one in measured]
    names = short if len({*short}) == len(short) else [one.model.name for one in measured]
    for column in ("term", "said", *names, "instead"):
        table.add_column(column, overflow="fold", justify="left" if column in ("term", "instead") else "right")
    counts = [one.record["terms"]["counts"] for one in measured]
    rows = [row for row in zip(*counts, strict=True) if row[0]["said"]]
    for row in sorted(rows, key=lambda row: row[-1]["found"] - row[-1]["said"])[:TERMS_SHOWN]:
        table.add_row(row[0]["term"], str(row[0]["said"]), *(str(one["found"]) for one in row), row[-1]["instead"])
    if rows:
        recalls = [f"{one.record['terms']['recall'] or 0:.1f} %" for one in measured]
        table.add_section()
        table.add_row("all", str(sum(row[0]["said"] for row in rows)), *recalls, "")
    return table


def key_of_rates(measured: Sequence[Measured], way: str) -> str:
    """Explain the table. way: of decoding, in words."""
    told = f"Wrong words (WER) and letters (CER) in per cent, after {_normalized(measured)}; below WER its interval of"
    return f"{told} 95 %. As written: case and punctuation count. {way[0].upper()}{way[1:]}."


def _normalized(measured: Sequence[Measured]) -> str:
    """Name the normalisers, of each test set and model if they differ."""
    sets = dict.fromkeys(one.manifest.path for one in measured)
    by_set = {path: _by_model([one for one in measured if one.manifest.path == path]) for path in sets}
    alike = len({*by_set.values()}) == 1
    return "; ".join(dict.fromkeys(what if alike else f"{shown(path)}: {what}" for path, what in by_set.items()))


def _by_model(measured: Sequence[Measured]) -> str:
    models = {one.model.name: str(one.record["normalizer"]) for one in measured}
    alike = len({*models.values()}) == 1
    return ", ".join(dict.fromkeys(what if alike else f"{name} {what}" for name, what in models.items()))


def name_doubtful(console: Console, measured: Measured) -> None:
    again = [row for row in measured.predictions if row.was_in_doubt]
    found = {"in doubt, so decoded again, or left empty as silence": again}
    found |= {what: [row for row in measured.predictions if flag in row.flags] for flag, what in KINDS.items()}
    for what, rows in found.items():
        if rows:
            names = ", ".join(row.sample.id for row in rows[:NAMED])
            more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
            clips = f"{counted(len(rows), 'clip')} ({names}{more})"
            console.print(f"{measured.model.name}: {what}: {clips}", soft_wrap=True)


def show_worst(console: Console, measured: Measured, count: int) -> None:
    found = worst(measured.predictions, count)
    if found:
        console.print(f"\nthe worst of {measured.manifest.path.name} by {measured.model.path}:", soft_wrap=True)
    for prediction in found:
        rates, flags = prediction.rates, " ".join(prediction.flags)
        kinds = {"wrong (S)": rates.substitutions, "missing (D)": rates.deletions, "added (I)": rates.insertions}
        errors = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        head = f"{prediction.sample.id}: WER {100 * rates.wer:.1f}: {errors}  {flags}".rstrip()
        for line in (head, *side_by_side(*prediction.normalized, width=console.width)):
            console.print(line, soft_wrap=True)


def side_by_side(reference: str, hypothesis: str, *, width: int) -> list[Text]:
    """Print what was said above what was heard, word under word, with the errors marked below.

    Three lines for each piece that fits into `width` columns; two where nothing is wrong.
    """
    lines: list[Text] = []
    for pairs in _pieces(align(reference, hypothesis), width - len(NAMES[0])):
        rows = [Text(name) for name in NAMES]
        for pair in pairs:
            columns = _width(pair)
            words = (pair.reference or GAP * columns, pair.hypothesis or GAP * columns, pair.mark)
            for row, word in zip(rows, words, strict=True):
                row.append(word + " " * (columns - cell_len(word) + 1), style=STYLES[pair.mark])
        lines += rows if any(pair.mark for pair in pairs) else rows[:2]
    for line in lines:
        line.rstrip()
    return lines


def _pieces(pairs: Sequence[Aligned], width: int) -> Iterator[list[Aligned]]:
    piece: list[Aligned] = []
    for pair in pairs:
        if piece and sum(_width(other) + 1 for other in piece) + _width(pair) > width:
            yield piece
            piece = []
        piece.append(pair)
    if piece:
        yield piece


def _width(pair: Aligned) -> int:
    return max(cell_len(pair.reference), cell_len(pair.hypothesis))


def differences(measured: Sequence[Measured]) -> list[str]:
    """Compare each model with the first one on the same test set, in words; the figures go into the records."""
    lines: list[str] = []
    first: dict[Path, Measured] = {}
    for one in measured:
        reference = first.setdefault(one.manifest.path, one)
        if one.record["normalizer"] != reference.record["normalizer"]:
            what = f"{one.model.name} and {reference.model.name} are not compared on {one.manifest.path.name}"
            ways = f"{one.record['normalizer']} and {reference.record['normalizer']}"
            lines.append(f"{what}: their texts are normalised in two ways, {ways}. Give all one --language.")
        elif one is not reference and (found := difference(one.predictions, reference.predictions)):
            one.record["against"] = {"model": reference.model.path, "p": round(found.p, 4)}
            one.record["against"] |= {name: round(getattr(found, name), 2) for name in ("points", "low", "high")}
            lines.append(f"{one.model.name} against {reference.model.name}, on {one.manifest.path.name}:")
            trained = f", with {count} clips of its training" if (count := one.record["trained_on"]) else ""
            told = wer_told(reference.record["wer"], one.record["wer"], (found.low, found.high), found.clips)
            lines.append(f"  WER {told}{trained}")
    return lines
