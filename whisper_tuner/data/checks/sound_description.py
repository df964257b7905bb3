"""Texts that describe a sound in place of what is said."""

from __future__ import annotations

import re
from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material, words

# Of English, French, German, Spanish, Italian, Portuguese, Dutch; each is a sound that somebody notes, not says.
_SOUNDS = """
applause beep beeps beeping breath breathing chime chirp chuckle chuckles clap clapping click clicking cough coughs
coughing crosstalk crying dialtone ding dtmf footsteps giggle gasp hiss hum humming inaudible indistinct laugh laughs
laughing laughter music musical noise noises overlap ringing ringtone sigh sighs silence sneeze sniff snore sound sounds
static throat tone tones unintelligible whistle whistling
applaudissements bip bips bruit bruits musique respiration rire rires soupir tonalité toux
applaus gelächter geräusch geräusche husten lachen musik piepton rauschen räuspern seufzen stille unverständlich
aplausos música pitido risa risas ruido silencio suspiro tos ininteligible
applausi musica risata risate rumore silenzio sospiro tosse incomprensibile
risos ruído silêncio suspiro barulho gelach geluid hoest muziek ruis stilte zucht
"""
_FILLERS = "a an the of and in background short long loud un une le la de du des ein der die das el los"
# One word alone: these are hardly said on their own, as "music" or "silence" may be.
_SURELY = "beep beeps bip piepton pitido inaudible unintelligible indistinct dtmf laughter"
SOUNDS, FILLERS, SURELY = (frozenset(text.split()) for text in (_SOUNDS, _FILLERS, _SURELY))
MOST_WORDS = 4  # of a text that is nothing but a description
# [laughter], (coughs), *sighs*, <noise>, ♪. Round brackets may be part of a text: only with a word for a sound in them.
BRACKETED = re.compile(
    r"\[[^\]]*\]|【[^】]*】|\*[^*\s][^*]*\*|♪|♫|<(?:noise|unk|laugh|breath|sil|spn|music)[^>]*>", re.I
)
ROUND = re.compile(r"\(([^)]*)\)|（([^）]*)）")

KIND = Kind(
    name="described sound",
    severity=Severity.WARNING,
    means="The text describes a sound, as [laughter] or 'beep', which nobody says. The model learns to write it.",
    remedy="Write only what is said. If nobody speaks, remove the row, or use no_speech = train with an empty text.",
)


def find(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if found := described(row.text):
            yield of_row(
                KIND, row, f"'{found[:60]}' is a note, or describes a sound", badness=len(found) / len(row.text)
            )


def described(text: str) -> str:
    """The part of a text that describes a sound, or ''."""
    if found := BRACKETED.search(text):
        return found[0]
    if found := next((each for each in ROUND.finditer(text) if _names_sound(each[0])), None):
        return found[0]
    said = [word.lower() for word in words(text)]
    is_note = (len(said) <= MOST_WORDS and len(said) > 1) or (len(said) == 1 and said[0] in SURELY)
    return text if is_note and _names_sound(text) and set(said) <= SOUNDS | FILLERS else ""


def _names_sound(text: str) -> bool:
    return any(word.lower() in SOUNDS for word in words(text))


CHECK = Check(kinds=(KIND,), find=find)
