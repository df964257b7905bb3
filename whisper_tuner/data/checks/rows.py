"""Rows that training leaves out by itself, and texts that do not fit what is said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from whisper_tuner.data.checks.finding import Finding, Kind, Needs, Severity, check, of_row
from whisper_tuner.data.checks.language import SYLLABIC, main_script
from whisper_tuner.data.checks.material import TEST, Heard, Material, letters
from whisper_tuner.problems import Kind as Problem
from whisper_tuner.text import words

_WORDS = {  # kind -> what it means, and what to do
    Problem.COLUMNS: ("The row has more cells than the header, or a cell that is not text.", "Mend the row."),
    Problem.QUOTING: ("A quote is opened and never closed, or the other way round.", "Mend the row's quotes."),
    Problem.NO_AUDIO: ("There is no such audio file, or the row names none.", "Correct the path, or remove the row."),
    Problem.EVICTED: ("The file is in iCloud only.", "Download it: in Finder, Keep Downloaded."),
    Problem.UNREADABLE: ("The audio cannot be decoded.", "Convert it again, or remove the row."),
    Problem.EMPTY_AUDIO: ("The file has no audio, or too little for a single frame.", "Record it again."),
    Problem.TRUNCATED: ("The file ends before its header says.", "Copy it again."),
    Problem.NO_TEXT: (
        "The row has no transcript.",
        "Write what is said. If nobody speaks, no_speech = train makes use of the row.",
    ),
    Problem.TOO_LONG: (
        "The clip is longer than max_duration_s, or than the 30 s that Whisper hears at once.",
        "--fix with --model cuts it at pauses, and divides its text. If there are subtitles, an import cuts by them.",
    ),
    Problem.TOKENS: (
        "The text has more tokens than the decoder takes, usually 448 with its prompt.",
        "Cut the clip at a pause, and divide its text accordingly.",
    ),
    Problem.DURATION: (
        "The duration that the manifest states is not that of the file.",
        "Remove the column, so that durations are measured. If the row names the wrong file, correct it.",
    ),
    Problem.LANGUAGE: ("The model does not know the row's language.", "Correct it, or choose a multilingual model."),
    Problem.SAME_AUDIO: (
        "An earlier row of the manifest names the same file, with another text.",
        "Keep the right one.",
    ),
    Problem.SAME_ROW: ("An earlier row of the manifest has the same file and text.", "Remove one of them."),
}
UNUSABLE = {
    problem: Kind(name=str(problem), severity=Severity.ERROR, means=means, remedy=remedy, unusable=True)
    for problem, (means, remedy) in _WORDS.items()
}


@check(*UNUSABLE.values(), place=1)
def find_unusable(material: Material) -> Iterator[Finding]:
    for part, manifest in material.manifests.items():
        for found in manifest.problems:
            yield Finding(
                kind=UNUSABLE[found.kind], part=part, manifest=manifest.path, line=found.line, what=found.what
            )
    if (limit := material.limit) is None:
        return
    for row in material.rows:
        text, language = row.text, row.sample.language
        if row.part == TEST:  # its texts are not trained on
            continue
        if language and not limit.knows(language):
            yield of_row(UNUSABLE[Problem.LANGUAGE], row, f"the model does not know the language '{language}'")
        elif excess := limit.excess(text, language):
            yield of_row(UNUSABLE[Problem.TOKENS], row, excess)


# Letters a second. Fast readers of any alphabet reach 20, the fastest talkers 25; a Chinese character or a kana is a
# syllable, of which nobody says over 12. Vowels are not written in Arabic or Hebrew, so these stay below as well.
FASTEST, FASTEST_SYLLABIC = 32.0, 15.0
FASTEST_WORDS = 8.0  # a second; auctioneers have 6
FEWEST_WORDS = 3
TIMES_FASTER = 2.2  # the set's median, by which a clip may be faster: the highest of 1,046 real ones is twice as fast
TIMES_SLOWER = 5.0  # ... and slower
LONG_S = 4.0  # of sound, from which on a slow clip is suspicious: a letter may be drawn out for a second
SLOWEST = 1.0  # letters a second
FEWEST_LETTERS = 10  # the rate of fewer tells nothing, and is no part of the median
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


@check(IMPOSSIBLE, UNUSUAL, place=7)
def find_wrong_rates(material: Material) -> Iterator[Finding]:
    rows = []
    for row in material.spoken:  # with the seconds of sound where the audio was decoded, else those of the whole clip
        facts = material.facts.get(row.sample.audio)
        is_measured = facts and not facts.problem and facts.sounding_s
        seconds = min(facts.sounding_s + MARGIN_S, facts.seconds) if facts and is_measured else row.sample.duration_s
        rows.append((row, seconds))
    rates = [letters(row.text) / seconds for row, seconds in rows if letters(row.text) >= FEWEST_LETTERS]
    usual = median(rates) if len(rates) >= FEWEST_LETTERS else 0.0
    for row, seconds in rows:
        said, many = letters(row.text), len(words(row.text))
        rate, spoken = said / seconds, many / row.sample.duration_s
        fastest = FASTEST_SYLLABIC if main_script(row.text) in SYLLABIC else FASTEST
        told = f"{said} letters in {seconds:.1f} s of sound"
        if rate > fastest or (many >= FEWEST_WORDS and spoken > FASTEST_WORDS):
            yield of_row(IMPOSSIBLE, row, f"{many} words, {told}: {rate:.0f} a second", badness=rate)
        elif usual and said >= FEWEST_LETTERS and rate > TIMES_FASTER * usual:
            yield of_row(UNUSUAL, row, f"{told}: {rate:.0f} a second, usual are {usual:.0f}", badness=rate / usual)
        elif seconds > LONG_S and rate < max(SLOWEST, usual / TIMES_SLOWER):
            compared = f", usual are {usual:.0f}" if usual else ""
            yield of_row(UNUSUAL, row, f"{told}: {rate:.1f} a second{compared}", badness=usual / max(rate, 0.01))


CER = 0.5  # half of the text: a wrong transcript, or a clip that the model cannot understand
TIMES_USUAL = 3.0  # the set's median CER: what is usual in a set says nothing of one clip
CERTAIN = -0.7  # mean log-probability of what it heard: less is guessing
USELESS = 0.4  # median CER, from which on the model does not know the set's language well enough to judge
SHORT = 3  # letters: one letter of two is half

CONTRADICTED = Kind(
    name="contradicted",
    severity=Severity.WARNING,
    means="The model is certain that something else is said than the text says.",
    remedy="Listen to it. If the model is right, correct the text; if the text is right, keep it: it is worth most.",
)


@check(CONTRADICTED, needs=Needs.HEARD, place=10)
def find_contradicted(material: Material) -> Iterator[Finding]:
    usual = usual_cer(material)
    if usual > USELESS:
        return
    for row in material.spoken:
        if not (heard := material.heard.get((row.part, row.sample.line))):
            continue
        far = heard.cer >= CER and heard.cer > TIMES_USUAL * usual
        if far and heard.logprob > CERTAIN and max(letters(row.text), letters(heard.text)) > SHORT:
            what = f"heard: {heard.text[:80] or 'nothing'} (CER {100 * heard.cer:.0f}, {heard.logprob:.2f})"
            yield of_row(CONTRADICTED, row, what, badness=contradiction(heard))


def usual_cer(material: Material) -> float:
    """Return the median character error rate, 0 without a model."""
    return median(heard.cer for heard in material.heard.values()) if material.heard else 0.0


def contradiction(heard: Heard) -> float:
    """Rate how much a model contradicts a transcript: an error counts as much as it is sure of what it heard."""
    return min(heard.cer, 2.0) * math.exp(heard.logprob)
