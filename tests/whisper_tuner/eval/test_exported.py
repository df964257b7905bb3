"""Each export is decoded by its own runtime: random models with OpenAI's vocabularies, which write random words."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import random
import resource
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from peft import PeftModel
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.features import log_mel
from whisper_tuner.errors import MissingProgram, ModelError, RunError
from whisper_tuner.eval.decoder import Decoder, compression
from whisper_tuner.eval.evaluation import model_inputs, no_speech_token, transcribe
from whisper_tuner.eval.exported import decoded, is_off
from whisper_tuner.eval.wer import wer_difference
from whisper_tuner.export.final import load_model, save_final
from whisper_tuner.export.formats import WHOLE, Merged, Speech, chosen, formats
from whisper_tuner.model.base_model import load_base, prepare

SPECIAL = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
WIDTH, LETTERS = 64, 60  # characters of each text that are compared: runtimes differ in how long texts may be
VOCABULARIES = ("english", "multilingual")
EXPORTS = [
    pytest.param(
        VOCABULARIES[number > 0],
        each.name,
        precision,
        marks=[] if number == 0 else pytest.mark.slow,
    )
    for each in formats().values()
    for number, precision in enumerate(each.precisions)
]


@pytest.fixture(scope="session")
def published(request, tmp_path_factory) -> Path:
    """A random Whisper with one of OpenAI's vocabularies: the English one, unless a test asks for the other."""
    assets = importlib.util.find_spec("whisper")
    if assets is None:
        no_runtime("whisper")
    multilingual = getattr(request, "param", VOCABULARIES[0]) == VOCABULARIES[1]
    name = "multilingual" if multilingual else "gpt2"
    file = Path(assets.submodule_search_locations[0]) / "assets" / f"{name}.tiktoken"
    return write_published(tmp_path_factory.mktemp("published") / name, file, multilingual=multilingual)


def no_runtime(name: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{name} is not installed")
    pytest.skip(f"{name} is not installed: sh tools/runtimes.sh")


def write_published(folder: Path, tiktoken: Path, *, multilingual: bool) -> Path:
    tokens = [base64.b64decode(line.split()[0]) for line in tiktoken.read_bytes().splitlines() if line]
    as_text = bytes_to_unicode()
    texts = ["".join(as_text[byte] for byte in token) for token in tokens]
    vocabulary = {text: number for number, text in enumerate(texts)}
    languages = [f"<|{code}|>" for code in list(LANGUAGES)[:99]]
    times = [f"<|{0.02 * number:.2f}|>" for number in range(1501)]
    special = ["<|endoftext|>", "<|startoftranscript|>", *languages, *SPECIAL]
    folder.mkdir(parents=True)
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=merges(texts, vocabulary))
    tokenizer.add_tokens([*special, *times], special_tokens=True)
    of = tokenizer.convert_tokens_to_ids
    end, size = of("<|endoftext|>"), of("<|30.00|>") + 1
    assert size == (51_865 if multilingual else 51_864)
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = WhisperConfig(
        vocab_size=size,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        decoder_start_token_id=end + 1,
        **ends,
    )
    torch.manual_seed(3)
    model = WhisperForConditionalGeneration(config)
    words = [
        number for number, text in enumerate(texts) if text[:1] == "Ġ" and text[1:].isalpha() and text[1:].isascii()
    ]
    spread(model, words)
    asked = {"lang_to_id": {text: of(text) for text in languages}, "language": "fr", "task": "transcribe"}
    asked |= {"task_to_id": {task: of(f"<|{task}|>") for task in ("transcribe", "translate")}}
    model.generation_config = GenerationConfig(
        decoder_start_token_id=end + 1,
        is_multilingual=multilingual,
        no_timestamps_token_id=of("<|notimestamps|>"),
        suppress_tokens=[],
        begin_suppress_tokens=[vocabulary["Ġ"], end],
        max_length=448,
        **(asked if multilingual else {}),
        **ends,
    )
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    return folder


