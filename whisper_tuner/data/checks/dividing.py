"""Where a long clip is cut, and which part of its transcript is said in which piece, as far as that is certain.

Cuts are in the pauses between what is said. A model has written what it hears in each piece. The transcript is cut
where its parts differ least from that, and only where any other place is clearly worse: a word that the model has not
heard could belong to either side.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import pairwise

import numpy as np

from whisper_tuner.data.checks.facts import FAINTEST_DB, FRAME_S, frame_levels, silence_below
from whisper_tuner.languages import UNSPACED

SHORTEST_PAUSE_S = 0.2  # before a t or a k nothing sounds for up to 0.15 s, and that is inside of words
EDGE_S = 0.3  # of silence that a piece keeps at each end: a first or last sound may be quieter than the limit
_SHORTEST_SHARE = 0.5  # of the longest piece: many short pieces teach less of what stands beside what
LEAST_WORSE = 2  # letters and words by which every other place must be worse: one letter is often misheard
MOST_DIFFERENT = 0.5  # of a piece's letters: beyond that, it is another text
NEAR = {True: 8, False: 4}  # words beside a cut, of which half must have been heard; True: characters
_SLACK = 4  # words by which a place may be worse than the best one, and still be compared by letters
_MOST_PLACES = 60
_WORD = re.compile(r"\S+\s*")
_JOINED_BELOW = "\u0e00"  # letters of scripts with spaces, such as Latin ones among Japanese: they make words
_SENTENCE_ENDS = ".?!…:»”\"'"

MISFIT = "the text does not fit what is heard there"

Normalize = Callable[[str], str]
Letters = Callable[[int, int, int], int]
"""By how many letters the words from the first to before the second number differ from what is heard in a piece."""
Span = tuple[float, float]
"""From and to, in seconds."""


class NoPause(Exception):
    """at: where the speech begins that is too long, in seconds; None if nothing is said at all."""

    def __init__(self, at: float | None = None):
        super().__init__(at)
        self.at = at


def spoken(waveform: np.ndarray, rate: int) -> list[Span]:
    """Find the spans that sound without a pause. waveform: mono float32 [n]."""
    frames = frame_levels(waveform - waveform.mean(), rate)
    sounds = np.flatnonzero(frames > max(silence_below(frames), FAINTEST_DB))
    if not len(sounds):
        return []
    ends = np.flatnonzero(np.diff(sounds) > math.ceil(SHORTEST_PAUSE_S / FRAME_S))
    first, last = np.append(sounds[0], sounds[ends + 1]), np.append(sounds[ends], sounds[-1])
    n = max(1, round(FRAME_S * rate))
    return [(begin * n / rate, (end + 1) * n / rate) for begin, end in zip(first.tolist(), last.tolist(), strict=True)]


def pieces(said: list[Span], longest_s: float) -> list[Span]:
    """Pieces of at most longest_s, cut in the longest pauses; of silence each keeps EDGE_S at its ends, no more.

    said: see `spoken`. Raises NoPause.
    """
    if not said:
        raise NoPause
    room = longest_s - 2 * EDGE_S
    cuts = [0]
    while cuts[-1] < len(said):
        begins = said[cuts[-1]][0]
        fit = [number for number in range(cuts[-1], len(said)) if said[number][1] - begins <= room]
        if not fit:
            raise NoPause(begins)
        rest = fit[-1] + 1 == len(said)
        enough = [number for number in fit if said[number][1] - begins >= _SHORTEST_SHARE * longest_s] or fit
        cuts.append(len(said) if rest else 1 + max(enough, key=lambda number: said[number + 1][0] - said[number][1]))
    found = []
    for first, end in pairwise(cuts):
        (begins, _), (_, ends) = said[first], said[end - 1]
        before = (said[first - 1][1] + begins) / 2 if first else 0.0
        after = (ends + said[end][0]) / 2 if end < len(said) else math.inf
        found.append((max(before, begins - EDGE_S, 0.0), min(after, ends + EDGE_S)))
    return found


class Unsure(Exception):
    """piece: the number of the piece before the cut, or of the piece that is not certain; the first is 0."""

    def __init__(self, piece: int, what: str):
        super().__init__(what)
        self.piece = piece


def words_of(text: str, language: str | None) -> list[str]:
    """Cut a text into words, each with the space after it, or into characters where there are no spaces.

    Joined they are the text. A mark that nobody says stays with the word that it belongs to.
    """
    text = text.strip()
    found: list[str] = []
    opening = ""
    for unit in _characters(text) if language in UNSPACED else _WORD.findall(text):
        kind, ends = unicodedata.category(unit[0]), bool(found) and found[-1].rstrip()[-1] in _SENTENCE_ENDS
        opens = kind in ("Ps", "Pi") or unit[0] in "¿¡" or (kind == "Pd" and ends)  # - Yes. - No.
        if any(char.isalnum() for char in unit):
            found.append(opening + unit)
            opening = ""
        elif opening or opens or not found:
            opening += unit
        else:
            found[-1] += unit
    if opening:
        found[-1:] = ["".join(found[-1:]) + opening]
    return found


def _characters(text: str) -> list[str]:
    found: list[str] = []
    for char in text:
        joins = unicodedata.category(char)[0] == "M" or char.isspace()
        joins |= _makes_words(char) and bool(found) and _makes_words(found[-1][-1])
        if joins and found:
            found[-1] += char
        else:
            found.append(char)
    return found


def _makes_words(char: str) -> bool:
    return char.isalnum() and char < _JOINED_BELOW


def divided(text: str, heard: Sequence[str], *, language: str | None, normalize: Normalize) -> list[str]:
    """The part of `text` for each piece, in order: together they have each word once. heard: what a model wrote.

    language: of the text, a code. Raises Unsure.
    """
    plain_of = cache(lambda word: normalize(word).strip())  # the same few words come again and again
    words = words_of(text, language)
    others = [words_of(one, language) for one in heard]
    if not words:
        raise Unsure(0, "there is no text")
    if silent := [piece for piece, one in enumerate(others) if not one]:
        raise Unsure(silent[0], "the model hears nothing there")
    plain, plain_others = [plain_of(word) for word in words], [[plain_of(word) for word in one] for one in others]
    texts = ["".join(normalize(one).split()) for one in heard]

    def letters(first: int, last: int, piece: int) -> int:
        own = "".join(normalize("".join(words[first:last])).split())
        one, other = (np.array([*map(ord, text)], dtype=np.int64) for text in (own, texts[piece]))
        return int(_distances(one, other, [len(other)])[len(other)][-1])

    totals = _totals(plain, plain_others)
    rough = [int(total.argmin()) for total in totals] + [len(words)]
    cuts = [0]
    for piece, total in enumerate(totals):
        cuts.append(_cut(words, total, (cuts[-1], rough[piece + 1]), piece, letters))
    cuts.append(len(words))
    _check_certain(plain, plain_others, cuts, NEAR[language in UNSPACED])
    for piece, (first, last) in enumerate(pairwise(cuts)):
        if letters(first, last, piece) > MOST_DIFFERENT * len("".join(plain[first:last])):
            raise Unsure(piece, MISFIT)
    return ["".join(words[first:last]).strip() for first, last in pairwise(cuts)]


def _cut(words: Sequence[str], total: np.ndarray, between: tuple[int, int], piece: int, letters: Letters) -> int:
    """Find where the text is cut after this piece. total: see _totals. between: the cuts before and after it."""
    before, after = between
    places = [place for place in range(before, after + 1) if total[place] <= total.min() + _SLACK]
    if not places or len(places) > _MOST_PLACES:
        raise Unsure(piece, MISFIT)
    sides = ((place, letters(before, place, piece) + letters(place, after, piece + 1)) for place in places)
    best, *others = sorted((different + int(total[place]), place) for place, different in sides)
    if others and others[0][0] - best[0] < LEAST_WORSE:
        first, last = sorted((best[1], others[0][1]))
        raise Unsure(piece, f"'{''.join(words[first:last]).strip()}' may belong before or after the cut")
    return best[1]


def _check_certain(words: Sequence[str], heard: Sequence[Sequence[str]], cuts: Sequence[int], near: int) -> None:
    """Raises Unsure for a piece without text, and for a cut beside which the text is not what was heard."""
    for piece, (first, last) in enumerate(pairwise(cuts)):
        if first == last:
            raise Unsure(piece, "nothing of the text is said there")
        begins = words[first:last][:near], heard[piece][: 2 * near]
        ends = words[first:last][-near:], heard[piece][-2 * near :]
        if piece and not _alike(*begins):
            raise Unsure(piece - 1, "the words after the cut are not those that are heard")
        if piece + 1 < len(heard) and not _alike(*ends):
            raise Unsure(piece, "the words before the cut are not those that are heard")


def _alike(words: Sequence[str], heard: Sequence[str]) -> bool:
    same = sum(block.size for block in SequenceMatcher(None, words, heard, autojunk=False).get_matching_blocks())
    return 2 * same >= len(words)


def _totals(words: Sequence[str], heard: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Count, for each cut between pieces and each place in the text, how many words differ if it is cut there."""
    numbers: dict[str, int] = {}
    own = np.array([numbers.setdefault(word, len(numbers)) for word in words])
    other = np.array([numbers.setdefault(word, len(numbers)) for one in heard for word in one])
    ends = np.cumsum([len(one) for one in heard])[:-1].tolist()
    before = _distances(own, other, ends)
    after = _distances(own[::-1], other[::-1], [len(other) - end for end in ends])
    return [before[end] + after[len(other) - end][::-1] for end in ends]


def _distances(own: np.ndarray, other: np.ndarray, ends: Sequence[int]) -> dict[int, np.ndarray]:
    """Edit distances (Levenshtein) of each beginning of `own`, int [len + 1], from other[:end], for each of `ends`."""
    steps = np.arange(len(own) + 1)
    row, found = steps, {0: steps}
    for number, one in enumerate(other, 1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (own != one))
        # Along the row each missing word costs 1 more: a running minimum of what is left without these steps.
        row = np.minimum.accumulate(np.append(number, changed) - steps) + steps
        if number in ends:
            found[number] = row
    return found
