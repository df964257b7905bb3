"""`--fix`: new manifests without what spoils training, and what was done to each row. The old ones are never touched.

What is left out is listed in blacklist.txt and what is changed in patches.csv, both by id. The user may edit them: if
--fix is run again, a row that an earlier run has listed there, and the user has taken out, stays as it was.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from whisper_tuner.data import importing
from whisper_tuner.data.checks.finding import Finding, Severity
from whisper_tuner.data.checks.leaks import LEAKED_TEXT, MANY_LEAKS, SAME_AUDIO, find_duplicate_audio, leaked_texts
from whisper_tuner.data.checks.material import TEST, Material, Row
from whisper_tuner.data.checks.text import repaired
from whisper_tuner.data.dataset import Sample, write_manifest
from whisper_tuner.data.formats.place import read_text
from whisper_tuner.data.formats.rows import AS_IT_IS
from whisper_tuner.data.importing import BLACKLIST, CLIPS, PATCHES
from whisper_tuner.errors import ConfigError, DataError
from whisper_tuner.files import read_table, write_shared, write_table

CHANGES = "changes.csv"
LEFT_OUT, CHANGED, KEPT, TEXT_KEPT, CUT = "left out", "text changed", "kept", "text kept", "cut"
COLUMNS = ("part", "line", "id", "change", "why", "before", "after")
MENDED = "encoding, markup, spaces or Unicode form"
_UNUSABLE = "cannot be used: "
BLACKLIST_HEAD = """\
# Clips to leave out, an id a line; lines that begin with # are remarks.
# Remove an id and run --fix again to keep its clip; add one to leave its clip out.
"""


Cuts = Mapping[tuple[str, int], "tuple[Sample, ...] | str"]
"""By part and line: the clips that a row which is too long has become, or why it was not cut."""


@dataclass(frozen=True)
class Change:
    part: str
    line: int
    id: str
    change: str
    why: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Corrections(importing.Corrections):
    """Corrections of the user, and what an earlier --fix had changed: (part, id, change)."""

    decided: frozenset[tuple[str, str, str]] = frozenset()

    def has_undone(self, change: str, row: Row) -> bool:
        """Tell if an earlier --fix has made this change, and the user has taken it out of the file that lists it."""
        listed, kept = (self.left_out, KEPT) if change == LEFT_OUT else (self.texts.keys(), TEXT_KEPT)
        was_made = any((row.part, row.sample.id, name) in self.decided for name in (change, kept))
        return was_made and row.sample.id not in listed


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The outcome of --fix. samples: those that stay, by part. unknown: ids of the user's files that no row has."""

    samples: Mapping[str, Sequence[Sample]]
    changes: Sequence[Change]
    shared_ids: frozenset[str]
    unknown: Sequence[str]
    notes: Sequence[str] = ()

    def counted(self, part: str) -> Counter[str]:
        return Counter(change.change for change in self.changes if change.part == part)


