"""Two ways of writing in one set: the rows of the rarer way, or the set as a whole if both are usual in it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from operator import attrgetter

from whisper_tuner.data.checks.finding import Finding, Kind, Severity, check, of_row
from whisper_tuner.data.checks.material import Material, Row, words

RARE = 0.1  # share of the rows that show either way: up to here its rows are named, above it the set has two ways
FEWEST = 10  # rows of the usual way, without which there is no usual way
EXAMPLES = 3


def two_ways(kind: Kind, one: Sequence[Row], other: Sequence[Row], names: tuple[str, str]) -> Iterator[Finding]:
    """Find the rows of the rarer way. names: what each way is called, as in 'digits' and 'words'."""
    (rare, rare_name), (usual, usual_name) = sorted([(one, names[0]), (other, names[1])], key=lambda way: len(way[0]))
    every = len(rare) + len(usual)
    if not rare or len(usual) < FEWEST:
        return
    if len(rare) <= RARE * every:
        for row in rare:
            yield of_row(kind, row, f"{rare_name}, where {len(usual)} of {every} rows have {usual_name}")
        return
    places = ", ".join(map(attrgetter("place"), rare[:EXAMPLES]))
    counted = f"{len(rare)} rows have {rare_name} (such as {places}), {len(usual)} have {usual_name}"
    yield of_row(kind, rare[0], counted, rows=len(rare))


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
ALL_NUMBERS = frozenset(word for text in NUMBERS.values() for word in text.split())

DIGITS = Kind(
    name="digits and words",
    severity=Severity.WARNING,
    means="Numbers are digits in some rows and words in others. The model cannot know which to write.",
    remedy="Choose one way, and write all rows so. WER for English counts both as the same, other programs do not.",
)


@check(DIGITS, place=21)
def find_digits_and_words(material: Material) -> Iterator[Finding]:
    """Look for the number words of the set's language, or of all where that is not known, or not listed."""
    known = frozenset(NUMBERS[material.language].split()) if material.language in NUMBERS else ALL_NUMBERS
    digits, spelt = [], []
    for row in material.spoken:
        if any(char.isdigit() for char in row.text):
            digits.append(row)
        elif any(word.lower() in known for whole in words(row.text) for word in whole.split("-")):
            spelt.append(row)
    return two_ways(DIGITS, digits, spelt, ("digits", "numbers as words"))


FEWEST_CASED = (
    3  # words of two letters or more: less may be an abbreviation, also one that is spelled, or half a sentence
)

CASING = Kind(
    name="two ways of casing",
    severity=Severity.WARNING,
    means="Some rows are in capitals only, or have none where the rest begins with one. Whisper writes as in a book.",
    remedy="Write all rows in one way, best as in a book: then the model keeps what it knows.",
)


@check(CASING, place=22)
def find_two_casings(material: Material) -> Iterator[Finding]:
    capitals, mixed, small = [], [], []
    for row in material.spoken:
        if sum(len(word) > 1 for word in words(row.text)) < FEWEST_CASED or row.text.upper() == row.text.lower():
            continue
        way = capitals if row.text.isupper() else small if row.text.islower() else mixed
        way.append(row)
    yield from two_ways(CASING, capitals, [*mixed, *small], ("capitals only", "small letters"))
    yield from two_ways(CASING, small, mixed, ("no capital letter", "some"))


FEWEST_ENDED = 3  # words: a word alone may stand without
ENDS = frozenset(["Po", "Pe", "Pf", "Pd", "Pi", "Ps"])  # Unicode's categories of what may end a sentence

PUNCTUATION = Kind(
    name="two ways of punctuation",
    severity=Severity.WARNING,
    means="Some rows end with a full stop or the like, others do not. The model cannot know which to write.",
    remedy="Write all rows in one way, best with punctuation: then the model keeps what it knows.",
)


@check(PUNCTUATION, place=23)
def find_two_punctuations(material: Material) -> Iterator[Finding]:
    ended, open_ended = [], []
    for row in material.spoken:
        if len(words(row.text)) >= FEWEST_ENDED:
            (ended if unicodedata.category(row.text[-1]) in ENDS else open_ended).append(row)
    return two_ways(PUNCTUATION, open_ended, ended, ("no punctuation at the end", "some"))
