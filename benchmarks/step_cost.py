"""What a step costs at the shapes of the published models: padded to 30 s, cropped, frozen, and with a stored encoder.

    python benchmarks/step_cost.py [--quick] [--shapes tiny,small] [--device cuda] [--out DIR]

Random weights: the time of a step does not depend on them. Each cell is a process of its own: forward and backward of
a batch of clips of 2.5 s, the median of several, and the floating-point operations of its matrix products over what
the machine reaches on one large product, measured just before and just after. What is done is kept in DIR.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.performance_chart import draw_steps  # noqa: E402
from benchmarks.results import current_commit, listed, table, write_section  # noqa: E402

CHART = PROJECT / "docs" / "performance.svg"
OUT = Path.home() / ".cache" / "multimac" / "bench-step-cost"
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


def measure(shape: str, way: str, device: torch.device, repeats: int) -> dict:
    """Seconds and floating-point operations of a clip, and the rate of a large matrix product."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    keep_memory(device)
    model = wrapper_of(shape, way).to(device).train()
    clips = AT_ONCE.get(way, CLIPS)
    batch = batch_of(model, way, clips, device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss, tokens = model(batch)
        (loss * tokens).backward()

    before = matmul_rate(device)
    seconds = timed(step, repeats, device)
    after = matmul_rate(device)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:  # others are not counted on a CPU
        step()
    about = {"seconds": seconds / clips, "flops": counted.get_total_flops() / clips}
    return {**about, "matmul": statistics.mean((before, after)), "device": name_of(device)}


def measure_parts(shape: str, way: str, device: torch.device, repeats: int) -> dict:
    """Seconds of a clip in each part of a step; the optimizer's are those of a batch divided by its clips."""
    from exogym.strategy import AllReduceConfig
    from exogym.strategy.optim import inner_optimizer
    from whisper_tuner.model.padding_free import decoder_options

    keep_memory(device)
    model = wrapper_of(shape, way).to(device).train()
    clips = AT_ONCE.get(way, CLIPS)
    batch, whisper = batch_of(model, way, clips, device), model.model
    lengths = batch.get("lengths")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = inner_optimizer(AllReduceConfig(), trained)

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

    ends = {
        part: timed(lambda part=part: run(part), repeats, device) / clips for part in ("encoder", "decoder", "loss")
    }
    run("loss")
    found = {"encoder": ends["encoder"], "decoder": ends["decoder"] - ends["encoder"]}
    found |= {"output layer and loss": ends["loss"] - ends["decoder"]}
    return found | {"optimizer": timed(optimizer.step, repeats, device) / CLIPS}


def keep_memory(device: torch.device) -> None:
    """As a worker does."""
    from exogym import device as devices

    if device.type == "cpu":
        devices.keep_freed_memory()


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
    """As a worker makes it: on a CPU clips stand one after the other."""
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
    """The median, after one that warms up."""
    from exogym import device as devices

    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        devices.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations a second, float32."""
    size = 2048 if device.type == "cpu" else 8192
    one, other = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    return 2 * size**3 / timed(lambda: one @ other, 5, device)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def parts_of(done: dict[str, dict], shape: str, way: str) -> dict[str, float]:
    """They are differences of medians: one below the noise may be negative."""
    return {part: max(0.0, done[f"{shape} {way} parts"][part]) for part in PARTS}


def report(done: dict[str, dict], shapes: list[str]) -> list[str]:
    rows, misses = [], []
    for shape in shapes:
        found = {way: done[f"{shape} {way}"] for way in WAYS if f"{shape} {way}" in done}
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
    whole = [result for result in done.values() if "device" in result]
    devices = sorted({result["device"] for result in whole})
    rate = statistics.median(result["matmul"] for result in whole) / 1e9
    parts = [
        [shape, WAYS[way], *(f"{1000 * seconds:.1f}" for seconds in parts_of(done, shape, way).values())]
        for shape in shapes
        for way in WAYS
        if f"{shape} {way} parts" in done
    ]
    return [
        f"Forward and backward on {', '.join(devices)}, float32, no optimizer; {CLIPS} clips of {FRAMES / 100:g} s and "
        f"{TOKENS} tokens, padded ones one at a time. A large matrix product: {rate:.0f} GFLOP/s (median).",
        "",
        *table(HEAD, rows),
        "",
        f"Where the time goes, ms a clip. The optimizer steps once for {CLIPS} clips.",
        "",
        *table(("shape", "way", *PARTS), parts),
        *(listed(misses) or ["", "No misses."]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="tiny alone, two repeats; leaves RESULTS.md alone")
    parser.add_argument("--parts", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=3, metavar=("SHAPE", "WAY", "REPEATS"), help="print this cell as JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.one:
        shape, way, repeats = args.one
        print(json.dumps((measure_parts if args.parts else measure)(shape, way, device, int(repeats))))
        return 0
    shapes = ["tiny"] if args.quick else args.shapes.split(",")
    kept = args.out / f"{args.device}{'-quick' if args.quick else ''}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    done = json.loads(kept.read_text()) if kept.exists() else {}
    cells = [f"{shape} {way}" for shape in shapes for way in WAYS]
    cells += [f"{shape} {way} parts" for shape in shapes if shape in CHARTED for way in WAYS]
    for cell in cells:
        if cell in done:
            continue
        shape, way, *parts = cell.split()
        repeats = "2" if args.quick else str(REPEATS.get(shape, 3))
        command = [sys.executable, __file__, "--device", args.device, "--one", shape, way, repeats]
        command += [f"--{part}" for part in parts]
        said = subprocess.run(command, capture_output=True, text=True)
        if said.returncode:
            print(f"{cell}: failed: {said.stderr[-1000:]}", flush=True)
            continue
        done[cell] = json.loads(said.stdout.strip().splitlines()[-1]) | {"commit": current_commit()}
        kept.write_text(json.dumps(done, indent=2))
        times = [
            f"{name} {1000 * value:.1f}" for name, value in done[cell].items() if name in PARTS or name == "seconds"
        ]
        print(f"{cell}: ms a clip: {', '.join(times)}", flush=True)
    lines = report(done, shapes)
    print("\n".join(lines))
    if not args.quick:
        commits = [result["commit"] for result in done.values()]
        write_section(f"step cost on {args.device}", lines, commits)
        if args.device == "cpu":
            whole = [shape for shape in CHARTED if all(f"{shape} {way} parts" in done for way in WAYS)]
            draw_steps({shape: {way: parts_of(done, shape, way) for way in WAYS} for shape in whole}, CHART)
    return 0


if __name__ == "__main__":
    sys.exit(main())
