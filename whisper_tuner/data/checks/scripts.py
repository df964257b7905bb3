"""Which script a text is written in, and which one its language has."""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import lru_cache

LATIN, CYRILLIC, GREEK = "Latin", "Cyrillic", "Greek"
HAN, KANA, HANGUL = "Han", "Kana", "Hangul"
SYLLABIC = frozenset({HAN, KANA, HANGUL})
_NAMES = {"CJK": HAN, "HIRAGANA": KANA, "KATAKANA": KANA, "KATAKANA-HIRAGANA": KANA, "IDEOGRAPHIC": HAN}
_OF_LANGUAGES = {  # those that Whisper knows and that are not written in Latin letters alone
    CYRILLIC: "ru uk be bg mk kk mn tg tt ba",
    GREEK: "el",
    HAN: "zh yue ja ko",
    KANA: "ja",
    HANGUL: "ko",
    "Arabic": "ar fa ur ps sd",
    "Hebrew": "he yi",
    "Devanagari": "hi mr ne sa",
    "Bengali": "bn as",
    "Gurmukhi": "pa",
    "Gujarati": "gu",
    "Tamil": "ta",
    "Telugu": "te",
    "Kannada": "kn",
    "Malayalam": "ml",
    "Sinhala": "si",
    "Thai": "th",
    "Lao": "lo",
    "Myanmar": "my",
    "Khmer": "km",
    "Tibetan": "bo",
    "Georgian": "ka",
    "Armenian": "hy",
    "Ethiopic": "am",
}
_BOTH = {"sr": (CYRILLIC, LATIN), "uz": (CYRILLIC, LATIN), "az": (CYRILLIC, LATIN), "tk": (CYRILLIC, LATIN)}


def scripts_of(language: str) -> frozenset[str]:
    """Of a language's code; empty where the code is."""
    if language in _BOTH:
        return frozenset(_BOTH[language])
    own = frozenset(script for script, languages in _OF_LANGUAGES.items() if language in languages.split())
    return own or (frozenset({LATIN}) if language else frozenset())


@lru_cache(maxsize=8192)
def script(char: str) -> str:
    """Of a letter; '' of anything else."""
    if not char.isalpha() or unicodedata.category(char) == "Lm" or char in "ªºµ":
        return ""
    name = unicodedata.name(char, "").split(" ")[0]
    name = name.removeprefix("FULLWIDTH") or "Latin"
    return _NAMES.get(name, name.capitalize())


def counted(text: str) -> Counter[str]:
    """How many letters of each script."""
    found = Counter(map(script, text))
    del found[""]
    return found


def main_script(text: str) -> str:
    return max(found, key=found.get) if (found := counted(text)) else ""
