"""The findings of `multimac data check` as a page, a table and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributed.run_dir.summary import REPORT
from multimac.view.findings import place_of
from whisper_tuner.data.checks.finding import Finding, Kind
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.files import write_atomically, write_table

from .template import BARS, Player, Players, Private, rendered, told_as_run_error, wave

CSV, JSON = "findings.csv", "findings.json"
COLUMNS = ("severity", "kind", "part", "manifest", "line", "id", "what", "text", "audio", "remedy")
CLIPS = 4  # of a kind that can be heard
ROWS = 30  # of a kind in its table
TEXT = 300  # characters


def write(
    folder: Path,
    name: str,
    manifests: Mapping[str, Manifest],
    findings: Sequence[tuple[Kind, Sequence[Finding]]],
    heard: Sequence[tuple[Finding, str, float]] = (),
    notes: Sequence[str] = (),
) -> Path:
    """Write report.html, findings.csv and findings.json into `folder`; returns the page. Raises RunError.

    findings: by kind, the worst first. heard: the clips that a model contradicts most, with what it hears and CER.
    """
    findings = [(kind, [row for one in found for row in one.each()]) for kind, found in findings]
    every = [record(one) for _, rows in findings for one in rows]
    with told_as_run_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_table(folder / CSV, COLUMNS, ([*row.values()] for row in every))
        counts = {kind.name: len(rows) for kind, rows in findings}
        told = {"counts": counts, "findings": every}
        write_atomically(folder / JSON, json.dumps(told, indent=1) + "\n", durable=False)
        write_atomically(folder / REPORT, _page(name, manifests, findings, heard, notes), durable=False)
    return folder / REPORT


def record(one: Finding) -> dict[str, object]:
    """Return a finding about one row as a row, in the order of COLUMNS."""
    audio = str(one.audio) if one.audio else ""
    about = (one.kind.severity, one.kind.name, one.part, str(one.manifest), one.line, one.id)
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

    def shown(one: Finding, *, with_sound: bool = True) -> dict[str, object]:
        player = players.of(one.audio) if with_sound and one.audio else Player()
        return {
            "place": place_of(one),
            "id": one.id,
            "text": one.text[:TEXT],
            "what": private.text(one.what if len(one.what) <= TEXT else f"{one.what[:TEXT]}…"),
            "seconds": one.seconds,
            "player": player,
            "wave": wave(one.audio) if one.audio and player.address else "",
        }

    contradicted = [{"clip": shown(one), "heard": text[:TEXT], "cer": cer} for one, text, cer in heard]
    groups = []
    for kind, found in findings:
        audible = [one for one in found if one.audio][:CLIPS]
        rest = [one for one in found if one not in audible]
        groups.append(
            {
                "kind": kind,
                "rows": len(found),
                "clips": [shown(one) for one in audible],
                "listed": [shown(one, with_sound=False) for one in rest[:ROWS]],
                "more": max(0, len(rest) - ROWS),
            }
        )
    return rendered(
        "findings.html",
        title=name,
        manifests=manifests,
        groups=groups,
        contradicted=contradicted,
        notes=notes,
        bars=BARS,
    )
