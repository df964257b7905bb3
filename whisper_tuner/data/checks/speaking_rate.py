"""Far more or far less text than can be said in a clip's time."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material, Row, letters, words
from whisper_tuner.data.checks.scripts import SYLLABIC, main_script

# Letters a second. Fast readers of any alphabet reach 20, the fastest talkers 25; a Chinese character or a kana is a
# syllable, of which nobody says over 12. Vowels are not written in Arabic or Hebrew, so these stay below as well.
FASTEST, FASTEST_SYLLABIC = 32.0, 15.0
FASTEST_WORDS = 8.0  # a second; auctioneers have 6
FEWEST_WORDS = 3
TIMES = 2.2  # the set's median, by which a clip may be faster: the highest of 1,046 real ones is twice as fast
SLOWER = 5.0  # ... and slower
LONG_S = 4.0  # of sound, from which on a slow clip is suspicious: a letter may be drawn out for a second
SLOWEST = 1.0  # letters a second
FEWEST_LETTERS = 10  # a rate of fewer tells nothing, and is no part of the median
MARGIN_S = 0.1  # silence at the edges is not measured exactly

IMPOSSIBLE = Kind(
    name="impossible speaking rate",
    severity=Severity.ERROR,
    means=(
        "Nobody can say so much in this time: the text is another clip's, the clip is cut, or the text describes a "
        "sound. From a clip of 0.4 s with five words a model learned to repeat itself, and WER went from 8 to 48."
    ),
    remedy="Listen to it, and correct the text or the clip.",
)
UNUSUAL = Kind(
    name="unusual speaking rate",
    severity=Severity.WARNING,
    means="The text is far longer or shorter than those of other clips of this length: it may be another clip's.",
    remedy="Listen to it. Words at the end are often missing, in the text or in the clip.",
)


def find(material: Material) -> Iterator[Finding]:
    rows = [(row, _seconds(material, row)) for row in material.spoken]
    rates = [letters(row.text) / seconds for row, seconds in rows if letters(row.text) >= FEWEST_LETTERS]
    usual = median(rates) if len(rates) >= FEWEST_LETTERS else 0.0
    for row, seconds in rows:
        said, many = letters(row.text), len(words(row.text))
        rate, spoken = said / seconds, many / row.sample.duration_s
        fastest = FASTEST_SYLLABIC if main_script(row.text) in SYLLABIC else FASTEST
        told = f"{said} letters in {seconds:.1f} s of sound"
        if rate > fastest or (many >= FEWEST_WORDS and spoken > FASTEST_WORDS):
            yield of_row(IMPOSSIBLE, row, f"{many} words, {told}: {rate:.0f} a second", badness=rate)
        elif usual and said >= FEWEST_LETTERS and rate > TIMES * usual:
            yield of_row(UNUSUAL, row, f"{told}: {rate:.0f} a second, usual are {usual:.0f}", badness=rate / usual)
        elif seconds > LONG_S and rate < max(SLOWEST, usual / SLOWER):
            compared = f", usual are {usual:.0f}" if usual else ""
            yield of_row(UNUSUAL, row, f"{told}: {rate:.1f} a second{compared}", badness=usual / max(rate, 0.01))


def _seconds(material: Material, row: Row) -> float:
    """Of sound, where the audio was decoded."""
    facts = material.facts.get(row.sample.audio)
    if facts and not facts.problem and facts.sounding_s:
        return min(facts.sounding_s + MARGIN_S, facts.seconds)
    return row.sample.duration_s


CHECK = Check(kinds=(IMPOSSIBLE, UNUSUAL), find=find)
