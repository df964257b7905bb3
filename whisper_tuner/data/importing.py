"""A data set of any layout becomes a folder with manifests of our own; what is there is never destroyed."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from whisper_tuner.data.audio import LONG_S
from whisper_tuner.data.audio_check import AudioIndex
from whisper_tuner.data.cutting import Cutter
from whisper_tuner.data.dataset import MAX_DURATION_S, PartReader, Sample, write_manifest
from whisper_tuner.data.formats.layouts import no_part, parts_of
from whisper_tuner.data.formats.place import read_text
from whisper_tuner.data.formats.rows import AS_IT_IS, Bounds, Part, Reading
from whisper_tuner.data.formats.saved import WHY_CUT
from whisper_tuner.data.splitting import split
from whisper_tuner.errors import ConfigError, DataError
from whisper_tuner.fact_store import FactStore
from whisper_tuner.files import write_shared
from whisper_tuner.problems import Problem, write_problems
from whisper_tuner.text import parse_json

RECORD, LEFT_OUT, CLIPS = "import.json", "left-out.csv", "clips"
BLACKLIST, PATCHES = "blacklist.txt", "patches.csv"
TOLD_EVERY = 20  # clips
Tell = Callable[[str], None]


@dataclass(frozen=True)
class ImportedPart:
    """written, kept: clips that were cut now, and those that an earlier import had cut.

    blacklisted, patched: ids that the user has left out, and whose text the user has replaced.
    """

    kind: str
    part: Part
    manifest: Path
    samples: tuple[Sample, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    written: int = 0
    kept: int = 0
    blacklisted: frozenset[str] = frozenset()
    patched: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        return sum(sample.duration_s for sample in self.samples)

    @property
    def speakers(self) -> int:
        return len({sample.speaker for sample in self.samples if sample.speaker})


@dataclass(frozen=True)
class Corrections:
    """The user's decisions about clips, by id. They outlive any import."""

    left_out: frozenset[str] = frozenset()
    texts: Mapping[str, str] = field(default_factory=dict)

    def unknown(self, parts: Iterable[ImportedPart]) -> list[str]:
        """Ids that none of the parts has."""
        used = {name for one in parts for name in (*one.blacklisted, *one.patched)}
        return sorted((self.left_out | self.texts.keys()) - used)


class OutsideAudio(DataError):
    """A data set names files that lie elsewhere, in `folders`: it was not imported."""

    def __init__(self, what: str, folders: Sequence[Path], *, remedy: str):
        super().__init__(what, remedy=remedy)
        self.folders = folders


def import_source(
    source: Path,
    out: Path,
    reading: Reading = AS_IT_IS,
    *,
    keep_empty: bool = False,
    keep_long: bool = False,
    split_off: bool = False,
    outside: Sequence[Path] = (),
    facts: FactStore | None = None,
    tell: Tell = lambda text: None,
) -> list[ImportedPart]:
    """Write out/train.csv, and validation.csv and test.csv where the source has such parts; out/clips if need be.

    keep_empty: clips without text stay, for no_speech = train. keep_long: so do those that are too long, for
    data check --fix to cut them. split_off: make the parts that the source lacks of the clips for training, now and
    whenever it is imported into this folder again.
    outside: other folders than the source's own in which its files may lie. facts: keeps the headers of audio.
    Raises ConfigError for an `out` that is something else, DataError for a source that cannot be read, OutsideAudio.
    """
    source, out = (source.absolute() if source.exists() else source), out.absolute()
    record = _record(source, out, reading)
    corrections = read_corrections(out)
    parts = parts_of(source, reading)
    if "train" not in parts:
        raise no_part(source, "train", parts)
    own = [source] if source.is_dir() else [source.parent, source.resolve().parent] if source.exists() else []
    bounds = Bounds([*own, out / CLIPS, *outside])
    out.mkdir(parents=True, exist_ok=True)
    _keep(record, out)  # else a second try would find a stranger's folder
    found = []
    for kind, part in parts.items():
        index = AudioIndex(facts)
        try:
            bounded, longest = replace(part, bounds=bounds), LONG_S if keep_long else MAX_DURATION_S
            found.append(_import_part(kind, bounded, out, index, corrections, tell, longest, no_speech=keep_empty))
        finally:
            index.save()
    if folders := bounds.outside:
        what = f"{source} names files that lie outside of it, in {', '.join(map(str, folders))}"
        raise OutsideAudio(what, folders, remedy=f"If they may be used, import it with{allowed(folders)}")
    record["split"] = split_off or record["split"]  # else clips of its test set would come back into train
    if record["split"]:
        found = _split(found, out)
    for number, imported in enumerate(found):
        if imported.samples or imported.kind == "train" or imported.manifest.exists():  # an empty one stops a run
            found[number] = _write(imported, record)
        # After each part, so that the next go on.
        _keep(record, out)
    write_problems(out / LEFT_OUT, [(one.part.path, one.problems) for one in found])
    return found


def is_free(out: Path, source: Path) -> bool:
    """Tell whether a folder is not there yet, or may take an import of this source once more."""
    if not out.exists():
        return True
    try:
        _record(source.absolute(), out.absolute(), AS_IT_IS)
    except ConfigError:
        return False
    return True


def _keep(record: dict, out: Path) -> None:
    write_shared(out / RECORD, json.dumps(record, indent=2) + "\n", mode=0o600)


def outside_of(source: Path, audio: Iterable[Path]) -> Sequence[Path]:
    """The folders in which a data set has audio, but for its own."""
    bounds = Bounds([source if source.is_dir() else source.parent])
    for path in audio:
        bounds.hold(path)
    return bounds.outside