def spread(model: WhisperForConditionalGeneration, words: list[int]) -> None:
    """Make it write other words at each place and for each clip, and each of them with certainty."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in name:
                scale = 20.0 if "encoder_attn.out_proj" in name else 6.0 if ".conv" in name else 1.5
                torch.nn.init.normal_(parameter, std=scale / parameter[0].numel() ** 0.5)
        torch.nn.init.normal_(model.model.decoder.embed_positions.weight)
        table = model.model.decoder.embed_tokens.weight
        table.zero_()
        chosen_words = random.Random(0).sample(words, 300)
        table[chosen_words] = 0.3 * torch.randn(300, WIDTH)


def merges(texts: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The pair that each token of several bytes is joined from: byte-pair encoding with the pairs before it."""
    found = []
    for rank, text in enumerate(texts):
        parts = list(text)
        while len(parts) > 2:
            pairs = [(vocabulary.get(one + other, rank), at) for at, (one, other) in enumerate(pairwise(parts))]
            best, at = min(pairs)
            if best >= rank:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


@pytest.fixture(scope="session")
def long_clips(tmp_path_factory) -> list[Sample]:
    """Of 30 s: a runtime may fill up a shorter one in its own way."""
    folder, samples = tmp_path_factory.mktemp("long"), []
    for seed in range(2):
        chance = np.random.default_rng(seed)
        noise = chance.normal(0, 0.1, 480_000) * np.repeat(chance.random(60), 8000)
        soundfile.write(folder / f"{seed}.wav", noise, 16_000)
        samples.append(Sample(id=f"long{seed}", audio=folder / f"{seed}.wav", text="a text", duration_s=30.0))
    return samples


@pytest.fixture(scope="session")
def merged(published) -> Merged:
    model, processor = load_base(published)
    return Merged(model=model.eval(), processor=processor)


@pytest.fixture(scope="session")
def expected(merged, long_clips) -> list[str]:
    """What transformers writes, which is the same for every runtime."""
    speech = speech_of(merged)
    known = {"language": speech.language, "task": speech.task}
    return [heard.text for heard in transcribe(merged.model, merged.processor, [c.audio for c in long_clips], **known)]


def speech_of(merged: Merged) -> Speech:
    return Speech(language="fr" if merged.model.generation_config.is_multilingual else "en")


@pytest.mark.parametrize(("published", "name", "precision"), EXPORTS, indirect=["published"])
def test_each_runtime_writes_what_transformers_writes(merged, expected, tmp_path, long_clips, name, precision):
    which, speech = formats()[name], speech_of(merged)
    try:
        which.require(precision, running=True)
    except MissingProgram as error:
        no_runtime(str(error))
    which.write(merged, tmp_path / "exported", precision)
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]
    assert len({text[:LETTERS] for text in expected}) == 2 and min(map(len, expected)) > LETTERS
    done = []
    result = decoded(which, tmp_path / "exported", long_clips, speech, lambda *at: done.append(at))
    heard = [row.hypothesis for row in result.rows]
    assert not result.problems and done == [(1, 2), (2, 2)] and result.seconds > 0
    if name != "whisper.cpp" and precision in WHOLE:
        assert [text[:LETTERS] for text in heard] == [text[:LETTERS] for text in expected]
    else:  # in 16 bits or fewer a word of a random model hangs by a thread; but it is always one of a few of 300
        theirs, ours = ({*" ".join(texts).split()} for texts in (heard, expected))
        assert len(theirs & ours) >= len(theirs | ours) / 2


def test_a_word_that_rounding_turns_over_is_no_error_and_other_words_are():
    right, one_word = [(1, 10)] * 20, [(1, 10)] * 19 + [(3, 10)]
    assert wer_difference(one_word, right).points == 1.0 and not is_off(wer_difference(one_word, right))
    assert is_off(wer_difference([(3, 10)] * 20, right)) and is_off(wer_difference([(0, 10)] * 20, right))
    assert not is_off(wer_difference(right, right)) and not is_off(None)


def test_an_adapter_is_merged(published, tmp_path, profile_of):
    model, processor = load_base(published)
    trained = prepare(model, profile_of(method="lora", lora_r=4))
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    out = save_final(trained, processor, tmp_path / "final", published)
    whole, processor = load_model(out)
    assert not isinstance(whole, PeftModel)
    formats()["transformers"].write(Merged(model=whole, processor=processor), tmp_path / "exported", "float32")
    again = WhisperForConditionalGeneration.from_pretrained(tmp_path / "exported")
    features, ids = torch.randn(1, 80, 3000), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = trained.eval().get_base_model()(features, decoder_input_ids=ids).logits
        torch.testing.assert_close(again(features, decoder_input_ids=ids).logits, expected, rtol=1e-3, atol=1e-3)


