"""How much sooner is a run's WER known if its hosts transcribe the test set too, and is it the same?

    sudo python benchmarks/shared_evaluation.py --model M --data DATA [--clips N] [--times 3] [--state DIR] [--quick]

M is a checkpoint in transformers layout, DATA a folder with train.csv and test.csv. On lab hosts of half a core
each a short LoRA run is trained once; then its test set, or N clips of it, is transcribed by the master alone, and with
one and two more hosts, in turns, so many times, and the median counts. The master keeps nothing from one time to the
next. What is done is kept in DIR, so an interrupted benchmark goes on where it stopped. --quick: eight clips, once;
nothing is written. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.results import current_commit, table, write_section  # noqa: E402
from distributed.hosts.host_process import environment  # noqa: E402
from distributed.launcher.evaluate import evaluate_run  # noqa: E402
from distributed.plan.launch import Launch  # noqa: E402
from lab import Lab  # noqa: E402
from whisper_tuner.data.dataset import load_manifest, write_manifest  # noqa: E402

CONFIG = """
[profile:short]
base_model = {model}
train = {data}/train.csv
test = {test}
method = lora
learning_rate = 1e-3
batch_size = 8
max_steps = 12
num_threads = 1
device = cpu
[distributed:short]
base_profile = short
"""
HEAD = ("hosts", "s, each time", "median, s", "against one", "clips of each host", "WER before", "WER after")


def main() -> None:
    args = arguments()
    if args.evaluate:
        print(json.dumps(evaluated(*args.evaluate)), flush=True)
        return
    state = args.state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    kept = state / "times.json"
    times = json.loads(kept.read_text()) if kept.exists() else []
    shown = [state, args.model.resolve(), args.data.resolve()]
    with Lab(hosts=3, cpus=0.5, rate="100mbit", shared_home=True, folder=state / "lab", shown=shown) as lab:
        run = trained(lab, args, state)
        for number in range(1 if args.quick else args.times):
            for hosts in (1, 2, 3):
                if len([one for one in times if one["hosts"] == hosts]) <= number:
                    times.append({"hosts": hosts, "commit": current_commit()} | measured(lab, run, hosts))
                    kept.write_text(json.dumps(times))
                    print(times[-1], flush=True)
    if not args.quick:
        report(args, times)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--state", type=Path, default=PROJECT / ".multimac" / "shared-evaluation")
    parser.add_argument("--clips", type=int, help="of the test set; all, if not given")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--evaluate", nargs=2, help=argparse.SUPPRESS)  # RUN HOSTS, on the master
    return parser.parse_args()


def trained(lab: Lab, args: argparse.Namespace, state: Path) -> Path:
    """The run's folder."""
    if runs := sorted(state.glob("runs/*/final")):
        return runs[-1].parent
    data = args.data.resolve()
    write_manifest(state / "test.csv", load_manifest(data / "test.csv").samples[: 8 if args.quick else args.clips])
    config, hosts = state / "config.ini", state / "hosts.json"
    config.write_text(CONFIG.format(model=args.model.resolve(), data=data, test=state / "test.csv"))
    workers = [{"host": lab[name].address, "project_path": f"~/{name}"} for name in ("h2", "h3")]
    env = str(Path(sys.executable).parent.parent)
    hosts.write_text(json.dumps({"master": lab["h1"].address, "workers": workers, "python_env": env}))
    command = [sys.executable, "cli_typer.py", "distributed-train", "short", "--config", str(config)]
    done = on_master(lab, [*command, "--hosts", str(hosts)])
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return sorted(state.glob("runs/*/final"))[-1].parent


def measured(lab: Lab, run: Path, hosts: int) -> dict:
    variables = [f"{name}={value}" for name, value in environment(PROJECT).items()]
    done = on_master(lab, ["env", *variables, sys.executable, __file__, "--evaluate", str(run), str(hosts)])
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def on_master(lab: Lab, command: list[str]) -> subprocess.CompletedProcess:
    return lab.exec("h1", command, cwd=str(PROJECT), timeout=3600)


def evaluated(run: str, hosts: str) -> dict:
    launch, events = Launch.load(Path(run)), []
    helpers = [rank for rank in launch.ranks if rank.host][: int(hosts) - 1]
    with tempfile.TemporaryDirectory() as folder:
        spec = dataclasses.replace(launch.ranks[0].spec, cache_dir=f"{folder}/cache")
        began = time.perf_counter()
        evaluate_run(spec, Path(launch.test), events.append, helpers)
        seconds = time.perf_counter() - began
    results = [event for event in events if event["type"] == "evaluation"]
    counts: dict[str, int] = {}
    for result in results:
        for host, clips in result.get("clips_of", {launch.ranks[0].label: result["clips"]}).items():
            counts[host] = counts.get(host, 0) + clips
    in_order = [counts[rank.label] for rank in launch.ranks if rank.label in counts]
    return {"seconds": round(seconds, 1), "clips": in_order, "wer": [result["wer"] for result in results]}


def report(args: argparse.Namespace, times: list[dict]) -> None:
    medians, rows = {}, []
    for hosts in (1, 2, 3):
        own = [one for one in times if one["hosts"] == hosts]
        medians[hosts] = statistics.median(one["seconds"] for one in own)
        each = ", ".join(f"{one['seconds']:.0f}" for one in own)
        wer = [", ".join(sorted({f"{one['wer'][place]:.1f}" for one in own})) for place in (0, 1)]
        ratio = f"{medians[1] / medians[hosts]:.2f}x"
        rows.append((hosts, each, f"{medians[hosts]:.0f}", ratio, ", ".join(map(str, own[-1]["clips"])), *wer))
    clips = sum(times[0]["clips"]) // 2
    about = (
        f"{args.model.name} on {clips} test clips of {args.data.name}, before and after a short LoRA run, on lab hosts "
        "of half a core each at 100 Mbit/s. With the start of the hosts' processes, and with all that has to be sent."
    )
    commits = [one["commit"] for one in times]
    write_section("A run's evaluation on its hosts", [about, "", *table(HEAD, rows)], commits)


if __name__ == "__main__":
    main()
