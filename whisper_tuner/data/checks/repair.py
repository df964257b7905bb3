"""Mends of texts that are certain: what `--fix` does, and what checks of texts compare with."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable

# UTF-8 that was read as Windows-1252 or Latin-1: the first byte of a character, as Ã or â, and those that follow it.
_MISREAD = re.compile(
    r"(?<![^\W\d_])?[ÂÃÄÅÎÏÐÑâã][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122]{1,2}"
)
_TAG = re.compile(r"</?(?:b|i|u|em|strong|br|p|span|font|div|sup|sub|c|v|ruby|rt)(?:\s[^<>]*)?/?>", re.IGNORECASE)
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
        read = _bytes(found[0]).decode("utf-8")
    except (UnicodeEncodeError, UnicodeDecodeError):
        return found[0]
    # A capital before a closing quote, as in IRMÃ», is more probable than a small letter after capitals.
    return found[0] if before.isupper() and found[0][1] in "»”’›…" else read


def _bytes(text: str) -> bytes:
    """Windows-1252 leaves five bytes as control characters, and Latin-1 all from 80 to 9F."""
    return b"".join(c.encode("latin-1" if "\x80" <= c <= "\x9f" else "cp1252") for c in text)


STEPS: tuple[Callable[[str], str], ...] = (decoded, without_markup, without_controls, composed, single_spaced)


def repaired(text: str) -> str:
    for step in STEPS:
        text = step(text)
    return text
