import json
import shutil

import pytest
import torch
from transformers.models.whisper.modeling_whisper import shift_tokens_right

from whisper_tuner.config import Profile
from whisper_tuner.data.batches import pad_labels
from whisper_tuner.data.labels import (
    IGNORED,
    Label,
    check_special_tokens,
    first_timestamp,
    label_encoder,
    with_timestamps,
)
from whisper_tuner.errors import ConfigError, DataError, ModelError
from whisper_tuner.timed_text import Said

START = "<|startoftranscript|>"


def names(processor, ids):
    return processor.tokenizer.convert_ids_to_tokens(ids)


def learnt(processor, label):
    """For each token of text after which something is learnt, what that is."""
    pairs = zip(names(processor, label.inputs), label.targets, strict=True)
    return [(read, *names(processor, [target])) for read, target in pairs if target != IGNORED]


def test_english_only_labels_carry_no_language(english):
    model, processor = english
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    assert names(processor, encoder.encode("ab").inputs) == [START, "<|notimestamps|>", "Ġ", "a", "b"]
    assert encoder.encode("ab", language="de") == encoder.encode("ab")


def test_each_position_learns_what_the_next_one_reads_and_the_prompt_is_not_learnt(multilingual):
    model, processor = multilingual
    label = label_encoder(model, processor.tokenizer, language="fr").encode("ab")
    pairs = [("<|notimestamps|>", "Ġ"), ("Ġ", "a"), ("a", "b"), ("b", "<|endoftext|>")]
    assert learnt(processor, label) == pairs and len(label) == len(label.inputs) == len(label.targets) == 7


def test_labels_are_what_the_tokenizer_makes(multilingual):
    model, processor = multilingual
    processor.tokenizer.set_prefix_tokens(language="fr", task="transcribe")
    ours = label_encoder(model, processor.tokenizer, language="fr").encode("déjà vu")
    assert [*ours.inputs, ours.targets[-1]] == processor.tokenizer(" déjà vu").input_ids
    assert ours.inputs[0] == model.config.decoder_start_token_id


def test_padding_is_masked_and_end_of_text_is_learnt(multilingual):
    model, _ = multilingual
    end = model.config.eos_token_id
    assert model.config.pad_token_id == end
    padded = pad_labels([Label((7, 8), (1, 2, end)), Label((8,), (1, end))], end)
    assert {ids.dtype for ids in padded.values()} == {torch.int64}
    assert padded["decoder_input_ids"].tolist() == [[7, 8, 1, 2], [8, 1, end, end]]
    assert padded["labels"].tolist() == [[-100, 1, 2, end], [1, end, -100, -100]]


def test_without_a_previous_text_transformers_makes_the_same_inputs(multilingual):
    model, processor = multilingual
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    labels = [encoder.encode(text) for text in ("ab", "", "longer")]
    padded = pad_labels(labels, encoder.end, 16)
    whole = torch.tensor([[*label.inputs[1:], encoder.end] + [IGNORED] * (16 - len(label)) for label in labels])
    made = shift_tokens_right(whole, model.config.pad_token_id, model.config.decoder_start_token_id)
    assert torch.equal(made, padded["decoder_input_ids"])
    learnt = padded["labels"] != IGNORED
    assert torch.equal(whole[learnt], padded["labels"][learnt])


@pytest.mark.parametrize("language", ["ja", "Japanese"])
def test_a_translation_is_english_text_of_foreign_speech(multilingual, language):
    model, processor = multilingual
    label = label_encoder(model, processor.tokenizer, language=language, task="translate").encode("a")
    assert names(processor, label.inputs) == [START, "<|ja|>", "<|translate|>", "<|notimestamps|>", "Ġ", "a"]
    of_a_clip = label_encoder(model, processor.tokenizer, language=language).encode("a", task="translate")
    assert of_a_clip == label
    label = label_encoder(model, processor.tokenizer, language=language).encode("a")
    assert names(processor, label.inputs) == [START, "<|ja|>", "<|transcribe|>", "<|notimestamps|>", "a"]


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_english_only_models_write_a_leading_space_whatever_is_asked(english, task):
    model, processor = english
    label = label_encoder(model, processor.tokenizer, language="Japanese", task=task).encode("a")
    assert names(processor, label.inputs) == [START, "<|notimestamps|>", "Ġ", "a"]


