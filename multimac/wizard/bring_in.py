"""Recordings whose audio must be cut or taken out first, such as those with subtitles: the wizard imports them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from multimac.view.progress import working
from whisper_tuner.data.formats.layouts import parts_of
from whisper_tuner.data.importing import OutsideAudio, import_source
from whisper_tuner.paths import expanded, shown

from .questions import Questions


def bring_in(questions: Questions, source: Path, console: Console) -> dict[str, Path]:
    """The manifests of the import, by kind; none where `source` can be used as it is. Raises DataError, ConfigError."""
    parts = questions.once("look", source, lambda: parts_of(source))
    why = next((part.cut for part in parts.values() if part.cut), "")
    if not why:
        return {}
    console.print(f"{shown(source)}: {why}. They are written as clips of their own.", markup=False)
    default = str(shown(Path.cwd() / f"{source.stem}-clips"))
    out = expanded(questions.text("import", "Folder for the clips and their manifests:", default)).absolute()

    def cut(outside: Sequence[Path] = ()) -> dict[str, Path]:
        questions.cut += [out] if out not in questions.cut else []
        with working(console, f"cutting {shown(source)}") as tell:
            return {one.kind: one.manifest for one in import_source(source, out, outside=outside, tell=tell)}

    try:
        return questions.once("cut", (source, out), cut)
    except OutsideAudio as found:
        if not questions.confirm("outside", f"{found.args[0]}. May they be used?", False):
            raise
        return questions.once("cut", (source, out, found.folders), partial(cut, found.folders))