def allowed(folders: Sequence[Path]) -> str:
    """The options of an import that may use what is there."""
    return "".join(f" --outside {shlex.quote(str(folder))}" for folder in folders)


def _split(found: list[ImportedPart], out: Path) -> list[ImportedPart]:
    """Make the parts that are missing of the clips for training. Raises DataError where they are too few."""
    train = next(one for one in found if one.kind == "train")
    missing = [kind for kind in ("validation", "test") if kind not in {one.kind for one in found if one.samples}]
    if not missing:
        return found
    try:
        done = split(train.samples, missing)
    except ValueError as error:
        raise DataError(f"{train.part.path}: {error}", remedy="Import it without --split.") from None
    made = [
        ImportedPart(kind=kind, part=train.part, manifest=out / f"{kind}.csv", samples=samples)
        for kind, samples in done.parts.items()
        if kind != "train"
    ]
    train = replace(train, samples=done.parts["train"], notes=(*train.notes, done.told))
    return [train if one.kind == "train" else one for one in found if one.kind not in missing] + made


def read_corrections(folder: Path) -> Corrections:
    """Raises DataError."""
    blacklist, path = folder / BLACKLIST, folder / PATCHES
    ids = read_text(blacklist, AS_IT_IS)[0].splitlines() if blacklist.exists() else []
    ids = [line.strip() for line in ids if not line.lstrip().startswith("#")]  # a remark, as data check --fix writes it
    table = csv.reader(io.StringIO(read_text(path, AS_IT_IS)[0] if path.exists() else "", newline=""))
    texts = {}
    for number, cells in enumerate(table):
        if number == 0 or not any(cells):
            continue
        if len(cells) != 2 or not all(cell.strip() for cell in cells):
            raise DataError(
                f"{path} line {table.line_num}: not an id and a text: {', '.join(cells)[:80]}",
                remedy=f"Its columns are id,text. To leave a clip out, write its id into {BLACKLIST}.",
            )
        texts[cells[0].strip()] = cells[1].strip()
    return Corrections(frozenset(filter(None, ids)), texts)


def _import_part(
    kind: str,
    part: Part,
    out: Path,
    index: AudioIndex,
    corrections: Corrections,
    tell: Tell,
    max_duration_s: float,
    *,
    no_speech: bool,
) -> ImportedPart:
    cutter = Cutter(part, out / CLIPS, max_duration_s)
    reader = PartReader(part, index, max_duration_s=max_duration_s, no_speech=no_speech)
    samples: list[Sample] = []
    problems: list[Problem] = []
    blacklisted, patched = set(), set()
    total = sum(1 for _ in part.rows()) if part.cut != WHY_CUT else None  # of a data set on the hub it may take hours
    for number, found in enumerate(reader.read(cutter.rows()), 1):
        if isinstance(found, Problem):
            problems.append(found)
        elif found.id in corrections.left_out:
            blacklisted.add(found.id)
        elif found.id in corrections.texts:
            patched.add(found.id)
            samples.append(found.with_text(corrections.texts[found.id]))
        else:
            samples.append(found)
        if number % TOLD_EVERY == 0:
            tell(f"{kind}: {number:,}{f' of {total:,}' if total else ''} recordings")
    return ImportedPart(
        kind=kind,
        part=part,
        manifest=out / f"{kind}.csv",
        samples=tuple(samples),
        problems=tuple(problems),
        notes=(*part.notes, *reader.notes),
        written=cutter.written,
        kept=cutter.kept,
        blacklisted=frozenset(blacklisted),
        patched=frozenset(patched),
    )


def _record(source: Path, out: Path, reading: Reading) -> dict:
    """Record what is imported, with the hashes of manifests that an earlier one has written. Raises ConfigError."""
    own = {"source": str(source), "reading": asdict(reading), "written": {}, "split": False}
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file", remedy="Choose another name.")
    if source.is_dir() and out.is_relative_to(source):
        raise ConfigError(f"--out {out} lies inside of the source", remedy="Choose a folder elsewhere.")
    if not out.is_dir() or not any(path.name not in (BLACKLIST, PATCHES) for path in out.iterdir()):
        return own
    try:
        before = parse_json((out / RECORD).read_text(encoding="utf-8"))
        same, written = before["source"] == own["source"], dict(before["written"])
        was_split = bool(before.get("split"))
    except FileNotFoundError:
        what = f"--out {out} is a folder with other things in it"
        raise ConfigError(what, remedy="Choose a new folder.") from None
    except (OSError, ValueError, KeyError, TypeError):
        what = f"{out / RECORD} cannot be read"
        raise ConfigError(what, remedy="Choose a new folder.") from None
    if not same and (written or (out / CLIPS).exists()):  # of one that was refused at once nothing is there
        what = f"--out {out} holds the import of {before['source']}"
        raise ConfigError(what, remedy="Choose another folder for this source.")
    return own | {"written": written, "split": was_split}


def _write(imported: ImportedPart, record: dict) -> ImportedPart:
    """The manifest; one that somebody has changed since is kept under another name."""
    path, notes = imported.manifest, imported.notes
    if path.exists() and _digest(path) != record["written"].get(path.name):
        names = (path.with_name(f"{path.stem}-changed-{number}.csv") for number in range(1, 10_000))
        kept = next(name for name in names if not name.exists())
        path.rename(kept)
        notes = (*notes, f"{path.name} had been changed since it was imported: it is kept as {kept.name}")
    write_manifest(path, imported.samples)
    record["written"][path.name] = _digest(path)
    return replace(imported, notes=notes)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
