"""The usual recipe: Whisper with transformers' Seq2SeqTrainer, every clip padded to 30 s. Nothing of this project.

    python benchmarks/seq2seq_recipe.py MODEL TRAIN.csv OUT [--method lora] [--epochs 3] [--seed 0]

Log-mels are computed before the clock starts. Prints one line of JSON: clips that were trained, the seconds from the
beginning of the first step to the end of the last, and the slowest step over the median. OUT gets the model, or the
adapter, and the processor.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import soundfile
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]


class Clips(torch.utils.data.Dataset):
    """A log-mel float32 [80|128, 3000] and the label ids of each row of a CSV; log-mels are kept in `folder`."""

    def __init__(self, manifest: Path, processor: WhisperProcessor, folder: Path):
        self.folder, self.labels = folder, []
        folder.mkdir(parents=True, exist_ok=True)
        for row in csv.DictReader(manifest.read_text(encoding="utf-8").splitlines()):
            audio, rate = soundfile.read(manifest.parent / row["audio_path"], dtype="float32")
            mel = processor(audio, sampling_rate=rate, return_tensors="np").input_features[0]
            np.save(folder / f"{len(self.labels)}.npy", mel)
            self.labels.append(processor.tokenizer(row["transcription"]).input_ids)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict:
        mel = torch.from_numpy(np.load(self.folder / f"{number}.npy"))
        return {"input_features": mel, "labels": self.labels[number]}


def collate(items: list[dict], start: int) -> dict[str, torch.Tensor]:
    labels = [torch.tensor(item["labels"]) for item in items]
    padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    if (padded[:, 0] == start).all():
        padded = padded[:, 1:]  # the model puts it in front again
    return {"input_features": torch.stack([item["input_features"] for item in items]), "labels": padded}


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.ends = self.ends or [time.perf_counter()]

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", choices=("full", "lora"), default="full")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    processor = WhisperProcessor.from_pretrained(args.model)
    model = WhisperForConditionalGeneration.from_pretrained(args.model, dtype=torch.float32)
    start = model.config.decoder_start_token_id
    if args.method == "lora":
        model = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules=LORA_TARGETS))
    clips, clock = Clips(args.train, processor, args.out / "log-mels"), Clock()
    settings = Seq2SeqTrainingArguments(
        output_dir=str(args.out),
        per_device_train_batch_size=args.batch_size,
        num_train_epochs=args.epochs,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # of all steps
        weight_decay=0.01,
        seed=args.seed,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        label_names=["labels"],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=settings,
        train_dataset=clips,
        data_collator=lambda items: collate(items, start),
        callbacks=[clock],
    )
    trainer.train()
    model.save_pretrained(args.out)
    processor.save_pretrained(args.out)
    seen = trainer.state.global_step * args.batch_size if args.max_steps > 0 else args.epochs * len(clips)
    taken = [end - begin for begin, end in pairwise(clock.ends)]
    seconds, slowest = clock.ends[-1] - clock.ends[0], max(taken) / statistics.median(taken)
    print(json.dumps({"samples": seen, "seconds": seconds, "slowest": slowest}))


if __name__ == "__main__":
    main()
