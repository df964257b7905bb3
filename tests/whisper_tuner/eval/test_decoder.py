"""Batched decoding against transformers' own, clip by clip."""

import csv
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessor

from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.eval.decoder import Certainty, Decoder
from whisper_tuner.eval.evaluation import evaluate, transcribe
from whisper_tuner.eval.predictions import PREDICTIONS, flags, write_predictions
from whisper_tuner.model.base_model import load_base

BUNDLED = Path(__file__).parents[3] / "bundled"


@pytest.fixture(scope="module")
def bundled():
    return *load_base(BUNDLED / "model"), load_manifest(BUNDLED / "data" / "test.csv").samples[:13]


@pytest.fixture(scope="module")
def expected(bundled) -> list[str]:
    model, processor, samples = bundled
    return [one_by_one(model, processor, sample.audio) for sample in samples]


def one_by_one(model, processor, path, **arguments) -> str:
    features = processor(load_audio(path), sampling_rate=16_000, return_tensors="pt").input_features
    with torch.no_grad():
        ids = model.generate(features, max_new_tokens=model.config.max_target_positions // 2, **arguments)
    return processor.batch_decode(ids, skip_special_tokens=True)[0].strip()


def test_a_real_model_writes_what_plain_generate_does_clip_by_clip(bundled, expected):
    model, processor, samples = bundled
    heard = transcribe(model, processor, [sample.audio for sample in samples], batch_size=16)
    assert [transcript.text for transcript in heard] == expected
    assert len(set(expected)) > 10


def test_the_order_of_an_evaluation_is_that_of_the_samples(bundled, expected):
    model, processor, samples = bundled
    result = evaluate(model, processor, samples, batch_size=5)
    assert [row.sample for row in result.rows] == list(samples)
    assert [row.hypothesis for row in result.rows] == expected


def texts(processor, several) -> list[str]:
    return [processor.decode(ids, skip_special_tokens=True) for ids in several]


def test_tokens_that_a_model_suppresses_are_not_written(bundled, expected, monkeypatch):
    model, processor, samples = bundled
    samples = samples[:5]
    written = [processor.tokenizer(text, add_special_tokens=False).input_ids for text in expected[:5]]
    monkeypatch.setattr(model.generation_config, "suppress_tokens", [written[0][1], written[1][2]])
    monkeypatch.setattr(model.generation_config, "begin_suppress_tokens", [ids[0] for ids in written])
    plain = [one_by_one(model, processor, sample.audio) for sample in samples]
    assert plain != expected[:5]
    heard = transcribe(model, processor, [sample.audio for sample in samples], batch_size=5)
    assert [transcript.text for transcript in heard] == plain


class NeverEnds(LogitsProcessor):
    """For texts whose first word is this one, however many others are in the batch."""

    def __init__(self, end: int, prompt: int, first: int):
        self.end, self.prompt, self.first = end, prompt, first

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > self.prompt:
            scores[input_ids[:, self.prompt] == self.first, self.end] = -torch.inf
        return scores


def test_added_words_are_written_and_special_tokens_are_not(bundled):
    """They stand behind <|notimestamps|>, where else the timestamps are."""
    model, processor = load_base(BUNDLED / "model")
    tokenizer, path = processor.tokenizer, bundled[2][0].audio
    old = tokenizer.encode(" the", add_special_tokens=False)[0]
    tokenizer.add_tokens([" Zanzibar", "<|0.00|>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|Ulm|>"]}, replace_extra_special_tokens=False)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    output = model.proj_out.weight.data
    output[[tokenizer.convert_tokens_to_ids(text) for text in ("<|0.00|>", "<|Ulm|>")]] = output[old] * 1.2
    output[tokenizer.convert_tokens_to_ids(" Zanzibar")] = output[old] * 1.05
    [heard] = transcribe(model, processor, [path])
    assert heard.text == "When does Zanzibar train to Sydney leave on Monday?"


