"""What a step costs at the shapes of the published models: padded to 30 s, cropped, frozen, and with a stored encoder.

    python benchmarks/step_cost.py [--quick] [--shapes tiny,small] [--device cuda] [--out DIR]

Random weights: the time of a step does not depend on them. Each cell is a process of its own: forward and backward of
a batch of clips of 2.5 s, the median of several, and the floating-point operations of its matrix products over what
the machine reaches on one large product, measured just before and just after. What is done is kept in DIR.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym"), str(PROJECT / "tests")]

from benchmarks.base import Done, RunFailed, names, parser_of, publish, table  # noqa: E402

CHART = PROJECT / "docs" / "performance.svg"
SHAPES = {
    "tiny": "openai/whisper-tiny",
    "base": "openai/whisper-base",
    "small": "openai/whisper-small",
    "medium": "openai/whisper-medium",
    "turbo": "openai/whisper-large-v3-turbo",
}
WAYS = {
    "padded": "all weights, each clip padded to 30 s",
    "cropped": "all weights, cropped",
    "frozen": "the decoder alone, cropped",
    "cached": "the decoder alone, the encoder's outputs stored",
}
FRAMES, TOKENS, PROMPT, CLIPS = 250, 16, 3, 8  # of a clip of 2.5 s, as French prompts have
AT_ONCE = {"padded": 1}  # clips that are computed at once where all would not fit
REPEATS = {"tiny": 7, "base": 7, "small": 5}  # otherwise 3
CACHED_TO_FROZEN, CACHED_TO_PADDED, OF_MATMUL = 1.5, 20.0, 0.6
CHARTED = ("tiny", "small")
PARTS = ("encoder", "decoder", "output layer and loss", "optimizer")
HEAD = ("shape", "way", "ms a clip", "times as fast as padded", "of the matmul rate, %")


@dataclass(frozen=True)
class Cell:
    """One measurement: the step of a model of this shape, trained in this way."""

    shape: str
    way: str
    repeats: int

    def __str__(self) -> str:
        return f"{self.shape}, {self.way}"


def measure(shape: str, way: str, device: torch.device, repeats: int) -> dict:
    """Return seconds and floating-point operations of a clip, the rate of a large matrix product, and seconds by part.

    A part's seconds are differences of medians: one below the noise would be negative, and is 0. The optimizer's are
    those of a batch divided by its clips, and not in `seconds`.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from exogym import device as devices
    from exogym.strategy import AllReduceConfig
    from exogym.strategy.optim import inner_optimizer
    from whisper_tuner.model.layers import decoder_options

    if device.type == "cpu":
        devices.keep_freed_memory()  # as a worker does
    model = wrapper_of(shape, way).to(device).train()
    clips = AT_ONCE.get(way, CLIPS)
    batch, whisper = batch_of(model, way, clips, device), model.model
    lengths = batch.get("lengths")

    def run(last: str) -> None:
        model.zero_grad(set_to_none=True)
        if last == "loss":
            loss, tokens = model(batch)
            return (loss * tokens).backward()
        states = model._encoded(batch, lengths)
        if last == "decoder":
            given = {"input_ids": batch["decoder_input_ids"].to(device)}
            if lengths:
                given = {"input_ids": given["input_ids"].unsqueeze(0), **decoder_options(whisper, lengths)}
            states = whisper.model.decoder(**given, encoder_hidden_states=states, use_cache=False)[0]
        if states.requires_grad:
            states.sum().backward()

    encoder, decoder = (timed(lambda end=end: run(end), repeats, device) / clips for end in ("encoder", "decoder"))
    before = matmul_rate(device)
    seconds = timed(lambda: run("loss"), repeats, device) / clips
    after = matmul_rate(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = timed(inner_optimizer(AllReduceConfig(), trained).step, repeats, device) / CLIPS
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:  # others are not counted on a CPU
        run("loss")
    parts = (encoder, decoder - encoder, seconds - decoder, optimizer)
    return {
        "seconds": seconds,
        "flops": counted.get_total_flops() / clips,
        "matmul": statistics.mean((before, after)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "parts": {part: max(0.0, each) for part, each in zip(PARTS, parts, strict=True)},
    }


def wrapper_of(shape: str, way: str) -> torch.nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    from distributed.worker.whisper_wrapper import WhisperModelWrapper
    from whisper_tuner.config import Profile
    from whisper_tuner.model.base_model import prepare
    from whisper_tuner.model.memory import PUBLISHED

    torch.manual_seed(0)
    special = {"bos_token_id": 50257, "eos_token_id": 50257, "pad_token_id": 50257, "decoder_start_token_id": 50258}
    model = WhisperForConditionalGeneration(WhisperConfig(**vars(PUBLISHED[SHAPES[shape]]), **special))
    method = "full" if way in ("padded", "cropped") else "decoder"
    return WhisperModelWrapper(prepare(model, Profile(base_model="", train=Path(), method=method)), None, "cpu")


def batch_of(model, way: str, clips: int, device: torch.device) -> dict:
    """Make a batch as a worker does: on a CPU clips stand one after the other."""
    from whisper_tuner.data.batch_shapes import Lengths

    config = model.model.config
    labels = torch.randint(50_000, (clips, TOKENS))
    labels[:, :PROMPT] = -100  # <|fr|><|transcribe|><|notimestamps|> are given, and not learnt
    frames = 2 * config.max_source_positions if way == "padded" else FRAMES
    if way == "cached":
        inputs = {"encoder_states": torch.randn(clips, frames // 2, config.d_model, device=device)}
    else:
        inputs = {"input_features": torch.randn(clips, config.num_mel_bins, frames, device=device)}
    batch = {**inputs, "decoder_input_ids": labels.clamp(min=0), "labels": labels, "ids": [""] * clips}
    if device.type != "cpu":
        return batch
    [(name, values)] = inputs.items()
    joined = torch.cat([*values], dim=0 if way == "cached" else 1)
    lengths = Lengths([frames] * clips, [TOKENS] * clips)
    ids = {key: batch[key].flatten() for key in ("decoder_input_ids", "labels")}
    return {**batch, name: joined, **ids, "lengths": lengths}


def timed(work, repeats: int, device: torch.device) -> float:
    """Return the median seconds, after one that warms up."""
    from exogym import device as devices

    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        devices.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def matmul_rate(device: torch.device) -> float:
    """Return the floating-point operations a second of a large product, float32."""
    size = 2048 if device.type == "cpu" else 8192
    one, other = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    return 2 * size**3 / timed(lambda: one @ other, 5, device)


def report(done: Done, cells: list[Cell]) -> list[str]:
    rows, misses, whole = [], [], {}
    for cell, result in done.found(cells):
        whole.setdefault(cell.shape, {})[cell.way] = result
    for shape, found in whole.items():
        if len(found) < len(WAYS):
            continue
        s = {way: result["seconds"] for way, result in found.items()}
        share = {way: 100 * r["flops"] / r["seconds"] / r["matmul"] for way, r in found.items()}
        for way in WAYS:
            rows.append([shape, WAYS[way], f"{1000 * s[way]:.1f}", f"{s['padded'] / s[way]:.1f}", f"{share[way]:.0f}"])
        if shape == "tiny" and s["frozen"] < CACHED_TO_FROZEN * s["cached"]:
            misses.append(f"{shape}: stored is {s['frozen'] / s['cached']:.2f} times as fast as frozen, not 1.5")
        if shape == "tiny" and s["padded"] < CACHED_TO_PADDED * s["cached"]:
            misses.append(f"{shape}: stored is {s['padded'] / s['cached']:.1f} times as fast as padded, not 20")
        if shape == "small" and share["cropped"] < 100 * OF_MATMUL:
            misses.append(f"{shape}: {share['cropped']:.0f} % of the matmul rate, not {100 * OF_MATMUL:.0f}")
    results = [result for _, result in done.found(cells)]
    parts = [
        [cell.shape, WAYS[cell.way], *(f"{1000 * seconds:.1f}" for seconds in result["parts"].values())]
        for cell, result in done.found(cells)
    ]
    rate = statistics.median(result["matmul"] for result in results) / 1e9 if results else 0.0
    return [
        f"Forward and backward on {', '.join(sorted({result['device'] for result in results}))}, float32, no "
        f"optimizer; {CLIPS} clips of {FRAMES / 100:g} s and {TOKENS} tokens, padded ones one at a time. A large "
        f"matrix product: {rate:.0f} GFLOP/s (median).",
        "",
        *table(HEAD, rows),
        "",
        f"Where the time goes, ms a clip. The optimizer steps once for {CLIPS} clips.",
        "",
        *table(("shape", "way", *PARTS), parts),
        *done.listed(cells, misses),
    ]


def main() -> int:
    parser = parser_of(__doc__, "step-cost", "tiny alone, two repeats")
    parser.add_argument("--shapes", default=list(SHAPES), type=names)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", nargs=3, metavar=("SHAPE", "WAY", "REPEATS"), help="print this cell as JSON")
    args = parser.parse_args()
    if args.one:
        shape, way, count = args.one
        print(json.dumps(measure(shape, way, torch.device(args.device), int(count))))
        return 0
    shapes = ["tiny"] if args.quick else args.shapes
    repeats = {shape: 2 if args.quick else REPEATS.get(shape, 3) for shape in shapes}
    cells = [Cell(shape, way, repeats[shape]) for shape in shapes for way in WAYS]

    def work(cell: Cell) -> dict:
        command = [sys.executable, __file__, "--device", args.device, "--one", cell.shape, cell.way, str(cell.repeats)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise RunFailed(ended.stderr[-1000:])
        result = json.loads(ended.stdout.strip().splitlines()[-1])
        return {**result, "told": f"{1000 * result['seconds']:.1f} ms a clip"}

    done = Done(args.out, f"{args.device}{'-quick' if args.quick else ''}.jsonl")
    done.run(cells, work, args.more)
    write = not (args.quick or done.left(cells))
    publish(f"step cost on {args.device}", report(done, cells), done.commits(cells), write=write)
    if write and args.device == "cpu":
        from benchmarks.charts import draw_steps

        bars: dict[str, dict] = {}
        for cell, result in done.found(cells):
            if cell.shape in CHARTED:
                bars.setdefault(cell.shape, {})[cell.way] = result["parts"]
        draw_steps(bars, CHART)
    return int(bool(done.failed))


if __name__ == "__main__":
    sys.exit(main())
