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
Edit = Callable[[bytes, int, int, bytes], bytes]


def damaged(*examples: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, or one of the examples after some edits."""
    return st.one_of(st.binary(max_size=60), edited(*examples), edited(*examples))


def damaged_json(*documents: Any) -> st.SearchStrategy[bytes]:
    """The same of documents; many are JSON still, with other values, or with keys renamed or missing."""
    texts = [json.dumps(document).encode() for document in documents]
    return st.one_of(damaged(*texts), rewritten(*documents), rewritten(*documents))


@st.composite
def edited(draw: st.DrawFn, *examples: bytes) -> bytes:
    data = draw(st.sampled_from(examples))
    for edit in draw(st.lists(st.sampled_from(EDITS), min_size=1, max_size=3)):
        # Most of what matters stands at the beginning: headers, first lines.
        places = st.one_of(st.integers(0, len(data)), st.integers(0, min(64, len(data))))
        start, end = sorted((draw(places), draw(places)))
        data = edit(data, start, end, draw(st.sampled_from(PIECES)))
    return data


@st.composite
def rewritten(draw: st.DrawFn, *documents: Any) -> bytes:
    document = draw(st.sampled_from(documents))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from([*places_in(document)]))
        value = draw(st.sampled_from([*VALUES, *(at(document, other) for other in places_in(document))]))
        document = draw(st.sampled_from((replaced, replaced, removed, renamed)))(document, place, value)
    text = json.dumps(document, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from((None, 1))))
    return text.encode("utf-8", "surrogatepass")


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


def _double_line(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[: end % len(lines)], *lines[start % len(lines) :]]) if lines else data


def _windows(data: bytes, start: int, end: int, piece: bytes) -> bytes:
    return b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")


EDITS: tuple[Edit, ...] = (
    *(_cut, _truncate, _double, _insert, _insert, _insert, _overwrite, _flip, _flip),
    *(_word, _word, _word, _word, _other_word, _other_word, _swap, _drop_line, _double_line, _windows),
)

Place = tuple[int | str, ...]


def places_in(document: Any, place: Place = ()) -> Iterator[Place]:
    """The way to every value in a JSON document, itself included."""
    yield place
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield from places_in(value, (*place, key))


def at(document: Any, place: Place) -> Any:
    return at(document[place[0]], place[1:]) if place else document


def replaced(document: Any, place: Place, value: Any) -> Any:
    if not place:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[place[0]] = replaced(document[place[0]], place[1:], value)
    return copy


def removed(document: Any, place: Place, value: Any = None) -> Any:
    if not place:
        return value
    *above, last = place
    inside = at(document, tuple(above))
    left = inside.items() if isinstance(inside, dict) else enumerate(inside)
    kept = [(key, item) for key, item in left if key != last]
    return replaced(document, tuple(above), dict(kept) if isinstance(inside, dict) else [item for _, item in kept])


def renamed(document: Any, place: Place, value: Any) -> Any:
    """Another key, or, in a list, the value once more."""
    if not place:
        return [document]
    *above, last = place
    inside = at(document, tuple(above))
    if isinstance(inside, dict):
        return replaced(document, tuple(above), {str(value) if key == last else key: inside[key] for key in inside})
    return replaced(document, tuple(above), [*inside, inside[last]])