@pytest.mark.slow
def test_clips_that_never_end_neither_change_nor_hold_up_the_others(bundled):
    model, processor, samples = bundled
    waveforms = [load_audio(sample.audio) for sample in samples]
    features = processor(waveforms, sampling_rate=16_000, return_tensors="pt").input_features
    limit = model.config.max_target_positions // 2
    plain = [model.generate(one[None], max_new_tokens=limit)[0] for one in features]
    end, firsts = model.generation_config.eos_token_id, [int(ids[0]) for ids in plain]
    first = max(set(firsts), key=lambda token: (firsts.count(token) < 5, firsts.count(token)))
    prompt = model.generate(features[:1], max_new_tokens=1, force_unique_generate_call=True).shape[1] - 1
    arguments = {"max_new_tokens": limit, "logits_processor": [NeverEnds(end, prompt, first)]}
    expected = [model.generate(one[None], **arguments)[0] for one in features]
    sizes = []
    hook = model.model.decoder.register_forward_pre_hook(
        lambda _module, _args, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    mask = torch.ones(features.shape[::2])
    heard = model.generate(features, attention_mask=mask, custom_generate=Decoder(), **arguments)
    hook.remove()
    assert texts(processor, heard) == texts(processor, expected)
    endless = firsts.count(first)
    assert 0 < endless < 5 and [len(ids) == limit for ids in expected].count(True) == endless
    assert len(sizes) == limit and sizes[-1] < 2 * endless and set(sizes) <= {13, 6, 3, 1}


@pytest.fixture
def looping(bundled):
    """The bundled model. In the first decoding of the third clip it repeats a word to the end."""
    model, processor, samples = bundled
    clip, decodings, last = -1, 0, None

    def encoded(*_):
        nonlocal clip, decodings
        clip, decodings = clip + 1, 0

    def counted(_module, _args, given):
        nonlocal decodings, last
        decodings += given["decoder_input_ids"].shape[1] > 1  # a prompt
        last = given["decoder_input_ids"][:, -1]

    def bent(_module, _given, scores):
        if clip == 2 and decodings == 1 and scores.shape[1] == 1:
            scores[0, -1, last] += 100
        return scores

    hooks = [
        model.model.encoder.register_forward_pre_hook(encoded),
        model.register_forward_pre_hook(counted, with_kwargs=True),
        model.proj_out.register_forward_hook(bent),
    ]
    yield model, processor, samples[:5]
    for hook in hooks:
        hook.remove()


def test_a_clip_that_loops_is_decoded_again_and_named(looping, expected, tmp_path):
    model, processor, samples = looping
    result = evaluate(model, processor, samples, batch_size=1)
    [again] = result.again
    assert again.sample == sorted(samples, key=lambda sample: -sample.duration_s)[2] and again.temperature > 0
    assert "repetition" in flags(*(" ".join(text.split()) for text in (again.sample.text, again.greedy)))
    assert result.loops == 0 and result.greedy.wer > 2 * result.normalized.wer
    others = [row for row in result.rows if row is not again]
    assert [row.hypothesis for row in others] == [row.greedy for row in others]
    assert all(row.hypothesis in expected for row in others)
    [row] = [row for row in read(write_predictions(tmp_path / PREDICTIONS, result.rows)) if row["temperature"] != "0.0"]
    assert (row["id"], row["greedy"], row["hypothesis"]) == (again.sample.id, again.greedy, again.hypothesis)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_what_is_drawn_for_a_clip_depends_on_it_alone(bundled):
    model, processor, samples = bundled
    waveforms = [load_audio(sample.audio) for sample in samples]
    features = processor(waveforms, sampling_rate=16_000, return_tensors="pt").input_features
    mask = torch.ones(features.shape[::2])

    def drawn(rows, seed=1):
        decoder = Decoder(1.0, seed)
        ids = model.generate(features[rows], attention_mask=mask[rows], max_new_tokens=64, custom_generate=decoder)
        return texts(processor, ids), [certainty.logprob for certainty in decoder.certainties]

    everyone = list(range(13))
    together, logprobs = drawn(everyone)
    apart = [drawn([row]) for row in everyone]
    assert together == [text for ([text], _) in apart]
    assert logprobs == pytest.approx([logprob for (_, [logprob]) in apart], abs=1e-3)
    assert drawn(everyone, seed=2)[0] != together


def test_tokens_are_drawn_as_often_as_they_are_probable():
    """Of three tokens with 1/2, 1/4, 1/4, and one that is ruled out, at temperature 1; at 0.5 with 2/3, 1/6, 1/6."""
    scores = torch.tensor([[0.5, 0.25, -torch.inf, 0.25]]).clamp(min=0).log()
    for temperature, shares in ((1.0, (0.5, 0.25, 0, 0.25)), (0.5, (2 / 3, 1 / 6, 0, 1 / 6))):
        decoder = Decoder(temperature, 7)
        tokens = [int(decoder._next(scores)) for _ in range(4000)]
        assert [tokens.count(token) / 4000 for token in range(4)] == pytest.approx(shares, abs=0.03)


def test_the_last_bit_of_a_score_does_not_change_what_is_drawn():
    """Of a whole vocabulary in which much is possible, as of noise: other machines and batches round otherwise."""
    scores = torch.randn(1, 51_864, generator=torch.Generator().manual_seed(1))
    noise = 1e-6 * torch.randn(1, 51_864, generator=torch.Generator().manual_seed(2))
    one, other = Decoder(1.0, 3), Decoder(1.0, 3)
    for _ in range(200):
        assert one._next(scores) == other._next(scores + noise)


@pytest.mark.parametrize(
    ("logprob", "no_speech", "text", "silence", "doubtful"),
    [
        (-0.5, 0.0, "a text", False, False),
        (-1.5, 0.0, "a text", False, True),
        (-0.5, 0.9, "a text", False, False),
        (-1.5, 0.9, "a text", True, False),
        (-0.5, 0.0, "on and " * 30, False, True),
        (-1.5, 0.9, "on and " * 30, True, False),
    ],
)
def test_doubts_are_openais(logprob, no_speech, text, silence, doubtful):
    certainty = Certainty(logprob, no_speech)
    assert (certainty.is_silence(), certainty.is_doubtful(text)) == (silence, doubtful)


@pytest.mark.parametrize("arguments", [{"language": "fr", "task": "transcribe"}, {"task": "transcribe"}])
def test_the_encoder_runs_once_also_where_the_language_is_detected(multilingual, clips, arguments):
    model, processor = multilingual
    paths = [clip.audio for clip in clips[:9]]
    expected = [one_by_one(model, processor, path, **arguments) for path in paths]
    encoded = []
    model.model.encoder.register_forward_pre_hook(lambda _module, given: encoded.append(len(given[0])))
    heard = transcribe(model, processor, paths, batch_size=8, **arguments)
    assert [transcript.text for transcript in heard] == expected and any(expected)
    assert encoded == [1] * 9
