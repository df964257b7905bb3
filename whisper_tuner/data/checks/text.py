"""Texts that are no transcript, or that have characters which nobody says; and the mends that are certain.

Those are what `--fix` does, and what checks of texts compare with.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Finding, Kind, Severity, check, of_row
from whisper_tuner.data.checks.material import Material
from whisper_tuner.text import words

_EMPTY = (
    "n/a n.a. #n/a #name? #ref! #value! nan null nil undefined unknown untitled placeholder todo tbd xxx "
    "<unk> [unk] [null] (null) (none) <none> <null> <empty> (empty) [empty] -"
)
EMPTY = frozenset(_EMPTY.split())
FILE = re.compile(r"[^\s]+\.(?:wav|mp3|m4a|flac|ogg|opus|aac|mp4|aiff?|wma|webm|txt)", re.IGNORECASE)

PLACEHOLDER = Kind(
    name="placeholder",
    severity=Severity.ERROR,
    means="The text is no transcript: N/A, null, punctuation alone, or the name of the file.",
    remedy="Write what is said, or remove the row.",
)


@check(PLACEHOLDER, place=8)
def find_placeholders(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        text, audio, why = row.text.strip(), row.sample.audio, ""
        # Names that nobody says, as clip_0012 and IMG-20, not files that are called by what is said in them.
        is_made_up = any(char.isdigit() for char in text) and any(char in "-_" or char.isalpha() for char in text)
        if text.lower() in EMPTY:
            why = "no transcript"
        elif FILE.fullmatch(text) or (text in (audio.stem, audio.name, row.sample.id) and is_made_up):
            why = "the name of a file"
        elif not words(text):
            why = "no word"
        if why:
            yield of_row(PLACEHOLDER, row, f"'{row.text[:60]}' is {why}")


SPECIAL = re.compile(r"<\|[^|<>]*\|>")

LOST = Kind(
    name="lost characters",
    severity=Severity.WARNING,
    means="The text has the sign � in place of a character that an earlier conversion has lost.",
    remedy="Read the original again in its right encoding, or type the text anew.",
)
TOKENS = Kind(
    name="special tokens",
    severity=Severity.ERROR,
    means="The text has tokens of Whisper's own, as `<|0.00|>`. The tokenizer takes them for commands, not for text.",
    remedy="Remove them from the text. Times belong into the column timed_text.",
)
CHANGED = Kind(
    name="changed by the tokenizer",
    severity=Severity.WARNING,
    means="The model's tokenizer does not give back what it is given: the model can never write this text.",
    remedy="Replace the characters that are lost, or use the tokenizer that belongs to the model.",
)


@check(LOST, TOKENS, CHANGED, place=9)
def find_lost_characters(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if found := SPECIAL.search(row.text):
            yield of_row(TOKENS, row, f"'{found[0]}'")
        elif (at := row.text.find("\ufffd")) >= 0:
            yield of_row(LOST, row, f"'{row.text[max(0, at - 15) : at + 15]}'")
        elif material.read_back and (back := material.read_back(row.text)) != row.text:
            yield of_row(CHANGED, row, f"it becomes: {back[:80]}")


# English, French, German, Spanish, Italian, Portuguese, Dutch; each is a sound that somebody notes, not says.
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
MOST_WORDS = 4  # in a text that is nothing but a description
_HTML = r"(?i:b|i|u|em|strong|br|p|span|font|div|sup|sub|c|v|ruby|rt)"
# [laughter], *sighs*, ♪; tags of corpora: <COMMA>, <unk>, {NOISE}, ((unclear)), &=laughs, %HESITATION, !SIL, ,COMMA.
# Round brackets may be part of a text: only with a word for a sound in them, as (coughs).
BRACKETED = re.compile(
    rf"\[[^\]]*\]|【[^】]*】|\*[^*\s][^*]*\*|♪|♫|<(?!/?{_HTML}\b)/?[a-zA-Z][^<>]*>|\{{[^{{}}]*\}}|\(\([^()]*\)\)|&=\w+"
    r'|(?<!\S)(?:%(?:HESITATION|hesitation)|!SIL|"DOUBLE-QUOTE|[,.?!:;-](?:COMMA|PERIOD|COLON|HYPHEN|[A-Z]+-[A-Z]+))\b'
)
ROUND = re.compile(r"\(([^)]*)\)|（([^）]*)）")

SOUND = Kind(
    name="described sound",
    severity=Severity.WARNING,
    means="A sound is described, as [laughter] or 'beep', or there is a tag, as <COMMA>: the model learns to write it.",
    remedy="Write only what is said. If nobody speaks, remove the row, or use no_speech = train with an empty text.",
)


@check(SOUND, place=14)
def find_described_sounds(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if found := described_sound(row.text):
            what = f"'{found[:60]}' is a note, a tag, or describes a sound"
            yield of_row(SOUND, row, what, badness=len(found) / len(row.text))


def described_sound(text: str) -> str:
    """Return the part of a text that describes a sound, or ''."""
    if found := BRACKETED.search(text):
        return found[0]
    if found := next((each for each in ROUND.finditer(text) if _names_sound(each[0])), None):
        return found[0]
    said = [word.lower() for word in words(text)]
    is_note = (len(said) <= MOST_WORDS and len(said) > 1) or (len(said) == 1 and said[0] in SURELY)
    return text if is_note and _names_sound(text) and set(said) <= SOUNDS | FILLERS else ""


def _names_sound(text: str) -> bool:
    return any(word.lower() in SOUNDS for word in words(text))


# UTF-8 that was read as Windows-1252 or Latin-1: the first byte of a character, as Ã or â, and those that follow it.
_MISREAD = re.compile(
    r"(?<![^\W\d_])?[ÂÃÄÅÎÏÐÑâã][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122]{1,2}"
)
_TAG = re.compile(rf"</?{_HTML}(?:\s[^<>]*)?/?>", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:[a-zA-Z][a-zA-Z0-9]{1,31}|#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6});")
# Marks of direction, soft hyphens, byte order marks and the like. Joiners (U+200C, U+200D) are letters in some scripts.
_INVISIBLE = re.compile(r"[\u00ad\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\ufff9-\ufffb]")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")
_SPACES = re.compile(r"\s+")


def composed(text: str) -> str:
    """Letters with their accents as one character each (NFC)."""
    return unicodedata.normalize("NFC", text)


def without_markup(text: str) -> str:
    return html.unescape(_TAG.sub(" " if "<br" in text.lower() else "", text)) if has_markup(text) else text


def has_markup(text: str) -> str:
    """The first tag or entity, or ''."""
    found = _TAG.search(text) or next((one for one in _ENTITY.finditer(text) if html.unescape(one[0]) != one[0]), None)
    return found[0] if found else ""


def without_controls(text: str) -> str:
    return _INVISIBLE.sub("", _CONTROL.sub("", text))


def single_spaced(text: str) -> str:
    return _SPACES.sub(" ", text).strip()


def decoded(text: str) -> str:
    """Put é for Ã©; leave a text as it is where only some of it can be repaired."""
    better = probably_decoded(text)
    return text if better != text and _MISREAD.search(better) else better


def probably_decoded(text: str) -> str:
    """Put é for Ã©; a part that is no UTF-8 when read so stays as it is."""
    return text if text.isascii() else _MISREAD.sub(_utf8, text)


def _utf8(found: re.Match[str]) -> str:
    before = found.string[found.start() - 1 : found.start()]
    try:
        # Windows-1252 leaves five bytes as control characters, and Latin-1 all from 80 to 9F.
        raw = b"".join(c.encode("latin-1" if "\x80" <= c <= "\x9f" else "cp1252") for c in found[0])
        read = raw.decode("utf-8")
    except (UnicodeEncodeError, UnicodeDecodeError):
        return found[0]
    # A capital before a closing quote, as in IRMÃ», is more probable than a small letter after capitals.
    return found[0] if before.isupper() and found[0][1] in "»”’›…" else read


def repaired(text: str) -> str:
    """Mend what is certain: encoding, markup, invisible characters, Unicode form and spaces, in this order."""
    return single_spaced(composed(without_controls(without_markup(decoded(text)))))


MISREAD = Kind(
    name="misread encoding",
    severity=Severity.WARNING,
    means="The text was UTF-8 and was read as something else: Ã© in place of é. The model learns to write it so.",
    remedy="Read the file again as UTF-8. --fix repairs what is certain.",
    repairs=True,
)
MARKUP = Kind(
    name="markup",
    severity=Severity.WARNING,
    means="The text has HTML in it, as `&amp;` or `<i>`, which nobody says.",
    remedy="--fix replaces entities and removes tags.",
    repairs=True,
)
CONTROLS = Kind(
    name="control characters",
    severity=Severity.WARNING,
    means="The text has characters that are not shown: control codes, soft hyphens, marks of direction.",
    remedy="--fix removes them.",
    repairs=True,
)
DECOMPOSED = Kind(
    name="decomposed letters",
    severity=Severity.WARNING,
    means="Letters and accents are characters of their own (NFD, as in file names on a Mac): other tokens than usual.",
    remedy="--fix composes them (NFC).",
    repairs=True,
)


@check(MISREAD, MARKUP, CONTROLS, DECOMPOSED, place=17)
def find_what_can_be_mended(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if (better := probably_decoded(row.text)) != row.text:
            yield of_row(MISREAD, row, f"probably: {better[:80]}")
        if found := has_markup(row.text):
            yield of_row(MARKUP, row, f"'{found}'")
        if (better := without_controls(row.text)) != row.text:
            hidden = sorted({f"U+{ord(char):04X}" for char in set(row.text) - set(better)})
            yield of_row(CONTROLS, row, f"it has {', '.join(hidden)}")
        if not row.text.isascii() and (better := composed(row.text)) != row.text:
            pieces = sorted(set(row.text) - set(better))
            yield of_row(DECOMPOSED, row, f"it has {', '.join(f'U+{ord(char):04X}' for char in pieces[:4])}")


SPACE_NAMES = {"\n": "a line break", "\r": "a line break", "\t": "a tab"}

SPACES = Kind(
    name="odd whitespace",
    severity=Severity.INFO,
    means="The text has line breaks, tabs, several spaces in a row, or no-break spaces, which are tokens of their own.",
    remedy="--fix makes a single space of each.",
    repairs=True,
)


@check(SPACES, place=31)
def find_odd_whitespace(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if single_spaced(row.text) != row.text:
            odd = {SPACE_NAMES.get(char, f"U+{ord(char):04X}") for char in row.text if char.isspace() and char != " "}
            yield of_row(SPACES, row, f"it has {' and '.join(sorted(odd)) or 'several spaces in a row'}")