def check_target(folder: Path, manifests: Iterable[Path]) -> None:
    """Raises ConfigError for a folder that is something else, or that holds what is to be fixed."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--fix {folder} is a file", remedy="Name a new folder.")
    if any(path.absolute().parent == folder.absolute() for path in manifests):
        what = f"--fix {folder}: the manifests to fix are in this folder, and are never changed"
        raise ConfigError(what, remedy="Name a new folder.")
    there = [path.name for path in folder.iterdir() if path.name != CLIPS] if folder.is_dir() else []
    if there and not {BLACKLIST, PATCHES, CHANGES} & set(there):
        raise ConfigError(f"--fix {folder}: the folder holds something else ({there[0]})", remedy="Name a new folder.")


def read_corrections(folder: Path) -> Corrections:
    """Read what an earlier --fix has listed. Raises DataError for a file that cannot be read."""
    listed, changes = importing.read_corrections(folder), folder / CHANGES
    rows = read_table(io.StringIO(read_text(changes, AS_IT_IS)[0], newline="")) if changes.exists() else ()
    decided = frozenset((row.get("part") or "", row.get("id") or "", row.get("change") or "") for row in rows)
    return Corrections(listed.left_out, listed.texts, decided)


def fixed(
    material: Material,
    findings: Sequence[Finding],
    corrections: Corrections,
    long: Sequence[Row] = (),
    cuts: Cuts = MappingProxyType({}),
) -> Fixed:
    """Decide on each row. long: the rows that are too long. They are not among those of the material."""
    reasons, notes = _reasons(material, findings)
    pieces = [replace(row, sample=piece) for row in long for piece in _pieces(cuts, row)]
    rows = sorted(
        [*material.rows, *pieces], key=lambda row: (list(material.manifests).index(row.part), row.sample.line)
    )
    parts = Counter(sample_id for _, sample_id in {(row.part, row.sample.id) for row in rows})
    shared_ids = frozenset(sample_id for sample_id, count in parts.items() if count > 1)
    were_cut = {(row.part, row.sample.line): row for row in long if _pieces(cuts, row)}
    changes = []
    for found in findings:
        place = found.part, found.line
        if found.kind.unusable and not found.id and place not in were_cut:  # a row that could not be read
            why = f"{_UNUSABLE}{found.kind.name}: {found.what}"
            if not_cut := cuts.get(place):
                why = f"{why}; not cut: {not_cut}"
            changes.append(Change(*place, "", LEFT_OUT, why))
    for (part, line), row in were_cut.items():
        made = _pieces(cuts, row)
        why = f"too long; now {', '.join(piece.id for piece in made)}"
        changes.append(Change(part, line, row.sample.id, CUT, why, row.text, " / ".join(piece.text for piece in made)))
    samples: dict[str, list[Sample]] = {part: [] for part in material.manifests}
    for row in rows:
        own = replace(corrections, decided=frozenset()) if row.sample.id in shared_ids else corrections
        place = row.part, row.sample.line
        kept, done = _decided(row, "" if place in were_cut else reasons.get(place, ""), own)
        changes += done
        samples[row.part] += [kept] if kept else []
    known = {row.sample.id for row in (*rows, *long)}
    return Fixed(
        samples=samples,
        changes=sorted(changes, key=lambda change: (list(samples).index(change.part), change.line)),
        shared_ids=shared_ids,
        unknown=sorted((corrections.left_out | corrections.texts.keys()) - known),
        notes=notes,
    )


def _decided(row: Row, reason: str, corrections: Corrections) -> tuple[Sample | None, list[Change]]:
    """Return the sample as it is to be, None if it is left out; and what was done."""
    sample, made = row.sample, []

    def note(change: str, why: str, before: str = "", after: str = "") -> None:
        made.append(Change(row.part, sample.line, sample.id, change, why, before, after))

    if reason and corrections.has_undone(LEFT_OUT, row) and not reason.startswith(_UNUSABLE):
        note(KEPT, f"taken out of {BLACKLIST}; {reason}")
    elif reason or sample.id in corrections.left_out:
        note(LEFT_OUT, reason or f"in {BLACKLIST}", before=sample.text)
        return None, made
    text, why = corrections.texts.get(sample.id), f"in {PATCHES}"
    if text is None:
        text, why = (sample.text if row.part == TEST else repaired(sample.text)), MENDED
        if text != sample.text and corrections.has_undone(CHANGED, row):
            note(TEXT_KEPT, f"taken out of {PATCHES}", before=sample.text)
            text = sample.text
    if text != sample.text:
        note(CHANGED, why, before=sample.text, after=text)
    return replace(sample.with_text(text), audio=sample.audio.absolute()), made


def _reasons(material: Material, findings: Sequence[Finding]) -> tuple[dict[tuple[str, int], str], list[str]]:
    """Say why rows are left out, by part and line; and what was not done, in words.

    A test set loses only rows that cannot be used. Of two rows with the same recording the first stays, unless it is
    left out for another reason.
    """
    reasons: dict[tuple[str, int], str] = {}
    for found in findings:
        kind, place = found.kind, (found.part, found.line)
        if kind.unusable:
            reasons.setdefault(place, f"{_UNUSABLE}{kind.name}: {found.what}")
        elif kind.severity == Severity.ERROR and found.part != TEST and kind is not SAME_AUDIO:
            reasons.setdefault(place, f"{kind.name}: {found.what}")
    notes = []
    for part, manifest in material.manifests.items():
        leaks = leaked_texts(material, part)
        if len(leaks) > MANY_LEAKS * len(manifest.samples):
            notes.append(
                f"{manifest.path.name}: {len(leaks)} rows have a text that validation or test has too. They stay: "
                "over a tenth of a set means fixed phrases, which it would lose."
            )
            continue
        for row, other in leaks:
            reasons.setdefault((part, row.sample.line), f"{LEAKED_TEXT.name}: as {other.place} ({other.part})")
    left = {
        part: replace(
            manifest, samples=tuple(sample for sample in manifest.samples if (part, sample.line) not in reasons)
        )
        for part, manifest in material.manifests.items()
        if part != TEST
    }
    for found in find_duplicate_audio(replace(material, manifests=left)):
        if found.kind is SAME_AUDIO:
            reasons[found.part, found.line] = f"{found.kind.name}: {found.what}"
    return reasons, notes


def _pieces(cuts: Cuts, row: Row) -> tuple[Sample, ...]:
    found = cuts.get((row.part, row.sample.line), ())
    return () if isinstance(found, str) else found


def write(result: Fixed, folder: Path, corrections: Corrections) -> dict[str, Path]:
    """Write the new manifests; return their paths by part. An id that several parts have is in neither list."""
    if "train" in result.samples and not result.samples["train"]:
        raise DataError("no row to train on is left", remedy="Mend the findings first; report.html shows them.")
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for part, samples in result.samples.items():
        written[part] = folder / f"{part}.csv"
        write_manifest(written[part].absolute(), samples)
    # The user's own ids first, sorted; then those of now, each below its reason.
    left_out = [change for change in result.changes if change.change == LEFT_OUT and change.id]
    lines = sorted(corrections.left_out - {change.id for change in left_out})
    for change in left_out:
        remark = f"# {change.part} line {change.line}: {change.why}".replace("\n", " ").replace("\r", " ")
        shared = change.id in result.shared_ids and change.id not in corrections.left_out
        lines += [f"{remark} (its id, {change.id}, is also in another part)"] if shared else [remark, change.id]
    write_shared(folder / BLACKLIST, BLACKLIST_HEAD + "".join(f"{line}\n" for line in lines), mode=0o600)
    texts = dict(corrections.texts)
    for change in result.changes:
        if change.change == CHANGED and change.id not in result.shared_ids:
            texts[change.id] = change.after
    write_table(folder / PATCHES, ("id", "text"), texts.items(), exact=True)
    rows = ([getattr(change, column) for column in COLUMNS] for change in result.changes)
    write_table(folder / CHANGES, COLUMNS, rows)
    return written
