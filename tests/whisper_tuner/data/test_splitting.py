import random
from pathlib import Path

import pytest

from whisper_tuner.data.dataset import Manifest, Sample
from whisper_tuner.data.splitting import repeated_notes, split
from whisper_tuner.text import text_key

BOTH = ["validation", "test"]


def sample(number: int, text: str, **about) -> Sample:
    return Sample(**{"id": str(number), "audio": Path(f"{number}.wav"), "text": text, "duration_s": 1.0} | about)


def ids(done) -> dict[str, set[str]]:
    return {kind: {item.id for item in part} for kind, part in done.parts.items()}


def apart(done, of) -> bool:
    found = [{of(item) for item in part} for part in done.parts.values()]
    return all(not a & b for number, a in enumerate(found) for b in found[number + 1 :])


def test_a_sentence_is_in_one_part_whatever_the_order_of_the_clips():
    samples = [sample(n, f"Sentence {n % 40}") for n in range(80)]
    done = split(samples, BOTH)
    assert done.by == "sentence" and [len(part) for part in done.parts.values()] == [64, 8, 8]
    assert apart(done, lambda item: item.text)
    assert ids(split(samples[::-1], BOTH)) == ids(done)


def test_a_speaker_is_in_one_part():
    samples = [sample(n, f"Sentence {n}", speaker=f"s{n % 20}") for n in range(200)]
    done = split(samples, BOTH)
    assert done.by == "speaker" and apart(done, lambda item: item.speaker)
    assert [len(part) for part in done.parts.values()] == [160, 20, 20] and not done.left_out


def test_clips_with_a_sentence_of_the_test_set_leave_train():
    samples = [sample(n, "yes" if n % 10 == 0 else f"Sentence {n}", speaker=f"s{n // 10}") for n in range(200)]
    done = split(samples, BOTH)
    assert done.by == "speaker" and done.left_out and apart(done, lambda item: item.text)
    assert sum(map(len, done.parts.values())) + done.left_out == 200
    assert f"{done.left_out} clips left out" in done.told


def test_speakers_who_all_say_the_same_are_split_by_sentence_and_that_is_said():
    samples = [sample(n, f"Command {n % 10}", speaker=f"s{n // 10}") for n in range(200)]
    done = split(samples, ["test"])
    assert done.by == "sentence" and apart(done, lambda item: item.text) and not done.left_out
    assert "each voice may be in several parts" in done.told


def test_a_sentence_of_most_clips_stays_in_train_and_clips_without_words_are_of_their_own():
    samples = [sample(n, "Yes" if n < 80 else "" if n < 90 else f"Sentence {n}") for n in range(100)]
    done = split(samples, BOTH)
    assert [len(part) for part in done.parts.values()] == [80, 10, 10]


@pytest.mark.parametrize("speakers", [lambda n: "one", lambda n: f"s{n % 3}", lambda n: "" if n == 7 else f"s{n % 20}"])
def test_too_few_speakers_or_clips_without_one_are_split_by_sentence(speakers):
    done = split([sample(n, f"Sentence {n}", speaker=speakers(n)) for n in range(100)], BOTH)
    assert done.by == "sentence" and "each voice may be in several parts" in done.told


def test_clips_of_one_recording_stay_together():
    samples = [sample(n, f"Sentence {n}", id=f"talk{n % 20}.mp4-{n:08d}") for n in range(200)]
    done = split(samples, BOTH)
    assert done.by == "recording" and apart(done, lambda item: item.id.rpartition("-")[0])


def test_a_recording_is_known_by_the_names_of_its_clips_whatever_their_ids():
    """An id column may name the recording: then its first clip keeps that for its id."""
    names = [f"talk{n % 20}-{n:08d}-02000-{n % 20:08x}.flac" for n in range(200)]
    samples = [sample(n, f"Sentence {n}", audio=Path("audio") / name) for n, name in enumerate(names)]
    done = split(samples, BOTH)
    assert done.by == "recording" and apart(done, lambda item: item.audio.name.partition("-")[0])


@pytest.mark.parametrize(
    ("words", "of"),
    [
        ([], "0 different texts in 0"),
        (["a", "b"], "2 different texts in 2"),
        (["Yes", "yes!", "YES"], "1 different text in 3"),
    ],
)
def test_too_few_texts_are_refused(words, of):
    with pytest.raises(ValueError, match=f"no validation and no test set can be made of {of} clips"):
        split([sample(n, text) for n, text in enumerate(words)], BOTH)


def test_a_small_test_set_is_said_to_be_uncertain():
    assert "10 clips for the test: few" in split([sample(n, f"S {n}") for n in range(100)], ["test"]).told
    assert "few" not in split([sample(n, f"S {n}") for n in range(1000)], ["test"]).told


@pytest.mark.parametrize("seed", range(60))
def test_no_clip_is_lost_or_in_two_parts_and_no_part_is_empty(seed):
    chance = random.Random(seed)
    count, speakers, texts = chance.randrange(3, 300), chance.randrange(1, 30), chance.choice((3, 20, 300))
    named = chance.random() < 0.7
    samples = [
        sample(
            n,
            chance.choice(("Text {}", "text, {}!", " TEXT  {}")).format(chance.randrange(texts)),
            speaker=f"s{chance.randrange(speakers)}" if named else "",
        )
        for n in range(count)
    ]
    kinds = chance.choice([BOTH, ["test"]])
    try:
        done = split(samples, kinds)
    except ValueError:
        assert len({text_key(item.text) for item in samples}) < 8
        return
    found = [item.id for part in done.parts.values() for item in part]
    assert len(found) == len(set(found)) == count - done.left_out and all(done.parts.values())
    assert [*done.parts] == ["train", *kinds]
    assert apart(done, lambda item: text_key(item.text))
    if done.by == "speaker":
        assert apart(done, lambda item: item.speaker)


def manifest(name: str, *samples: Sample) -> Manifest:
    return Manifest(Path(name), samples, ())


def test_what_a_test_set_has_of_train_is_counted():
    train = manifest("train.csv", sample(1, "Yes"), sample(2, "No"), sample(3, "Well", duration_s=2.0))
    assert repeated_notes(train, manifest("test.csv", sample(4, "Else"))) == []
    [note] = repeated_notes(
        train, manifest("test.csv", sample(1, "Yes"), sample(5, "no", duration_s=3.0), sample(6, "a"))
    )
    assert note.startswith("test.csv shares 1 clip and the sentences of 2 clips of 3 with train.csv")
    [copied] = repeated_notes(train, manifest("test.csv", sample(9, "well", duration_s=2.0)))
    assert copied.startswith("test.csv shares 1 clip of 1 with train.csv")
