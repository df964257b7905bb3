"""Texts in another script, language or way of writing than the others, and words that mix two scripts."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from whisper_tuner.data.checks.finding import Finding, Kind, Severity, check, of_row
from whisper_tuner.data.checks.material import Material, Row
from whisper_tuner.languages import text_language
from whisper_tuner.text import words

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
    """Return the scripts of a language, given by its code; none for an empty code."""
    if language in _BOTH:
        return frozenset(_BOTH[language])
    own = frozenset(script for script, languages in _OF_LANGUAGES.items() if language in languages.split())
    return own or (frozenset({LATIN}) if language else frozenset())


@lru_cache(maxsize=8192)
def script(char: str) -> str:
    """Return the script of a letter, '' for anything else."""
    if not char.isalpha() or unicodedata.category(char) == "Lm" or char in "ªºµ":
        return ""
    name = unicodedata.name(char, "").split(" ")[0]
    name = name.removeprefix("FULLWIDTH") or "Latin"
    return _NAMES.get(name, name.capitalize())


def letters_by_script(text: str) -> Counter[str]:
    """Count the letters of each script."""
    found = Counter(map(script, text))
    del found[""]
    return found


def main_script(text: str) -> str:
    """Return the script of most of its letters, '' if it has none."""
    return max(found, key=found.__getitem__) if (found := letters_by_script(text)) else ""


USUAL_SHARE = 0.05  # of a set's letters: a script with fewer is none that the set is written in
FEWEST_FOREIGN = 2  # letters of the other script: a single one may be a sign, as in β or α
MIXED = ({LATIN, CYRILLIC}, {LATIN, GREEK}, {CYRILLIC, GREEK})  # have letters that look the same

WRONG_SCRIPT = Kind(
    name="wrong script",
    severity=Severity.WARNING,
    means="Most of the text is in letters that neither the language nor the set has: another language, or nonsense.",
    remedy="Correct the text or give the row its language. Remove the row if it is another language by mistake.",
)
LOOKALIKE = Kind(
    name="look-alike letters",
    severity=Severity.WARNING,
    means="A word mixes scripts, as with a Cyrillic а among Latin letters. It looks right, but has other tokens.",
    remedy="Type the word anew.",
)


@check(WRONG_SCRIPT, LOOKALIKE, place=15)
def find_wrong_scripts(material: Material) -> Iterator[Finding]:
    every: Counter[str] = Counter()
    for row in material.spoken:
        every.update(letters_by_script(row.text))
    usual = frozenset(name for name, count in every.items() if count >= USUAL_SHARE * every.total())
    known = scripts_of(material.language) or usual
    for row in material.spoken:
        if not (found := letters_by_script(row.text)):
            continue
        expected = (scripts_of(row.sample.language) if row.sample.language else known) or known
        foreign = {name: count for name, count in found.items() if name not in expected}
        by_word = ((word, set(letters_by_script(word))) for word in (words(row.text) if len(found) > 1 else ()))
        if mixed := next((pair for pair in by_word if any(both <= pair[1] for both in MIXED)), None):
            yield of_row(LOOKALIKE, row, f"'{mixed[0]}' mixes {' and '.join(sorted(mixed[1]))} letters")
        elif sum(foreign.values()) >= max(FEWEST_FOREIGN, found.total() / 2):
            share = 100 * sum(foreign.values()) / found.total()
            what = f"{share:.0f} % of its letters are {', '.join(foreign)}, not {' or '.join(sorted(expected))}"
            yield of_row(WRONG_SCRIPT, row, what, badness=share)


# Words that no other of these languages has among its frequent ones are what decides; those of two count for both.
COMMON = {
    "en": "the and of to in is that it was for with as you this have are on not be at they from your will please what",
    "fr": "le la les et de des du un une est que qui dans pour pas sur au avec ce il elle nous vous je ne cette être",
    "de": "der die das und ist nicht ein eine mit den dem zu von auf für sich des im ich sie wir auch es wie bei noch",
    "es": "el la los las y de que en un una es por con para no se del al lo como más pero su sus está muy yo",
    "it": "il lo la gli e di che in un una è per non con del della si sono come più ma anche alla nel questo ho",
    "pt": "o a os as e de que em um uma é por não com para do da no na se mais como mas ao está você isso",
    "nl": "de het een en van is dat niet in op te zijn met voor die er aan maar ook als wordt bij naar heeft ik",
    "pl": "i w na z się nie to że do jest jak po co tak ale o za od przez czy dla już tylko był jego są",
    "sv": "och att det som en på är av för med den till inte har de om ett han men var jag sig från vi så",
    "da": "og at det som en på er af for med den til ikke har de om et han men var jeg sig fra vi så",
    "cs": "a se v na je že s z do o to i jako za by ale od po jsem tak pro při jsou nebo který jeho",
    "tr": "ve bir bu da de için ile ne çok gibi daha var ben o kadar olarak sonra değil mi ama en olan ki",
    "id": "yang dan di ini itu dengan untuk dari tidak ada pada akan saya ke dalam juga adalah karena oleh bisa",
}
_WORDS = {language: frozenset(text.split()) for language, text in COMMON.items()}
_WORD = re.compile(r"[^\W\d_]+")
FEWEST_COMMON = 4  # frequent words of the other language in one text, of which there are few
COMMON_SHARE = 0.3  # of its words
OWN_SHARE = 0.25  # of these, that may be of the set's own language as well: 'de' and 'la' are of several
SURE = 1.5  # times as many as of the second: so a set's language is known

WRONG_LANGUAGE = Kind(
    name="wrong language",
    severity=Severity.WARNING,
    means="The text has the short words of another language than the set. The model learns to mix them up.",
    remedy="Give the row its own language in a column `language`, or remove it. Names and titles are no fault.",
)


@check(WRONG_LANGUAGE, place=16)
def find_wrong_languages(material: Material) -> Iterator[Finding]:
    own = material.language if material.language in _WORDS else _usual_language(material)
    if not own:
        return
    for row in material.spoken:
        expected = text_language(row.sample.language or own, "transcribe") or own
        said = [word.lower() for word in _WORD.findall(row.text)]
        found = _words_by_language(said)
        other, count = max(found.items(), key=lambda pair: pair[1], default=("", 0))
        few = found[expected] <= OWN_SHARE * count
        if other != expected and expected in _WORDS and count >= max(FEWEST_COMMON, COMMON_SHARE * len(said)) and few:
            what = f"{count} of its {len(said)} words are frequent in '{other}', {found[expected]} in '{expected}'"
            yield of_row(WRONG_LANGUAGE, row, what, badness=count / len(said))


def _words_by_language(said: list[str]) -> Mapping[str, int]:
    """Count how many of these words are frequent in each language."""
    return Counter({language: sum(word in known for word in said) for language, known in _WORDS.items()})


def _usual_language(material: Material) -> str:
    """Guess the set's language by its own texts, '' where that is not clear."""
    every: Counter[str] = Counter()
    for row in material.spoken:
        every.update(_words_by_language([word.lower() for word in _WORD.findall(row.text)]))
    (first, most), (_, second) = every.most_common(2) if every else (("", 0), ("", 0))
    return first if most >= FEWEST_COMMON and most > SURE * second else ""


