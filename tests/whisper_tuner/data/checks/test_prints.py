"""Prints are found as if each had been compared with each, and a leak is one whatever else sounds like it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from whisper_tuner.data.checks.facts import PRINT_BITS, Facts
from whisper_tuner.data.checks.leaks import ALIKE, Prints, find_duplicate_audio, find_leaked_audio
from whisper_tuner.data.checks.material import TEST, TRAIN, Material, Row
from whisper_tuner.data.dataset import Manifest, Sample


def facts(bits: int, seconds: float = 2.0) -> Facts:
    written = f"{bits:0{PRINT_BITS // 4}x}"
    return Facts(print=written, digest=written, begins_s=1.0, seconds=1.0 + seconds)


def row(name: str, line: int = 2, part: str = TRAIN) -> Row:
    return Row(
        part, Path(f"{part}.csv"), Sample(id=name, audio=Path(f"{name}.wav"), text=name, duration_s=2, line=line)
    )


def flipped(bits: int, places) -> int:
    for place in places:
        bits ^= 1 << place
    return bits


@pytest.mark.parametrize("seed", range(5))
def test_what_differs_in_few_bits_is_found_and_what_differs_in_more_is_not(seed):
    chance = random.Random(seed)
    known = [chance.getrandbits(PRINT_BITS) for _ in range(100)]
    prints = Prints()
    for number, bits in enumerate(known):
        prints.add(row(str(number), number + 2), facts(bits))
    near, far = int(ALIKE * PRINT_BITS), int(ALIKE * PRINT_BITS) + 1
    for number, bits in enumerate(known):
        slices = chance.sample(range(7), 7)  # one of eight stays whole
        places = [16 * place + chance.randrange(16) for place in slices]
        assert prints.like(facts(flipped(bits, places))).sample.line == number + 2
        assert prints.like(facts(flipped(bits, range(near)))).sample.line == number + 2
        assert prints.like(facts(flipped(bits, range(far)))) is None
        assert prints.like(facts(bits, seconds=3.0)) is None
    assert prints.like(replace(facts(0), print="")) is None


def test_a_leak_is_told_also_where_another_clip_of_the_same_part_sounds_alike():
    bits = random.Random(0).getrandbits(PRINT_BITS)
    prints = {"first": bits, "second": flipped(bits, [0]), "tested": flipped(bits, [0, 20, 40, 60])}
    parts = {"first": TRAIN, "second": TRAIN, "tested": TEST}
    rows = {name: row(name, line, parts[name]) for line, name in enumerate(prints, 2)}
    manifests = {
        part: Manifest(Path(f"{part}.csv"), tuple(rows[name].sample for name in rows if parts[name] == part), ())
        for part in (TRAIN, TEST)
    }
    known = {rows[name].sample.audio: facts(bits) for name, bits in prints.items()}
    material = Material(manifests=manifests, facts=known)
    assert [(found.id, found.what) for found in find_leaked_audio(material)] == [
        ("first", "sounds like test.csv line 4 (test)"),
        ("second", "sounds like test.csv line 4 (test)"),
    ]
    assert [found.id for found in find_duplicate_audio(material)] == ["second"]
