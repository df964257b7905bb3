"""Which contradictions of a model count as findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from whisper_tuner.data.checks.material import Heard, Material
from whisper_tuner.data.checks.rows import find_contradicted, find_unusable
from whisper_tuner.data.checks.text import find_lost_characters
from whisper_tuner.data.dataset import Manifest, Sample, load_manifest

USUAL = Heard("what is said", 0.05, -0.2)


def material(heard: dict[int, Heard], **more) -> Material:
    samples = [
        Sample(id=f"c{line}", audio=Path(f"{line}.wav"), text="what is said", duration_s=1.0, line=line)
        for line in range(2, 22)
    ]
    manifest = Manifest(Path("train.csv"), tuple(samples), ())
    known = {("train", sample.line): heard.get(sample.line, USUAL) for sample in samples}
    return Material(manifests={"train": manifest}, heard=known, **more)


@pytest.mark.parametrize(
    ("heard", "lines"),
    [
        (Heard("something else", 1.1, -0.1), [5]),
        (Heard("what is set", 0.2, -0.1), []),  # an error, but not another text
        (Heard("some thing or other", 1.1, -1.5), []),  # it only guesses
    ],
)
def test_what_counts(heard, lines):
    assert [found.line for found in find_contradicted(material({5: heard}))] == lines


def test_a_model_that_does_not_know_the_language_says_nothing():
    every = {line: Heard("nonsense", 1.0, -0.1) for line in range(2, 22)}
    assert not list(find_contradicted(material(every)))


def test_the_surest_come_first():
    sure, unsure = Heard("another text", 1.0, -0.05), Heard("another text", 1.0, -0.6)
    found = list(find_contradicted(material({5: unsure, 9: sure})))
    assert sorted(found, key=lambda one: -one.badness)[0].line == 9


def test_a_tokenizer_that_loses_characters():
    found = list(find_lost_characters(material({}, read_back=lambda text: text.replace("said", "sad"))))
    assert len(found) == 20 and found[0].what == "it becomes: what is sad"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("a.wav,one,two,three", "wrong columns"),
        ('a.wav,"one', "bad quoting"),
    ],
)
def test_damage_of_the_manifest_itself(row, kind, tmp_path):
    (tmp_path / "train.csv").write_text(f"audio,text\nb.wav,one\n{row}\n")
    manifest = load_manifest(tmp_path / "train.csv")
    found = [one for one in find_unusable(Material(manifests={"train": manifest})) if one.line == 3]
    assert [one.kind.name for one in found] == [kind]