def test_half_precision_is_stored_as_such_and_the_model_stays_as_it_was(merged, tmp_path):
    before = {name: tensor.clone() for name, tensor in merged.model.state_dict().items()}
    formats()["transformers"].write(merged, tmp_path / "half", "float16")
    formats()["transformers"].write(merged, tmp_path / "whole", "float32")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("half", "whole")]
    assert 1.9 < sizes[1] / sizes[0] < 2.1
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"
    assert all(torch.equal(before[name], tensor) for name, tensor in merged.model.state_dict().items())


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "onnx")) for n in formats()])
def test_what_cannot_be_written_is_told_and_nothing_is_left(merged, tmp_path, name):
    which = formats()[name]
    try:
        which.require("float16", running=False)
    except MissingProgram as error:
        no_runtime(str(error))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))  # for each file, as if the disk were full
    try:
        with pytest.raises(RunError, match=r"exported: the export cannot be written: (?s:.*)Free some space"):
            which.write(merged, tmp_path / "exported", "float16", card="a card")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_the_folder_for_mlx_has_what_mlx_audio_reads_besides(published, tmp_path):
    """It has been read by mlx-audio 0.6, which is no dependency: docs/export.md."""
    model, processor = load_model(published)
    formats()["mlx"].write(Merged(model=model, processor=processor), tmp_path, "float16")
    found = WhisperProcessor.from_pretrained(tmp_path)
    assert found.tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    assert found.feature_extractor.feature_size == model.config.num_mel_bins
    stored = GenerationConfig.from_pretrained(tmp_path)
    assert stored.no_timestamps_token_id == model.generation_config.no_timestamps_token_id


def test_a_vocabulary_that_a_runtime_has_not_built_in_is_refused(multilingual, tmp_path):
    model, processor = multilingual
    for name in ("whisper.cpp", "mlx", "openai"):
        with pytest.raises(ModelError, match=r"tokens: .*built in"):
            formats()[name].write(Merged(model=model, processor=processor), tmp_path / "exported", "float16")
    assert not list(tmp_path.iterdir())


def changed(folder: Path, *, words: tuple[str, ...] = (), untied: bool = False) -> Merged:
    model, processor = load_base(folder)
    processor.tokenizer.add_tokens(list(words))
    model.resize_token_embeddings(model.config.vocab_size + len(words), mean_resizing=False)
    if untied:
        model.config.tie_word_embeddings = False
        table = model.model.decoder.embed_tokens.weight
        model.proj_out.weight = torch.nn.Parameter(table.detach().roll(1, dims=1))
    return Merged(model=model.eval(), processor=processor)


@pytest.mark.parametrize(
    ("published", "words", "takes", "message"),
    [
        ("english", (), formats(), ""),
        ("multilingual", (), formats(), ""),
        ("multilingual", (" Zanzibar",), ("transformers", "onnx"), "words were added to its vocabulary, .*' Zanzibar'"),
        ("english", (" Zanzibar",), ("transformers", "onnx"), "words were added"),
        ("english", ("<|Ulm|>",), ("transformers", "onnx"), "51,865 tokens|words were added"),
    ],
    indirect=["published"],
)
def test_a_model_is_refused_where_its_tokens_would_be_taken_for_others(published, words, takes, message):
    model = changed(published, words=words)
    for name, which in formats().items():
        if name in takes:
            which.check(model)
            continue
        with pytest.raises(ModelError, match=f"{which.runtime} cannot use this model: .*{message}"):
            which.check(model)


def test_rows_without_tokens_make_other_tokens_too(published):
    model = changed(published)
    model.model.resize_token_embeddings(51_866, mean_resizing=False)
    with pytest.raises(ModelError, match=r"by its 51,866 tokens it would be taken for a multilingual one"):
        formats()["faster-whisper"].check(model)
    model.model.generation_config.is_multilingual = True
    with pytest.raises(ModelError, match=r"of 51,866 tokens it takes 50364 for <\|notimestamps\|>, which is 50362"):
        formats()["mlx"].check(model)


def test_a_multilingual_model_with_other_texts_is_no_english_one(multilingual):
    """CTranslate2 would leave the language out of the prompt."""
    model, processor = multilingual
    with pytest.raises(ModelError, match=r"by its 364 tokens it would be taken for an English-only one"):
        formats()["faster-whisper"].check(Merged(model=model, processor=processor))


