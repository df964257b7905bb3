"""How much memory does a worker take, and how long does a step, with each choice that saves some?

    python benchmarks/memory_choices.py [--models small,medium] [--ways full,low_memory] [--out DIR] [--quick]

Models of the published sizes with random weights; a clip of 30 s in each step, layers computed again in the backward
pass, on a CPU. LoRA by how frozen weights are held; full fine-tuning by its optimizer, alone and on two ranks with
DiLoCo, and with AllReduce without and with `shard_optimizer`. Beside each measured row stands what the preflight would
say; models and ways that are left out are estimates only.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import wave
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "gym", "tests")]

from benchmarks.base import (  # noqa: E402
    Done,
    Peak,
    ended,
    names,
    parser_of,
    profile_of,
    publish,
    start_finetune,
    table,
    watching,
)
from distributed.plan.automatic import more_bytes  # noqa: E402
from distributed.run_dir.log import scan  # noqa: E402
from exogym.strategy import strategy_config  # noqa: E402
from whisper_tuner.config import Profile  # noqa: E402
from whisper_tuner.model.memory import FROZEN, PUBLISHED, training_memory  # noqa: E402

CLIPS, STEPS, RATE, CLIP_S = 4, 2, 16_000, 30
NEAR = 0.15  # of what was measured: an estimate that is further off is a miss
SIZES = ("tiny", "base", "small", "medium", "large-v3-turbo", "large-v3")
LORA, FULL = {"method": "lora"}, {"method": "full"}
LOW_MEMORY = FULL | {"optimizer": "low_memory"}
DILOCO, ALLREDUCE = {"strategy": "diloco", "communication_interval": "1"}, {"strategy": "allreduce"}
WAYS: dict[str, tuple[dict[str, str], dict[str, str]]] = {  # the profile's keys, those of two ranks if they are two
    **{f"LoRA, {kind}": (LORA | {"frozen_precision": kind}, {}) for kind in FROZEN},
    "full": (FULL, {}),
    "low_memory": (LOW_MEMORY, {}),
    "full, DiLoCo": (FULL, DILOCO),
    "low_memory, DiLoCo": (LOW_MEMORY, DILOCO),
    "full, AllReduce": (FULL, ALLREDUCE),
    "full, AllReduce sharded": (FULL, ALLREDUCE | {"shard_optimizer": "true"}),
}
MOST_GB = {  # what a row may take
    "medium": {"LoRA, bf16": 5.0, "LoRA, int8": 4.0},
    "large-v3-turbo": {"LoRA, bf16": 5.5, "LoRA, int8": 4.0, "low_memory": 9.0},
    "large-v3": {"LoRA, bf16": 8.5, "LoRA, int8": 6.0, "low_memory": 11.0, "low_memory, DiLoCo": 12.0},
    "small": {"low_memory": 5.0, "low_memory, DiLoCo": 6.0},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a published size, and a key of WAYS."""

    size: str
    way: str

    def __str__(self) -> str:
        return f"{self.size}, {self.way}"

    @property
    def ranks(self) -> int:
        return 2 if WAYS[self.way][1] else 1

    @property
    def settings(self) -> dict[str, object]:
        """The profile's keys, but for model and data."""
        about = {"device": "cpu", "precision": "float32", "gradient_checkpointing": True, "batch_size": self.ranks}
        about |= {"checkpoint_interval": 1}  # the memory of a copy counts
        return about | {"audio_context": "full", "language": "fr"} | WAYS[self.way][0]

    @property
    def estimate(self) -> int:
        profile = Profile(base_model="x", train=Path("x"), **self.settings)
        keys = {"strategy": "allreduce"} | WAYS[self.way][1] | {"inner_optim": profile.optimizer}
        keys.pop("communication_interval", None)
        config = strategy_config(keys.pop("strategy"), keys)
        shape = PUBLISHED[f"openai/whisper-{self.size}"]
        return training_memory(shape, profile, clips=1, clip_s=CLIP_S, more_bytes=more_bytes(config, self.ranks))

    @property
    def most_gb(self) -> float | None:
        return MOST_GB.get(self.size, {}).get(self.way)

    @property
    def plainest(self) -> Case:
        """The row with whose seconds this one's are compared."""
        way = "LoRA, float32" if self.way.startswith("LoRA") else self.way.replace("low_memory", "full")
        way = way.removesuffix(" sharded")
        return Case(size=self.size, way=way)


