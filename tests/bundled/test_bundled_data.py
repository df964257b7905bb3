import re
from pathlib import Path

import pytest
import soundfile

from bundled.make_data import SPLITS, dataset_sentences
from whisper_tuner.data.dataset import load_manifest

DATA = Path(__file__).parents[2] / "bundled" / "data"


@pytest.mark.parametrize("split", SPLITS)
def test_manifest_agrees_with_its_clips(split):
    manifest = load_manifest(DATA / f"{split}.csv")
    assert not manifest.problems
    assert len(manifest.samples) == SPLITS[split]
    for sample in manifest.samples:
        info = soundfile.info(sample.audio)
        assert (info.samplerate, info.channels) == (16_000, 1)
        assert info.duration == pytest.approx(sample.duration_s, abs=0.001)


def test_no_sentence_is_in_two_splits_and_every_clip_is_named():
    samples = {split: load_manifest(DATA / f"{split}.csv").samples for split in SPLITS}
    texts = [sample.text for split in samples.values() for sample in split]
    assert len(set(texts)) == len(texts) == sum(SPLITS.values())
    assert {sample.audio for split in samples.values() for sample in split} == set(DATA.rglob("*.ogg"))


def test_test_split_uses_only_words_that_the_train_split_has():
    """A voice can be learnt from 240 clips, a vocabulary cannot."""
    texts = dataset_sentences()
    train, test = (set(re.findall(r"[a-z']+", " ".join(texts[split]).lower())) for split in ("train", "test"))
    assert len(test - train) <= 3


def test_sentences_are_those_that_the_scripts_make():
    for split, texts in dataset_sentences().items():
        assert [sample.text for sample in load_manifest(DATA / f"{split}.csv").samples] == texts


def test_small_enough_to_ship():
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 5_000_000