def test_text_that_the_decoder_cannot_hold_is_refused(multilingual):
    model, processor = multilingual
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    room = model.config.max_target_positions - 5  # three prompt tokens, the space, end-of-text
    assert len(encoder.encode("a" * room)) == model.config.max_target_positions
    with pytest.raises(DataError, match="makes 65 tokens, but the decoder takes 64"):
        encoder.encode("a" * (room + 1))


def test_a_multilingual_model_must_be_told_the_language(multilingual):
    model, processor = multilingual
    for task in ("transcribe", "translate"):
        with pytest.raises(ConfigError, match="is told it"):
            label_encoder(model, processor.tokenizer, task=task)


def test_a_clip_without_speech_learns_to_end_right_after_the_prompt(multilingual, english):
    for model, processor in (multilingual, english):
        label = label_encoder(model, processor.tokenizer, language="fr").encode("")
        assert learnt(processor, label) == [("<|notimestamps|>", "<|endoftext|>")]


def test_with_timestamps_it_learns_to_end_after_the_first(timestamps):
    model, processor = timestamps
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    assert encoder.encode("", timed=[Said(0.0, 2.0, "")]).written == (encoder.first_timestamp, encoder.end)


def test_a_row_may_be_in_another_language_that_the_model_knows(multilingual):
    model, processor = multilingual
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    assert names(processor, encoder.encode("a", language="ja").inputs)[1:] == [
        "<|ja|>", "<|transcribe|>", "<|notimestamps|>", "a",
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"no token <\|xx\|>"):
        encoder.encode("a", language="xx")


@pytest.mark.parametrize(("end_s", "last"), [(0.0, 0), (0.1, 5), (2.413, 121), (29.996, 1500), (31.0, 1500)])
def test_timestamps_stand_around_the_text_and_are_learnt(timestamps, end_s, last):
    model, processor = timestamps
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    label, plain = encoder.encode("ab", timed=[Said(0.0, end_s, "ab")]), encoder.encode("ab")
    zero = processor.tokenizer.convert_tokens_to_ids("<|notimestamps|>") + 1
    assert encoder.first_timestamp == zero == model.generation_config.no_timestamps_token_id + 1
    assert label.prompt == plain.prompt[:-1]
    assert label.written == (zero, *plain.written[:-1], zero + last, encoder.end)
    assert label.targets[len(label.prompt) - 1] == zero


def test_each_part_of_a_text_has_its_timestamps(timestamps):
    model, processor = timestamps
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    parts = [Said(0.0, 1.26, "ab"), Said(1.5, 1.5, "c"), Said(1.5, 4.0, "d")]
    label, plain = encoder.encode("ab c d", timed=parts), encoder.encode("ab c d")
    times = [(token - encoder.first_timestamp) / 50 for token in label.written if token >= encoder.first_timestamp]
    assert times == [0.0, 1.26, 1.5, 1.5, 1.5, 4.0]
    assert [token for token in label.written if token < encoder.first_timestamp] == list(plain.written)
    read = processor.tokenizer.decode(label.written, output_offsets=True)["offsets"]
    assert [(one["timestamp"], one["text"].strip()) for one in read] == [
        ((0.0, pytest.approx(1.26)), "ab"), ((1.5, 1.5), "c"), ((1.5, 4.0), "d"),
    ]  # fmt: skip


def test_timestamps_that_the_tokenizer_names_are_found_too(timestamps, multilingual):
    tokenizer = timestamps[1].tokenizer
    unnamed = first_timestamp(tokenizer.get_vocab(), timestamps[0].config.vocab_size)
    tokenizer.add_tokens([f"<|{n * 0.02:.2f}|>" for n in range(1501)], special_tokens=True)
    assert first_timestamp(tokenizer.get_vocab(), timestamps[0].config.vocab_size) == unnamed
    other = multilingual[1].tokenizer
    other.add_tokens([f"<|own{n}|>" for n in range(1501)], special_tokens=True)
    assert first_timestamp(other.get_vocab(), len(other)) is None


