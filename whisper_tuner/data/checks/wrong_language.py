"""Texts in another language than the others, by the short words that each language has in every sentence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material
from whisper_tuner.languages import text_language

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
FEWEST = 4  # frequent words of the other language in one text, of which there are few
SHARE = 0.3  # of its words
OWN = 0.25  # of these, that may be of the set's own language as well: 'de' and 'la' are of several
SURE = 3.0  # times as many as of the second: so a set's language is known

KIND = Kind(
    name="wrong language",
    severity=Severity.WARNING,
    means="The text has the short words of another language than the set. The model learns to mix them up.",
    remedy="Give the row its own language in a column `language`, or remove it. Names and titles are no fault.",
)


def find(material: Material) -> Iterator[Finding]:
    own = material.language if material.language in _WORDS else _usual(material)
    if not own:
        return
    for row in material.spoken:
        expected = text_language(row.sample.language or own, "transcribe") or own
        said = [word.lower() for word in _WORD.findall(row.text)]
        found = counted(said)
        other, count = max(found.items(), key=lambda pair: pair[1], default=("", 0))
        few = found[expected] <= OWN * count
        if other != expected and expected in _WORDS and count >= max(FEWEST, SHARE * len(said)) and few:
            what = f"{count} of its {len(said)} words are frequent in '{other}', {found[expected]} in '{expected}'"
            yield of_row(KIND, row, what, badness=count / len(said))


def counted(said: list[str]) -> Mapping[str, int]:
    """How many of these words are frequent in each language."""
    return Counter({language: sum(word in known for word in said) for language, known in _WORDS.items()})


def _usual(material: Material) -> str:
    """The set's language by its own texts, '' where that is not clear."""
    every: Counter[str] = Counter()
    for row in material.spoken:
        every.update(counted([word.lower() for word in _WORD.findall(row.text)]))
    (first, most), (_, second) = every.most_common(2) if every else (("", 0), ("", 0))
    return first if most >= FEWEST and most > SURE / 2 * second else ""


CHECK = Check(kinds=(KIND,), find=find)
