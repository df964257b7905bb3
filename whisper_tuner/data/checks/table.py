"""All checks. A new one is a file in this folder and a line here."""

from __future__ import annotations

from collections.abc import Sequence

from whisper_tuner.data.checks import (
    casing,
    channels,
    clipped,
    contradicted,
    control_characters,
    cut_off,
    dc_offset,
    duplicate_audio,
    leaked_audio,
    leaked_speaker,
    leaked_text,
    lost_characters,
    loudness,
    low_rate,
    markup,
    mojibake,
    no_syllables,
    numbers,
    placeholder,
    punctuation,
    repeated_text,
    silence,
    silent,
    sound_description,
    speaking_rate,
    undecodable,
    unicode_form,
    unusable,
    whitespace,
    wrong_language,
    wrong_script,
)
from whisper_tuner.data.checks.finding import Finding, Kind, Needs, Severity
from whisper_tuner.data.checks.material import Material

CHECKS = (
    unusable.CHECK,
    undecodable.CHECK,
    leaked_audio.CHECK,
    duplicate_audio.CHECK,
    silent.CHECK,
    channels.CHECK,
    speaking_rate.CHECK,
    placeholder.CHECK,
    lost_characters.CHECK,
    contradicted.CHECK,
    leaked_text.CHECK,
    leaked_speaker.CHECK,
    repeated_text.CHECK,
    sound_description.CHECK,
    wrong_script.CHECK,
    wrong_language.CHECK,
    mojibake.CHECK,
    markup.CHECK,
    control_characters.CHECK,
    unicode_form.CHECK,
    numbers.CHECK,
    casing.CHECK,
    punctuation.CHECK,
    clipped.CHECK,
    cut_off.CHECK,
    dc_offset.CHECK,
    no_syllables.CHECK,
    silence.CHECK,
    loudness.CHECK,
    low_rate.CHECK,
    whitespace.CHECK,
)
KINDS: tuple[Kind, ...] = tuple(kind for check in CHECKS for kind in check.kinds)
_SEVERITIES = tuple(Severity)
_RANK = {kind.name: (_SEVERITIES.index(kind.severity), place) for place, kind in enumerate(KINDS)}


def findings(material: Material, needs: Sequence[Needs] = tuple(Needs)) -> list[Finding]:
    """Of all checks that need no more than this: errors first, then by kind, and of a kind the worst first."""
    every = [found for check in CHECKS if check.needs in needs for found in check.find(material)]
    return sorted(every, key=lambda found: (_RANK[found.kind.name], -found.badness))