def test_what_was_said_before_is_a_prompt_cut_to_its_end(multilingual):
    model, processor = multilingual
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    label, plain = encoder.encode("ab", previous="cd"), encoder.encode("ab")
    assert label.prompt[4:] == plain.prompt and label.written == plain.written
    assert names(processor, label.prompt[:4]) == ["<|startofprev|>", "Ġ", "c", "d"]
    assert list(label.prompt[:4]) == processor.tokenizer.get_prompt_ids("cd").tolist()
    assert label.targets == [IGNORED] * (len(label.prompt) - 1) + list(label.written)
    long = encoder.encode("ab", previous="c" * 100 + "d")
    assert names(processor, long.prompt[:32]) == ["<|startofprev|>", *["c"] * 30, "d"]  # 64 / 2 - 1
    most = encoder.encode("a" * (64 - 9), previous="x" * 100)  # five positions are taken, four left
    assert len(most) == 64 and names(processor, most.prompt[:4]) == ["<|startofprev|>", "x", "x", "x"]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_what_has_no_room_is_left_out(timestamps, left):
    model, processor = timestamps
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    text = "a" * (59 - left)
    plain = encoder.encode(text)
    assert len(plain) == 64 - left
    label = encoder.encode(text, timed=[Said(0.0, 1.0, text)], previous="b" * 9)
    assert len(label) <= 64 and (label.written == plain.written) is (left < 1)


def test_labels_are_of_any_text_and_come_back_as_it(timestamps):
    model, processor = timestamps
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    for text in ("déjà vu", "  two  spaces", "a\nb", "…", "日本"):
        label = encoder.encode(text, timed=[Said(0.0, 1.0, text)], previous="avant")
        ids = [target for target in label.targets if target != IGNORED][1:-2]
        assert processor.tokenizer.decode(ids).removeprefix(" ") == text.removeprefix(" ")


@pytest.mark.parametrize("key", ["timestamps_share", "previous_text_share"])
def test_a_model_without_the_tokens_is_refused(multilingual_folder, timestamps_folder, tmp_path, key):
    def check(folder):
        check_special_tokens(Profile(base_model=str(folder), train=tmp_path, **{key: 0.5}))

    check(timestamps_folder)
    if key == "timestamps_share":
        with pytest.raises(ConfigError, match=r"timestamps_share = 0\.5: .*multilingual has no timestamp tokens"):
            check(multilingual_folder)
    else:
        check(multilingual_folder)
    check_special_tokens(Profile(base_model="nobody/nothing", train=tmp_path))


@pytest.mark.parametrize(
    ("model", "settings", "share"),
    [
        ("timestamps", {}, 0.5),
        ("timestamps", {"timestamps_share": 0.0}, 0.0),
        ("timestamps", {"method": "decoder"}, 0.0),  # whose encoder's outputs are kept clip by clip
        ("timestamps", {"method": "decoder", "encoder_cache_gb": 0.0}, 0.5),
        ("multilingual", {}, 0.0),
    ],
)
def test_without_the_key_timestamps_are_trained_where_clips_can_be_joined(request, tmp_path, model, settings, share):
    base = str(request.getfixturevalue(f"{model}_folder"))
    assert with_timestamps(Profile(base_model=base, train=tmp_path, **settings)).timestamps_share == share


def test_a_tokenizer_in_two_files_has_timestamps_too(timestamps_folder, tmp_path):
    stored = json.loads((timestamps_folder / "tokenizer.json").read_text())
    shutil.copy(timestamps_folder / "config.json", tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(stored["model"]["vocab"]))
    added = {each["content"]: each["id"] for each in stored["added_tokens"]}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    assert with_timestamps(Profile(base_model=str(tmp_path), train=tmp_path)).timestamps_share == 0.5
    (tmp_path / "tokenizer.json").write_text("[")
    with pytest.raises(ModelError, match="damaged"):
        with_timestamps(Profile(base_model=str(tmp_path), train=tmp_path))