def main() -> int:
    parser = parser_of(__doc__, "memory-choices", "whisper-tiny only")
    parser.add_argument("--models", type=names, default=["tiny", "small"], metavar="SIZES", help="those that are run")
    parser.add_argument(
        "--ways", type=names, default=[*WAYS], metavar="NAMES", help="those that are run, by their first word"
    )
    args = parser.parse_args()
    out = args.out.resolve()
    known = [Case(size=size, way=way) for size in (("tiny",) if args.quick else SIZES) for way in WAYS]
    ways = {way for way in WAYS for word in args.ways if way.startswith(word)}
    run = [case for case in known if (args.quick or case.size in args.models) and case.way in ways]
    done = Done(out)
    done.run(run, lambda case: measure(case, out), args.more)
    head = ("model, way", "GB at the peak", "estimate", "allowed", "seconds a step", "times the plain way's")
    body = [*table(head, [row(case, done) for case in known]), *done.listed(run, misses(known, done))]
    publish("memory: each choice", body, done.commits(known), write=not args.quick)
    return 0


def measure(case: Case, out: Path) -> dict:
    """Train some steps; return the most bytes that the worker needed, and the seconds of a step after the first."""
    model = out / case.size
    if not (model / "config.json").exists():
        write_model(model, case.size)
    write_clips(out / "clips")
    profile = profile_of(model, out / "clips", validation="", max_steps=STEPS, **case.settings)
    sections = {"profile:run": profile}
    if case.ranks > 1:
        sections["distributed:run"] = {"base_profile": "run"} | WAYS[case.way][1]
    process = start_finetune(out / "run", sections, "run", ranks=case.ranks)
    needed = Needed(process.pid, out / "run")
    with watching(needed.look, 0.05):
        status = process.wait()
    [attempt] = scan(ended(out / "run", status) / "events.jsonl").attempts
    seconds = statistics.median(step.seconds for step in attempt.steps[1:])
    told = f"{needed.bytes / 1e9:.2f} GB, {seconds:.1f} s a step"
    return {"bytes": needed.bytes, "seconds": seconds, "told": told}


class Needed(Peak):
    """The most bytes that any process of a run has needed so far.

    While it loads, pages of the model's file do not count: the system takes them back. Later on they do: where a file
    holds float32, these pages are the weights.
    """

    def __init__(self, pid: int, folder: Path):
        super().__init__(pid)
        self._folder, self._has_loaded = folder, False

    def look(self) -> None:
        if not self._has_loaded:
            events = next(self._folder.glob("runs/*/events.jsonl"), None)
            self._has_loaded = events is not None and '"type": "memory"' in events.read_text(encoding="utf-8")
        super().look()

    def held(self, process: psutil.Process) -> int:
        memory = process.memory_info()
        return memory.rss - (0 if self._has_loaded else memory.shared)


def write_model(folder: Path, size: str) -> None:
    """Write a Whisper of random weights, in fp16 where that is published so; most of its tokens have no text."""
    import torch
    from small_whisper import write_whisper
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration, WhisperProcessor

    write_whisper(folder, multilingual=True, seconds=CLIP_S)
    config, generation = WhisperConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    shape = PUBLISHED[f"openai/whisper-{size}"]
    for key, value in (dataclasses.asdict(shape) | {"init_std": 0.02}).items():
        setattr(config, key, value)
    torch.set_default_dtype(torch.float16 if size.startswith("large") else torch.float32)
    try:
        model = WhisperForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config = generation
    model.save_pretrained(folder)
    processor = WhisperProcessor.from_pretrained(folder)
    processor.feature_extractor = type(processor.feature_extractor)(feature_size=shape.num_mel_bins)
    processor.save_pretrained(folder)


def write_clips(folder: Path) -> None:
    """Write clips of 30 s of noise, and their list."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    lines = ["audio,text"]
    for number in range(CLIPS):
        noise = np.random.default_rng(number).integers(-3000, 3000, CLIP_S * RATE, dtype=np.int16)
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(noise.tobytes())
        lines.append(f"{number}.wav,{'word ' * 35}")
    (folder / "train.csv").write_text("\n".join([*lines, ""]), encoding="utf-8")


def row(case: Case, done: Done) -> tuple:
    taken = dict(done.found([case])).get(case)
    plain = dict(done.found([case.plainest])).get(case.plainest)
    gigabytes, seconds = (f"{taken['bytes'] / 1e9:.2f}", f"{taken['seconds']:.1f}") if taken else ("", "")
    times = f"{taken['seconds'] / plain['seconds']:.2f}" if taken and plain else ""
    return case, gigabytes, f"{case.estimate / 1e9:.2f}", case.most_gb or "", seconds, times


def misses(known: list[Case], done: Done) -> list[str]:
    found = []
    for case in known:
        result = dict(done.found([case])).get(case)
        taken = result["bytes"] if result else case.estimate
        if case.most_gb and taken > 1e9 * case.most_gb:
            found.append(f"{case}: {taken / 1e9:.2f} GB, allowed are {case.most_gb:g}")
        if result and abs(case.estimate / taken - 1) > NEAR:
            found.append(f"{case}: {taken / 1e9:.2f} GB, where {case.estimate / 1e9:.2f} are estimated")
    return found


if __name__ == "__main__":
    sys.exit(main())
