"""Facts of clips, kept between checks and measured anew after a change; prints that hardly change.

Prints are found as if each had been compared with each, and a leak is one whatever else sounds like it.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from planted import BUNDLED

from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.checks import gather
from whisper_tuner.data.checks.facts import PRINT_BITS, Facts, facts_of, measure
from whisper_tuner.data.checks.leaks import ALIKE, Prints, find_duplicate_audio, find_leaked_audio
from whisper_tuner.data.checks.material import TEST, TRAIN, Material, Row
from whisper_tuner.data.dataset import Manifest, Sample
from whisper_tuner.fact_store import FactStore

CLIPS = sorted((BUNDLED / "data" / "test").glob("*.ogg"))[:12]


def test_facts_are_kept_by_path_size_and_time(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    soundfile.write(path, load_audio(CLIPS[0]), 16_000)
    store = FactStore(tmp_path / "cache")
    first = gather.facts_by_file([path, tmp_path / "none.wav"], store)
    assert list(first) == [path] and first[path].seconds > 1
    monkeypatch.setattr(gather, "measure", lambda path: pytest.fail("measured again"))
    assert gather.facts_by_file([path], store) == first
    monkeypatch.undo()
    soundfile.write(path, 0.5 * load_audio(CLIPS[0]), 16_000)
    os.utime(path, ns=(1, 1))
    assert gather.facts_by_file([path], store)[path].peak == pytest.approx(first[path].peak / 2, rel=0.01)


def test_what_cannot_be_decoded_is_a_fact_and_is_tried_again(tmp_path, monkeypatch):
    path, store = tmp_path / "a.wav", FactStore(tmp_path)
    path.write_bytes(b"no audio" * 500)
    assert gather.facts_by_file([path], store)[path].problem
    monkeypatch.setattr(gather, "measure", lambda path: Facts(seconds=1))
    assert gather.facts_by_file([path], store)[path].seconds == 1


def distance(one, other):
    return (int(one, 16) ^ int(other, 16)).bit_count() / PRINT_BITS


@pytest.mark.parametrize("name", ["ogg", "mp3", "flac"])
def test_a_print_outlives_codec_gain_and_silence(name, tmp_path):
    same = 0
    for clip in CLIPS:
        samples = load_audio(clip)
        path = tmp_path / f"a.{name}"
        soundfile.write(path, np.pad(0.4 * samples, (5000, 2000)), 16_000)
        same += distance(measure(path).print, measure(clip).print) <= ALIKE
    assert same >= len(CLIPS) - 2  # a codec may move where the loud part begins


def test_prints_of_other_clips_are_far_apart():
    prints = [measure(clip).print for clip in CLIPS]
    apart = [distance(one, other) for at, one in enumerate(prints) for other in prints[at + 1 :]]
    assert min(apart) > 1.4 * ALIKE


@pytest.mark.parametrize(
    "samples", [np.zeros((1, 1)), np.zeros((400, 2)), np.full((16_000, 1), 0.5), np.ones((3, 1)) * 1e-4]
)
def test_odd_signals_have_facts(samples):
    found = facts_of(samples.astype(np.float32), 16_000)
    assert isinstance(found, Facts) and np.isfinite([found.level, found.peak, found.silent, found.first]).all()


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
        ("first", "sounds like test.csv line 4 (test), whose text is 'tested'"),
        ("second", "sounds like test.csv line 4 (test), whose text is 'tested'"),
    ]
    assert [found.id for found in find_duplicate_audio(material)] == ["second"]