def test_an_output_layer_of_its_own_is_refused_where_there_is_none(published):
    model = changed(published, untied=True)
    for name in ("whisper.cpp", "mlx", "openai"):
        with pytest.raises(ModelError, match="its output layer is not its token embedding"):
            formats()[name].check(model)


@pytest.mark.slow
def test_an_output_layer_of_its_own_is_written(published, tmp_path, long_clips):
    model = changed(published, untied=True)
    expected = [heard.text for heard in transcribe(model.model, model.processor, [clip.audio for clip in long_clips])]
    tied = [heard.text for heard in transcribe(*load_base(published), [clip.audio for clip in long_clips])]
    for name in ("transformers", "onnx", "faster-whisper"):
        which = formats()[name]
        try:
            which.require("float32", running=True)
        except MissingProgram as error:
            no_runtime(str(error))
        which.write(model, tmp_path / name, "float32")
        result = decoded(which, tmp_path / name, long_clips, speech_of(model))
        assert [row.hypothesis[:LETTERS] for row in result.rows] == [text[:LETTERS] for text in expected]
        assert [text[:LETTERS] for text in tied] != [text[:LETTERS] for text in expected]


@pytest.mark.slow
def test_unreadable_clips_are_problems_and_a_runtime_that_breaks_off_is_named(multilingual, tmp_path, clips):
    which, speech, (model, processor) = formats()["transformers"], Speech(language="fr"), multilingual
    which.write(Merged(model=model, processor=processor), tmp_path / "exported", "float32")
    (tmp_path / "no.wav").write_text("no audio")
    broken = Sample(id="broken", audio=tmp_path / "no.wav", text="x", duration_s=1.0)
    result = decoded(which, tmp_path / "exported", [broken, clips[0]], speech)
    assert len(result.rows) == 1 and "no.wav" in str(result.problems[0])
    (tmp_path / "exported" / "config.json").write_text("{}")
    with pytest.raises(RunError, match=r"transformers broke off \(status 1\)"):
        decoded(which, tmp_path / "exported", clips[:2], speech)


def test_a_precision_that_a_format_lacks_is_named():
    assert chosen(["mlx", "whisper.cpp", "mlx"], "")[1][1] == "float16"
    with pytest.raises(Exception, match=r"--precision q8_0: mlx has no such precision"):
        chosen(["whisper.cpp", "mlx"], "q8_0")
    with pytest.raises(Exception, match=r"--to openia: no such format, did you mean 'openai'"):
        chosen(["openia"], "")


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingProgram, match=r"mlx_whisper.*\n.*pip install -e '.\[mlx\]'"):
        formats()["mlx"].require("float16", running=True)
    formats()["mlx"].require("float16", running=False)
    with pytest.raises(MissingProgram, match="gguf"):
        formats()["whisper.cpp"].require("q8_0", running=False)
    formats()["whisper.cpp"].require("float16", running=False)


def test_what_is_doubted_is_what_openai_doubts(merged, tmp_path, long_clips):
    """The probability of a text and that of silence, and how far a text can be compressed: by both programs."""
    if importlib.util.find_spec("whisper") is None:
        no_runtime("whisper")
    import whisper

    model, processor = merged.model, merged.processor
    formats()["openai"].write(merged, tmp_path, "float32")
    theirs = whisper.load_model(str(next(tmp_path.glob("*.pt"))), device="cpu")
    options = whisper.DecodingOptions(language="en", without_timestamps=True, fp16=False, suppress_tokens="")
    decoder = Decoder(no_speech=no_speech_token(model, processor))
    mels = [log_mel(load_audio(clip.audio), processor.feature_extractor) for clip in long_clips]
    ids = model.generate(**model_inputs(model, mels), max_new_tokens=224, custom_generate=decoder)
    for mel, text, found in zip(
        mels, processor.batch_decode(ids, skip_special_tokens=True), decoder.certainties, strict=True
    ):
        expected = whisper.decode(theirs, torch.from_numpy(mel), options)
        assert text.strip() == expected.text
        assert compression(text.strip()) == expected.compression_ratio
        assert found.logprob == pytest.approx(expected.avg_logprob, abs=0.05)  # they let a time be written
        assert found.no_speech == pytest.approx(expected.no_speech_prob, rel=1e-3)
