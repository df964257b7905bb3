"""Valid examples with the damage that disks, editors, networks and people do to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

PIECES = (
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\r\n", b"\n", b"\n\n", b"\x0b", b"\x1e", b"\x7f"),
    *(text.encode() for text in ("\x85", "\u2028", "\u202e", "ﬁ", "а", "１", "İ", "🙂")),  # the а is Cyrillic
    *(b'"', b"'", b",", b"\t", b"\\", b"[", b"]", b"{", b"}", b":", b"=", b"#", b";", b" ", b"-", b"/", b"|", b"*"),
    *(b"\\ud800", b"\\u0000", b"~", b"~nobody/", b"~\0", b"../", b"[/b]", b"%s", b"${HOME}"),
    *(b"0", b"-1", b"1e999", b"-1e999", b"NaN", b"Infinity", b"null", b"true", b"{}", b"[]", b'""', b'"7"'),
    *(b"9" * 400, b"9" * 5000, b"a" * 9000, b"[" * 3000, b'{"a":' * 3000, b"a = \n" * 200),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 1.5, 2**63, 10**400, -(10**400), float("inf"), float("nan")),
    *("", " ", "x", "7", "\0", "\ud800", "а", "~\0", "~nobody/x", "/", "../../x", "[/b]", "-x", "9" * 400),
    *([], {}, [None], ["x"], [1, 2], {"x": 1}, [[]], [{}]),
)
WORD = rb"[\w.~/-]+"
ANYWHERE = st.integers(0, 2**20)
NEAR_THE_BEGINNING = st.integers(0, 64)  # where headers and first lines are


def damaged(*examples: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, or one of the examples after some edits."""
    places = ANYWHERE | NEAR_THE_BEGINNING
    edits = st.tuples(st.sampled_from(EDITS), places, places, st.sampled_from(PIECES))
    edited = st.builds(_edited, st.sampled_from(examples), st.lists(edits, min_size=1, max_size=3))
    return st.one_of(st.binary(max_size=60), edited, edited)


def damaged_json(*documents: Any) -> st.SearchStrategy[bytes]:
    """The same of documents; many are JSON still, with other values, or with keys renamed or missing."""
    changes = st.tuples(st.sampled_from(CHANGES), st.booleans(), ANYWHERE, ANYWHERE, st.sampled_from(VALUES))
    changed = st.builds(_changed, st.sampled_from(documents), st.lists(changes, min_size=1, max_size=3), st.booleans())
    return st.one_of(damaged(*(json.dumps(document).encode() for document in documents)), changed, changed)


# ---- Edits of bytes ---------------------------------------------------------------------------------------------

Edit = tuple[Callable[[bytes, int, int, bytes], bytes], int, int, bytes]


def _edited(data: bytes, edits: list[Edit]) -> bytes:
    for edit, one, other, piece in edits:
        start, end = sorted((one % (len(data) + 1), other % (len(data) + 1)))
        data = edit(data, start, end, piece)
    return data


def _cut(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    return data[:start] + data[end:]


def _truncate(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    return data[:end]


def _double(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    return data[:end] + data[start:]


def _insert(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    return data[:start] + piece + data[start:]


def _overwrite(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    return data[:start] + piece + data[start + len(piece) :]


def _flip(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    return data[:start] + bytes([data[start] ^ 1 << end % 8]) + data[start + 1 :] if start < len(data) else data


def _word(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    """A word becomes something else."""
    words = [*re.finditer(WORD, data)]
    if not words:
        return data
    first, last = words[start % len(words)].span()
    return data[:first] + piece + data[last:]


def _other_word(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    """A word becomes one of the others."""
    words = re.findall(WORD, data)
    return _word(data, start, end, words[end % len(words)]) if words else data


def _swap(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    """What stands between two places goes to the front."""
    return data[start:end] + data[:start] + data[end:]


def _drop_line(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(line for number, line in enumerate(lines) if number != start % len(lines))


def _double_lines(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[: end % len(lines)], *lines[start % len(lines) :]]) if lines else data


def _windows(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    return b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")


EDITS = (
    *(_cut, _truncate, _double, _insert, _insert, _insert, _overwrite, _flip, _flip),
    *(_word, _word, _word, _word, _other_word, _other_word, _swap, _drop_line, _double_lines, _windows),
)

# ---- Changes of JSON documents ----------------------------------------------------------------------------------

Place = tuple[int | str, ...]
Change = tuple[Callable[[Any, Place, Any], Any], bool, int, int, Any]


def _changed(document: Any, changes: list[Change], ascii_only: bool) -> bytes:
    for change, deep, one, other, value in changes:
        places = [*_places(document)]
        if other % 3 == 0:
            value = _at(document, places[other % len(places)])
        places = places if deep else [place for place in places if len(place) < 3]
        document = change(document, places[one % len(places)], value)
    return json.dumps(document, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


def _places(document: Any, above: Place = ()) -> Iterator[Place]:
    """The way to every value in a document, itself included."""
    yield above
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from _places(value, (*above, key))


def _at(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


def _replaced(document: Any, place: Place, value: Any) -> Any:
    if not place:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[place[0]] = _replaced(document[place[0]], place[1:], value)
    return copy


def _removed(document: Any, place: Place, value: Any) -> Any:
    if not place:
        return value
    inside = _at(document, place[:-1])
    if isinstance(inside, dict):
        kept: Any = {key: item for key, item in inside.items() if key != place[-1]}
    else:
        kept = [item for number, item in enumerate(inside) if number != place[-1]]
    return _replaced(document, place[:-1], kept)


def _renamed(document: Any, place: Place, value: Any) -> Any:
    """The same value under another key; in a list, once more."""
    if not place:
        return [document]
    inside = _at(document, place[:-1])
    if isinstance(inside, dict):
        other: Any = {str(value) if key == place[-1] else key: item for key, item in inside.items()}
    else:
        other = [*inside, inside[place[-1]]]
    return _replaced(document, place[:-1], other)


CHANGES = (_replaced, _replaced, _removed, _renamed)
