"""Train the bundled Whisper checkpoint from scratch on espeak-ng speech.

    python -m bundled.train_base bundled/model

Needs espeak-ng. Prints the WER on unseen sentences in the voices it was trained on.
"""

import argparse
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer
from torch import nn
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from bundled.make_data import Speaker, dataset_sentences, sentences, speak
from whisper_tuner.data.batches import pad_labels
from whisper_tuner.data.features import log_mel, pad_log_mel
from whisper_tuner.data.labels import Label, label_encoder
from whisper_tuner.eval.evaluation import transcribe
from whisper_tuner.eval.wer import error_rates
from whisper_tuner.model.base_model import encode

VOICES = ["en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-us-nyc"]
VARIANTS = ["", "+m1", "+m2", "+m3", "+m4", "+m6", "+m7", "+f1", "+f2", "+f3", "+f4", "+f5"]
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
BPE_TOKENS = 800
MAX_FRAMES = 3000  # 30 s, the length that ordinary inference pads to


def make_tokenizer(texts: list[str], folder: Path) -> WhisperTokenizer:
    """Byte-level BPE with Whisper's special tokens, saved in `folder`."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([f" {text}" for text in texts], vocab_size=BPE_TOKENS, min_frequency=2, show_progress=False)
    merges = [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    tokenizer = WhisperTokenizer(vocab=bpe.get_vocab(), merges=merges, pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    tokenizer.save_pretrained(folder)
    # The prompt's special tokens had no ids when the constructor looked them up; reading it again finds them.
    return WhisperTokenizer.from_pretrained(folder)


def make_model(tokenizer: WhisperTokenizer) -> WhisperForConditionalGeneration:
    token = tokenizer.convert_tokens_to_ids
    ids = {
        "bos_token_id": token("<|endoftext|>"),
        "eos_token_id": token("<|endoftext|>"),
        "pad_token_id": token("<|endoftext|>"),
        "decoder_start_token_id": token("<|startoftranscript|>"),
    }
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=128,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_target_positions=128,
        dropout=0.1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **ids,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        **ids,
        max_length=config.max_target_positions,
        is_multilingual=False,
        no_timestamps_token_id=token("<|notimestamps|>"),
        prev_sot_token_id=token("<|startofprev|>"),
        suppress_tokens=[],
        begin_suppress_tokens=[token("<|endoftext|>")],
        return_timestamps=False,
    )
    return model


def random_speaker(rng: random.Random) -> Speaker:
    voice = rng.choice(VOICES) + rng.choice(VARIANTS)
    return Speaker(voice=voice, words_per_minute=rng.randint(140, 210), pitch=rng.randint(25, 75))


def log_mels(texts: list[str], seed: int, extractor: WhisperFeatureExtractor, noisy: bool) -> list[np.ndarray]:
    """One float16 [80, frames] per text, each by a speaker of its own."""
    rng = random.Random(seed)
    speakers = [random_speaker(rng) for _ in texts]
    noise = [10 ** rng.uniform(-4, -1.7) if noisy and rng.random() < 0.5 else 0.0 for _ in texts]

    def one(index: int) -> np.ndarray:
        audio = speak(texts[index], speakers[index])
        audio = audio + noise[index] * np.random.default_rng(index).standard_normal(len(audio), dtype=np.float32)
        return log_mel(audio, extractor).astype(np.float16)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(len(texts))))


def pad(mels: list[np.ndarray], frames: int) -> torch.Tensor:
    """float32 [B, 80, frames]"""
    return torch.from_numpy(np.stack([pad_log_mel(mel.astype(np.float32), frames) for mel in mels]))


def mask_spectrum(mels: torch.Tensor, lengths: list[int], rng: random.Random) -> None:
    """SpecAugment in place: one band and one stretch of time per clip."""
    for mel, length in zip(mels, lengths, strict=True):
        band, start = rng.randint(0, 12), rng.randint(0, 68)
        mel[start : start + band] = mel.mean()
        stretch, start = rng.randint(0, 15), rng.randint(0, length - 16)
        mel[:, start : start + stretch] = mel.mean()


class Batches:
    """Endless batches: mostly cropped to the longest clip, and now and then padded up to 30 s."""

    def __init__(self, mels: list[np.ndarray], labels: list[Label], size: int, seed: int):
        self.mels, self.labels, self.size, self.rng = mels, labels, size, random.Random(seed)

    def __iter__(self):
        while True:
            order = sorted(range(len(self.mels)), key=lambda i: self.mels[i].shape[1] + self.rng.uniform(-20, 20))
            groups = [order[i : i + self.size] for i in range(0, len(order), self.size)]
            self.rng.shuffle(groups)
            for group in groups:
                yield self._batch(group)

    def _batch(self, group: list[int]):
        lengths = [self.mels[i].shape[1] for i in group]
        frames = max(lengths) + self.rng.randint(0, 50)
        if self.rng.random() < 0.08:
            frames = self.rng.randint(frames, MAX_FRAMES) if self.rng.random() < 0.5 else MAX_FRAMES
            group, lengths = group[: self.size // 8], lengths[: self.size // 8]
        mels = pad([self.mels[i] for i in group], frames + frames % 2)
        mask_spectrum(mels, lengths, self.rng)
        return mels, lengths, pad_labels([self.labels[i] for i in group], self.labels[0].written[-1])


def losses(model, ctc_head, mels, lengths, labels):
    """(decoder's cross-entropy, the encoder's CTC loss); CTC teaches the encoder where words are and is not kept."""
    hidden = encode(model, mels)
    inputs, labels = labels["decoder_input_ids"], labels["labels"]
    logits = model(encoder_outputs=hidden, decoder_input_ids=inputs, use_cache=False).logits
    decoder = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    text = [row[(row != -100)][:-1] for row in labels]  # without <|endoftext|>
    ctc = F.ctc_loss(
        ctc_head(hidden.last_hidden_state).log_softmax(-1).transpose(0, 1),
        torch.cat(text),
        torch.tensor([(length + 1) // 2 for length in lengths]),
        torch.tensor([len(row) for row in text]),
        blank=model.config.pad_token_id,
        zero_infinity=True,
    )
    return decoder, ctc


def train(model, batches: Batches, steps: int, learning_rate: float, report) -> None:
    ctc_head = nn.Linear(model.config.d_model, model.config.vocab_size)
    parameters = [*model.parameters(), *ctc_head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    averages = None
    for step, (mels, lengths, labels) in zip(range(steps), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min((step + 1) / 200, 1.0 - step / steps)
        model.train()
        decoder, ctc = losses(model, ctc_head, mels, lengths, labels)
        (decoder + 0.5 * ctc).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        now = torch.tensor([decoder.item(), ctc.item()])
        averages = now if averages is None else 0.98 * averages + 0.02 * now
        if step % 50 == 0:
            text, speech = averages.tolist()
            print(f"{time.strftime('%X')} step {step} loss {text:.3f} ctc {speech:.3f}", flush=True)
        if step % 500 == 499:
            report()


def word_error_rate(model, processor, mels: list[np.ndarray], texts: list[str]) -> float:
    """Per cent, by the ordinary `generate` on inputs padded to 30 s."""
    heard = transcribe(model, processor, [mel.astype(np.float32) for mel in mels])
    return 100 * error_rates(texts, [transcript.text for transcript in heard]).wer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--clips", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)

    for_tuning = frozenset(text for split in dataset_sentences().values() for text in split)
    unseen = sentences(80, options.seed + 1, without=for_tuning)
    texts = sentences(options.clips, options.seed + 2, without=for_tuning | frozenset(unseen))
    extractor = WhisperFeatureExtractor()
    tokenizer = make_tokenizer(texts, options.out)
    processor = WhisperProcessor(extractor, tokenizer)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    start = time.monotonic()
    mels = log_mels(texts, options.seed + 3, extractor, noisy=True)
    unseen_mels = log_mels(unseen, options.seed + 4, extractor, noisy=False)
    print(f"{len(mels)} clips spoken in {time.monotonic() - start:.0f} s", flush=True)
    encoder = label_encoder(model, tokenizer)
    labels = [encoder.encode(text) for text in texts]

    def report() -> None:
        print(f"WER {word_error_rate(model, processor, unseen_mels[:24], unseen[:24]):.1f}", flush=True)
        save(model, processor, options.out)

    train(model, Batches(mels, labels, options.batch, options.seed), options.steps, options.lr, report)
    save(model, processor, options.out)
    print(f"WER {word_error_rate(model, processor, unseen_mels, unseen):.1f} on {len(unseen)} unseen sentences")


def save(model, processor, out: Path) -> None:
    dropout, model.config.dropout = model.config.dropout, 0.0
    model.save_pretrained(out)
    model.config.dropout = dropout
    processor.save_pretrained(out)
    processor.feature_extractor.save_pretrained(out)


if __name__ == "__main__":
    main()
