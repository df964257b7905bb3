"""Numbers as digits in some rows and as words in others."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity
from whisper_tuner.data.checks.material import Material, words
from whisper_tuner.data.checks.minority import two_ways

# Without what is also an article or a pronoun (one, un, ein), and without "second".
NUMBERS = {
    "en": "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million",
    "fr": "deux trois quatre cinq six sept huit dix onze douze treize quatorze quinze seize vingt trente quarante "
    "cinquante soixante cent mille million",
    "de": "zwei drei vier fünf sechs sieben acht neun zehn elf zwölf zwanzig dreißig vierzig fünfzig hundert tausend",
    "es": "dos tres cuatro cinco seis siete ocho nueve diez once doce quince veinte treinta cuarenta cien mil",
    "it": "due tre quattro cinque sei sette otto nove dieci undici dodici venti trenta quaranta cento mille",
    "pt": "dois duas três quatro cinco seis sete oito nove dez onze doze vinte trinta quarenta cem mil",
    "nl": "twee drie vier vijf zes zeven acht negen tien elf twaalf twintig dertig veertig honderd duizend",
}
ALL = frozenset(word for text in NUMBERS.values() for word in text.split())

KIND = Kind(
    name="digits and words",
    severity=Severity.WARNING,
    means="Numbers are digits in some rows and words in others. The model cannot know which to write.",
    remedy="Choose one way, and write all rows so. WER for English counts both as the same, other programs do not.",
)


def find(material: Material) -> Iterator[Finding]:
    """Of the set's language; the words of all where that is not known, or not listed."""
    known = frozenset(NUMBERS[material.language].split()) if material.language in NUMBERS else ALL
    digits, spelt = [], []
    for row in material.spoken:
        if any(char.isdigit() for char in row.text):
            digits.append(row)
        elif any(word.lower() in known for whole in words(row.text) for word in whole.split("-")):
            spelt.append(row)
    return two_ways(KIND, digits, spelt, ("digits", "numbers as words"))


CHECK = Check(kinds=(KIND,), find=find)
