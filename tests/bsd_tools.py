"""A PATH as on a Mac: programs that know no GNU options, and none that only Linux has (timeout, setsid, flock)."""

from __future__ import annotations

import shutil
from pathlib import Path

SPOKEN = "awk cat chmod cp date env expand find grep head id ls make mkdir mv printf ps rm rmdir sh sleep sort stat"
SPOKEN += " tail test touch true uname wc which xargs"
TOOL = """#!/bin/sh
for word; do case "$word" in --?*) echo "{name}: illegal option -- -" >&2; exit 64 ;; esac; done
exec {program} "$@"
"""
# In a replacement BSD's sed takes \\t for t, see re_format(7) of macOS; and -i there needs a suffix.
SED = """#!/bin/sh
for word; do
    shift
    case "$word" in -i) echo "sed: -i: an extension is needed" >&2; exit 1 ;; esac
    set -- "$@" "$(printf '%s' "$word" | {program} 's/\\\\t/t/g')"
done
exec {program} "$@"
"""


def bsd_tools(folder: Path) -> Path:
    """Make `folder`; as the whole of PATH it is what a Mac has."""
    folder.mkdir()
    for name in [*SPOKEN.split(), "sed"]:
        if program := shutil.which(name):
            text = SED if name == "sed" else TOOL
            (folder / name).write_text(text.format(name=name, program=program))
            (folder / name).chmod(0o755)
    return folder