# Two ways of writing in one set: the rows of the rarer way, or the set as a whole if both are usual in it.

RARE = 0.1  # share of the rows that show either way: up to here its rows are named, above it the set has two ways
FEWEST = 10  # rows of the usual way, without which there is no usual way


def two_ways(
    kind: Kind, one: Sequence[Row], other: Sequence[Row], names: tuple[str, str], among: str = ""
) -> Iterator[Finding]:
    """Find the rows of the rarer way. names: what each way is called, as in 'digits' and 'words'.

    among: which rows are looked at, as in 'of three words or more', if not all.
    """
    (rare, rare_name), (usual, usual_name) = sorted([(one, names[0]), (other, names[1])], key=lambda way: len(way[0]))
    every = len(rare) + len(usual)
    if not rare or len(usual) < FEWEST:
        return
    if len(rare) <= RARE * every:
        for row in rare:
            yield of_row(kind, row, f"{rare_name}, where {len(usual)} of {every} rows{among} have {usual_name}")
        return
    what = f"{len(rare)} of {every} rows{among} have {rare_name}, {len(usual)} have {usual_name}"
    yield of_row(kind, rare[0], what, among=rare)


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
    remedy="Choose one way, and write all rows so. WER counts both as the same in English, other programs never do.",
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


# Words of two letters or more: less may be an abbreviation, also one that is spelled, or half a sentence.
FEWEST_CASED, WORDY = 3, " of three words or more"

CASING = Kind(
    name="two ways of casing",
    severity=Severity.WARNING,
    means="Some rows are in capitals only, or have none where the rest begins with one. Whisper writes as in a book.",
    remedy="Write all rows in one way, best as in a book: then the model keeps what it knows.",
)


@check(CASING, place=22)
def find_two_casings(material: Material) -> Iterator[Finding]:
    capitals: list[Row] = []
    mixed: list[Row] = []
    small: list[Row] = []
    for row in material.spoken:
        if sum(len(word) > 1 for word in words(row.text)) < FEWEST_CASED or row.text.upper() == row.text.lower():
            continue
        way = capitals if row.text.isupper() else small if row.text.islower() else mixed
        way.append(row)
    yield from two_ways(CASING, capitals, [*mixed, *small], ("capitals only", "small letters"), WORDY)
    yield from two_ways(CASING, small, mixed, ("no capital letter", "some"), WORDY)


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
    ended: list[Row] = []
    open_ended: list[Row] = []
    for row in material.spoken:
        if len(words(row.text)) >= FEWEST_ENDED:
            (ended if unicodedata.category(row.text[-1]) in ENDS else open_ended).append(row)
    return two_ways(PUNCTUATION, open_ended, ended, ("no punctuation at the end", "some"), WORDY)
