"""Folders whose tokenizer, sizes and generation config do or do not belong together."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_whisper import write_whisper
from transformers import WhisperTokenizer

from whisper_tuner.config import Profile
from whisper_tuner.data.labels import added_words, folder_is_multilingual, is_multilingual, token_limit
from whisper_tuner.errors import ModelError
from whisper_tuner.eval.transcription import require_alignment, transcribe_recording, writes_timestamps
from whisper_tuner.hub import check_model
from whisper_tuner.model.base_model import full_frames, load_base

TIMES = [f"<|{number / 50:.2f}|>" for number in range(1501)]
GENERATION = "generation_config.json"


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A model with the tokens of large-v3: 100 languages."""
    folder = tmp_path_factory.mktemp("models") / "large"
    return write_whisper(folder, multilingual=True, seconds=5, texts=50_257, added=TIMES)


@pytest.fixture(scope="module")
def english(tmp_path_factory) -> Path:
    """An English-only model with two more words."""
    folder = tmp_path_factory.mktemp("models") / "english"
    return write_whisper(folder, multilingual=False, seconds=5, texts=50_256, added=[*TIMES, " Zanzibar", "Ulm"])


@pytest.fixture
def copy(tmp_path):
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "model"))


def change(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("lacking", [None, ("lang_to_id", "task_to_id", "is_multilingual"), ("eos_token_id",)])
def test_what_a_generation_config_lacks_is_made_from_the_tokenizer(large, copy, lacking):
    whole, folder = load_base(large)[0].generation_config.to_dict(), copy(large)
    stored = json.loads((folder / GENERATION).read_text())
    (folder / GENERATION).unlink()
    if lacking:
        (folder / GENERATION).write_text(json.dumps({k: v for k, v in stored.items() if k not in lacking}))
    # As in models of before 2023, whose config.json says what a generation config says today.
    forced = [[1, 50259], [2, 50360], [3, 50364]]
    change(folder / "config.json", suppress_tokens=[1, 2], forced_decoder_ids=forced)
    model, _ = load_base(folder)
    made = model.generation_config.to_dict()
    for key in ("lang_to_id", "task_to_id", "is_multilingual", "no_timestamps_token_id", "eos_token_id"):
        assert made[key] == whole[key]
    assert made["suppress_tokens"] == ([1, 2] if lacking is None else None)
    assert folder_is_multilingual(folder) and token_limit(str(folder), language="fr").language == "fr"
    mel = torch.zeros(1, 80, full_frames(model))
    model.generate(mel, language="fr", task="translate", max_new_tokens=1)
    model.save_pretrained(folder / "again")
    assert json.loads((folder / "again" / GENERATION).read_text())["lang_to_id"] == whole["lang_to_id"]


def test_an_english_model_with_added_words_is_no_multilingual_one(english, copy):
    """By its size it might be one."""
    folder = copy(english)
    (folder / GENERATION).unlink()
    model, processor = load_base(folder)
    assert model.config.vocab_size == 51_867 and not is_multilingual(model) and not folder_is_multilingual(folder)
    assert token_limit(str(folder)).language == ""
    assert added_words(processor.tokenizer) == {51_865: " Zanzibar", 51_866: "Ulm"}
    assert "lang_to_id" not in model.generation_config.to_dict()


def test_a_recording_in_added_words_has_no_times_of_them(english, tmp_path, audio_file):
    model, processor = load_base(english)
    with torch.no_grad():  # writes the word all the time
        model.proj_out.weight.mul_(0)
        model.proj_out.weight[51_865] = model.model.decoder.layer_norm.bias = torch.nn.Parameter(torch.ones(16))
    recording = transcribe_recording(model, processor, audio_file(tmp_path / "x.wav", seconds=3))
    assert "Zanzibar Zanzibar" in recording.text and len(recording.segments) == 1
    assert not writes_timestamps(model, processor)
    with pytest.raises(ModelError, match="added words"):
        require_alignment(model, processor)


def empty_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    WhisperTokenizer(vocab={}, merges=[]).save_pretrained(folder)


def other_tokenizer(**options):
    def make(folder: Path) -> None:
        kept = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors", GENERATION)}
        write_whisper(folder, seconds=5, **options)
        for name, content in kept.items():
            (folder / name).write_bytes(content)

    return make


def without_generation(make):
    def both(folder: Path) -> None:
        make(folder)
        (folder / GENERATION).unlink()

    return both


def large_with_a_word(folder: Path, *, tokenizer: Path) -> None:
    kept = WhisperTokenizer.from_pretrained(tokenizer)
    write_whisper(folder, multilingual=True, seconds=5, texts=50_257, added=[*TIMES, "Ulm"])
    kept.save_pretrained(folder)


def of_a_smaller_model(folder: Path) -> None:
    stored = json.loads((folder / GENERATION).read_text())
    change(folder / GENERATION, task_to_id={name: token - 1 for name, token in stored["task_to_id"].items()})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (empty_tokenizer, r"no token <\|startoftranscript\|>"),
        (
            other_tokenizer(multilingual=False, texts=50_256, added=TIMES),
            r"<\|startoftranscript\|> is 50258 in config.json, 50257 in the tokenizer",
        ),
        (other_tokenizer(multilingual=True, texts=50_257, added=[*TIMES, "Ulm"]), "51,866 tokens, .*51,867.*'Ulm'"),
        (
            without_generation(other_tokenizer(multilingual=True, texts=50_257, added=TIMES[:-1])),
            None,  # an older tokenizer does not name all of them
        ),
        (of_a_smaller_model, r"<\|transcribe\|> is 50359 in generation_config.json, and 50360 in the tokenizer"),
        (lambda folder: change(folder / GENERATION, lang_to_id={"<|xx|>": 50300}), r"<\|xx\|> is 50300 .* and None"),
        (lambda folder: change(folder / GENERATION, no_timestamps_token_id=50363), r"<\|notimestamps\|> is 50363"),
        (
            without_generation(lambda folder: large_with_a_word(folder, tokenizer=folder)),
            "51,867 tokens, its tokenizer 51,866, and no generation_config",
        ),
    ],
)
def test_files_of_several_models_are_refused(large, copy, make, message):
    folder = copy(large)
    make(folder)
    if message is None:
        load_base(folder)
        return
    with pytest.raises(ModelError, match=message):
        load_base(folder)


