"""All checks and all kinds of findings. A new check is a function in one of the files named here."""

from __future__ import annotations

from collections.abc import Sequence

from whisper_tuner.data.checks import audio, language, leaks, rows, text  # noqa: F401  they register their checks
from whisper_tuner.data.checks.finding import CHECKS, Finding, Kind, Needs, Severity
from whisper_tuner.data.checks.material import Material

_SEVERITIES = tuple(Severity)
KINDS: tuple[Kind, ...] = tuple(kind for check in sorted(CHECKS, key=lambda check: check.place) for kind in check.kinds)
_RANK = {kind.name: (_SEVERITIES.index(kind.severity), place) for place, kind in enumerate(KINDS)}


def findings(material: Material, needs: Sequence[Needs] = tuple(Needs)) -> list[Finding]:
    """Run all checks that need no more than this. Errors come first, then kind by kind, the worst of each first."""
    every = [found for check in CHECKS if check.needs in needs for found in check.find(material)]
    return sorted(every, key=lambda found: (_RANK[found.kind.name], -found.badness))
