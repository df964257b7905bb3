"""Texts: what is certain is mended, what may be meant so is left alone, and which contradictions of a model count."""

from pathlib import Path

import pytest

from whisper_tuner.data.checks.material import Heard, Material
from whisper_tuner.data.checks.rows import find_contradicted, find_unusable
from whisper_tuner.data.checks.text import (
    decoded,
    described_sound,
    find_lost_characters,
    probably_decoded,
    repaired,
)
from whisper_tuner.data.dataset import Manifest, Sample, load_manifest

USUAL = Heard("what is said", 0.05, -0.2)


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("Ã©tÃ©", "été"),
        ("ÐŸÑ€Ð¸Ð²ÐµÑ‚", "Привет"),
        ("â€œhiâ€\x9d", "“hi”"),
        ("GrÃ¼Ã\x9fe", "Grüße"),  # read as Latin-1
        ("â\x80\x9chiâ\x80\x9d", "“hi”"),
        ("Tom &amp; Jerry&#39;s", "Tom & Jerry's"),
        ("one<br>two <i>three</i>", "one two three"),
        ("dish\u00adwasher\u200b", "dishwasher"),
        ("cafe\u0301", "café"),
        ("a\u00a0 b\r\nc", "a b c"),
        ("", ""),
    ],
)
def test_mended(text, mended):
    assert repaired(text) == mended
    assert repaired(mended) == mended


@pytest.mark.parametrize(
    "text",
    [
        "CAFÉ»",
        "IRMÃ»",
        "«Élan»",
        "Ñandú São",
        "a < b and b > c",
        "R&D",
        "x &copy y",
        "می\u200cخواهم",
        "こんにちは",
    ],
)
def test_left_alone(text):
    assert repaired(text) == text


def test_what_can_be_repaired_in_part_only_is_found_and_left_alone():
    text = "ã“ã‚“ã«"  # bytes were lost when it was read
    assert probably_decoded(text) != text
    assert decoded(text) == text


CORPUS_TAGS = (
    *("<COMMA>", "<PERIOD>", "<QUESTIONMARK>", "<EXCLAMATIONPOINT>", "<SIL>", "<unk>", "<spoken_noise>", "<NON/>"),
    *("<overlap>", "</foreign>", "<lang:de>", "[laughter-yeah]", "[vocalized-noise]", "{NOISE}", "{breath}"),
    *("%HESITATION", "!SIL", "&=laughs", "((unclear))", ",COMMA", ".PERIOD", "?QUESTION-MARK", '"DOUBLE-QUOTE'),
)
SAID = (
    "1 < 2 and 3 > 2",
    "I <3 you",
    "<i>so</i>",
    "5 %",
    "a period",
    "well, comma",
    "R&D",
    'he said "period"',
    "-comma",
    "no <br/> way",
)


@pytest.mark.parametrize("text", ["[laughter] yes", "(music)", "beep sound", "*sighs*", "♪", "Beep.", "<noise>"])
def test_notes_are_found(text):
    assert described_sound(text)


@pytest.mark.parametrize("tag", CORPUS_TAGS)
def test_tags_of_corpora_are_found(tag):
    assert described_sound(f"SWITCH IT OFF {tag} PLEASE") == tag


@pytest.mark.parametrize(
    "text", ["Music", "silence", "Turn the music off.", "(that is, mine)", "breathing", "a * b", *SAID]
)
def test_what_may_be_said_is_not(text):
    assert not described_sound(text)


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