def test_a_pad_token_that_was_added_is_none_too_many(large, copy):
    folder = copy(large)
    tokenizer = WhisperTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    load_base(folder)


@pytest.mark.parametrize(
    ("heads", "left"), [([[1, 0], [7, 0], [0, 2]], [[1, 0]]), ([[10, 1]], None), ([[1, 1]], [[1, 1]])]
)
def test_alignment_heads_of_another_model_are_left_out(large, copy, caplog, heads, left):
    folder = copy(large)
    change(folder / GENERATION, alignment_heads=heads)
    model, _ = load_base(folder)
    assert model.generation_config.to_dict().get("alignment_heads") == left
    assert ("left out alignment_heads of another model" in caplog.text) == (heads != left)


@pytest.mark.parametrize("lacking", ["", "pytorch_model-00002-of-00002.bin"])
def test_pickled_weights_in_parts(multilingual_folder, copy, lacking):
    folder = copy(multilingual_folder)
    weights = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    before, _ = load_base(folder)
    (folder / "model.safetensors").unlink()
    names, places = list(weights), {}
    for number, part in enumerate((names[:40], names[40:]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: weights[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    profile = Profile(base_model=str(folder), train=folder)
    if lacking:
        (folder / lacking).unlink()
        for load in (lambda: check_model(profile), lambda: load_base(folder)):
            with pytest.raises(ModelError, match=f"{lacking}: there is no such file.*\\n.*Copy the model again"):
                load()
        return
    check_model(profile)
    model, _ = load_base(folder)
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=1e-3, atol=1e-3)
