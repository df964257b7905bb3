"""The findings of `multimac data check` as a page, a table and JSON."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from whisper_tuner.data.audio import read_channels
from whisper_tuner.data.checks.finding import Finding, Kind
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.errors import RunError, TunerError
from whisper_tuner.files import DISK, write_atomically, write_table

from .happened import moment
from .page import REPORT, hours
from .players import Player, Players
from .private import Private

CSV, JSON = "findings.csv", "findings.json"
COLUMNS = ("severity", "kind", "part", "manifest", "line", "id", "rows", "what", "text", "audio", "remedy")
CLIPS = 4  # of a kind that can be heard
ROWS = 30  # of a kind in its table
BARS = 240  # of a waveform
TEXT = 300  # characters


@dataclass(frozen=True, kw_only=True)
class Clip:
    """wave: a path in a box of BARS by 2."""

    place: str
    id: str
    text: str
    what: str
    seconds: float
    player: Player
    wave: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """One kind. clips: the first of its rows, to listen to; rows: the next ones."""

    kind: Kind
    rows: int
    clips: Sequence[Clip]
    listed: Sequence[Clip]
    more: int


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    clip: Clip
    heard: str
    cer: float


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    file: str
    rows: int
    hours: float


def write(
    folder: Path,
    name: str,
    manifests: Mapping[str, Manifest],
    findings: Sequence[tuple[Kind, Sequence[Finding]]],
    heard: Sequence[tuple[Finding, str, float]] = (),
    notes: Sequence[str] = (),
) -> Path:
    """report.html, findings.csv and findings.json in `folder`; returns the page. findings: by kind, the worst first.

    heard: the clips that a model contradicts most, with what it hears and CER. Raises RunError.
    """
    every = [one for _, rows in findings for one in rows]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_table(folder / CSV, COLUMNS, (record(one).values() for one in every))
        counts = {kind.name: sum(one.rows for one in rows) for kind, rows in findings}
        told = {"counts": counts, "findings": [record(one) for one in every]}
        write_atomically(folder / JSON, json.dumps(told, indent=1) + "\n", durable=False)
        page = _page(name, manifests, findings, heard, notes)
        write_atomically(folder / REPORT, page.encode("utf-8", "replace").decode("utf-8"), durable=False)
    except OSError as error:
        remedy = "Free some space, or name another place with --out."
        raise RunError(f"{folder}: {error.strerror}", remedy=remedy if error.errno in DISK else "") from None
    return folder / REPORT


def record(one: Finding) -> dict[str, object]:
    """By COLUMNS."""
    audio = str(one.audio) if one.audio else ""
    about = (one.kind.severity, one.kind.name, one.part, str(one.manifest), one.line, one.id, one.rows)
    return dict(zip(COLUMNS, (*about, one.what, one.text, audio, one.kind.remedy), strict=True))


def _page(
    name: str,
    manifests: Mapping[str, Manifest],
    findings: Sequence[tuple[Kind, Sequence[Finding]]],
    heard: Sequence[tuple[Finding, str, float]],
    notes: Sequence[str],
) -> str:
    folders = {manifest.path.absolute().parent for manifest in manifests.values()}
    folders |= {one.audio.absolute().parent for _, rows in findings for one in rows if one.audio}
    private, players = Private([*folders, Path.home()]), Players([Path()])
    contradicted = [
        Contradiction(clip=_clip(one, players, private), heard=text[:TEXT], cer=cer) for one, text, cer in heard
    ]
    groups = [_group(kind, rows, players, private) for kind, rows in findings]
    here = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=here, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters["hours"] = hours
    return pages.get_template("findings.html").render(
        style=Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8")),
        title=name,
        parts=[_part(part, manifest) for part, manifest in manifests.items()],
        groups=groups,
        contradicted=contradicted,
        notes=notes,
        bars=BARS,
        written=moment(time.time()) + time.strftime(" %z"),
    )


def _part(name: str, manifest: Manifest) -> Part:
    seconds = sum(sample.duration_s for sample in manifest.samples)
    rows = len(manifest.samples) + len(manifest.problems)
    return Part(name=name, file=manifest.path.name, rows=rows, hours=seconds / 3600)


def _group(kind: Kind, found: Sequence[Finding], players: Players, private: Private) -> Group:
    audible = [one for one in found if one.audio][:CLIPS]
    rest = [one for one in found if one not in audible]
    return Group(
        kind=kind,
        rows=sum(one.rows for one in found),
        clips=[_clip(one, players, private) for one in audible],
        listed=[_clip(one, None, private) for one in rest[:ROWS]],
        more=max(0, len(rest) - ROWS),
    )


def _clip(one: Finding, players: Players | None, private: Private) -> Clip:
    plays = players.of(one.audio) if players and one.audio else Player()
    return Clip(
        place=f"{one.manifest.name} line {one.line}" if one.line else one.manifest.name,
        id=one.id,
        text=one.text[:TEXT],
        what=private.text(one.what),
        seconds=one.seconds,
        player=plays,
        wave=wave(one.audio) if plays.address else "",
    )


def wave(audio: Path) -> str:
    """The highest and lowest sample of each of BARS stretches, as an SVG path around 0."""
    try:
        samples, _ = read_channels(audio)
    except (TunerError, OSError):
        return ""
    mono = samples.mean(axis=1)
    ends = np.linspace(0, len(mono), BARS + 1).astype(int)
    spans = [(begin, max(end, begin + 1)) for begin, end in itertools.pairwise(ends) if begin < len(mono)]
    lines = ((mono[begin:end].min(), mono[begin:end].max()) for begin, end in spans)
    return "".join(f"M{at} {-high:.3f}V{-low + 0.004:.3f}" for at, (low, high) in enumerate(lines))
