"""Names and terms that matter: how many of those that were said a model writes, and what it writes instead."""

from __future__ import annotations

import contextlib
import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from whisper_tuner.errors import ConfigError
from whisper_tuner.eval.predictions import align
from whisper_tuner.eval.wer import text_normalizer
from whisper_tuner.files import read_table, write_table

if TYPE_CHECKING:
    from whisper_tuner.eval.evaluation import Evaluation

TERMS = "terms.csv"  # in the folder of a test set's predictions
COLUMNS = ("term", "in_training", "said", "written", "found", "instead")
MOST_INSTEAD, MOST_UNSAID = 3, 10
NOTHING = "nothing"
MOST_BYTES = 1_000_000
Texts = Sequence[tuple[str, str]]
"""(reference, hypothesis) of each clip, after the normaliser."""


@dataclass(frozen=True, kw_only=True)
class TermCount:
    """A term in the clips of a test set: how often it was said, was written, and both in the same clip.

    in_training: how many training clips have it. instead: what was written in its place, most frequent first.
    """

    term: str
    in_training: int = 0
    said: int = 0
    written: int = 0
    found: int = 0
    instead: str = ""


def read_terms(path: Path) -> tuple[str, ...]:
    """Read a list of terms, one a line; empty lines and those that begin with # are left out. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ConfigError(f"{path}: more than {MOST_BYTES:,} bytes", remedy="Name a list of terms, one a line.")
        lines = [line.strip() for line in text.decode("utf-8-sig").splitlines()]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", remedy="terms: a list of terms, one a line.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text", remedy="Save it as UTF-8, one term a line.") from None
    if not (terms := tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))):
        raise ConfigError(f"{path}: it has no term", remedy="Write one term a line.")
    return terms


def count_terms(
    terms: Sequence[str], normalize: Callable[[str], str], texts: Texts, training: Iterable[str] = ()
) -> tuple[list[TermCount], list[tuple[int, int]]]:
    """Count each term in normalised texts, as whole words; `training` are the texts that were trained, as written.

    Also returns (terms missed, terms said) of each clip, as `wer_difference` takes them.
    """
    words_of = [normalize(term).split() for term in terms]
    trained = texts_with(terms, normalize, training)
    counts, instead = [[0, 0, 0] for _ in terms], [Counter[str]() for _ in terms]  # said, written, found
    missed = []
    for reference, hypothesis in texts:
        said, heard, of_clip = reference.split(), hypothesis.split(), [0, 0]
        known = {*said, *heard}
        for number, words in enumerate(words_of):
            if not words or words[0] not in known:
                continue
            in_said, in_heard = len([*_places(words, said)]), len([*_places(words, heard)])
            found = min(in_said, in_heard)
            counts[number] = [a + b for a, b in zip(counts[number], (in_said, in_heard, found), strict=True)]
            of_clip = [of_clip[0] + in_said - found, of_clip[1] + in_said]
            if in_said > in_heard:
                instead[number].update(_instead(words, reference, hypothesis))
        missed.append((of_clip[0], of_clip[1]))
    rows = [
        TermCount(
            term=term,
            in_training=len(having),
            said=said,
            written=written,
            found=found,
            instead=", ".join(f"{text} ({n})" if n > 1 else text for text, n in heard.most_common(MOST_INSTEAD)),
        )
        for term, having, (said, written, found), heard in zip(terms, trained, counts, instead, strict=True)
    ]
    return rows, missed


def texts_with(terms: Sequence[str], normalize: Callable[[str], str], texts: Iterable[str]) -> list[list[int]]:
    """Return the numbers of the texts that have each term as whole words, after the normaliser."""
    as_words = [normalize(text).split() for text in texts]
    known = [{*words} for words in as_words]
    having = []
    for words in (normalize(term).split() for term in terms):
        likely = (number for number, those in enumerate(known) if words and words[0] in those)
        having.append([number for number in likely if any(True for _ in _places(words, as_words[number]))])
    return having


def terms_in(
    terms: Sequence[str], found: Evaluation, training: Iterable[str] = ()
) -> tuple[list[TermCount], list[tuple[int, int]]]:
    """Count terms in what a model wrote, see `count_terms`."""
    return count_terms(terms, text_normalizer(found.written), [row.normalized for row in found.rows], training)


def shares(counts: Sequence[TermCount]) -> tuple[float | None, float | None]:
    """Return recall and precision of all terms together, in per cent: of those that were said the share that was
    written, and of those that were written the share that was said. None where there are none.
    """
    said, written, found = (sum(getattr(one, name) for one in counts) for name in ("said", "written", "found"))
    return 100 * found / said if said else None, 100 * found / written if written else None


def told_unsaid(terms: Sequence[str], where: str = "") -> str:
    """Name terms that no clip of a test set has, so nothing is known of them; "" for none. where: such as " in it"."""
    more = f" and {len(terms) - MOST_UNSAID} more" if len(terms) > MOST_UNSAID else ""
    return f"Terms never said{where}: {', '.join(terms[:MOST_UNSAID])}{more}." if terms else ""


def write_terms(path: Path, counts: Iterable[TermCount]) -> None:
    write_table(path, COLUMNS, [[getattr(one, name) for name in COLUMNS] for one in counts])


def read_counts(path: Path) -> list[TermCount]:
    """Read what write_terms wrote. Damaged rows are left out; of a file that cannot be read, all."""
    counts = []
    with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error), path.open(encoding="utf-8", newline="") as file:
        for row in read_table(file):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                numbers = {name: int(row[name]) for name in ("in_training", "said", "written", "found")}
                counts.append(TermCount(term=row["term"], instead=row["instead"], **numbers))
    return counts


def _places(words: Sequence[str], text: Sequence[str]) -> Iterator[int]:
    """Yield where the words stand one after the other in a text; places do not overlap."""
    at = 0
    while at + len(words) <= len(text):
        if text[at : at + len(words)] == words:
            yield at
            at += len(words)
        else:
            at += 1


def _instead(words: Sequence[str], reference: str, hypothesis: str) -> Iterator[str]:
    """Yield what stands in the hypothesis where the reference has the term, for each time that it is not the term."""
    pairs = align(reference, hypothesis)
    said = [place for place, pair in enumerate(pairs) if pair.reference]
    for at in _places(words, [pairs[place].reference for place in said]):
        first, last = said[at], said[at + len(words) - 1]
        heard = [pair.hypothesis for pair in pairs[first : last + 1] if pair.hypothesis]
        if heard != words:
            yield " ".join(heard) or NOTHING
