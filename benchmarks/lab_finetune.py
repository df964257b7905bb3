"""Fine-tune a real Whisper on real speech on three lab hosts that start with nothing but sshd and Python.

    sudo python benchmarks/lab_finetune.py --model whisper-tiny.en --data prompts-fr [--state DIR] [--quick]

MODEL is a checkpoint in transformers layout, DATA a folder with train.csv, validation.csv and test.csv. `hosts setup`,
then `distributed-train` with DiLoCo, full and LoRA; WER by our `evaluate` and by plain_wer.py. What is done is kept in
DIR, so an interrupted benchmark goes on where it stopped. Needs Linux, root, and the system packages of `make test`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.results import current_commit, table, write_section  # noqa: E402
from distributed.hosts import environment, wheelhouse  # noqa: E402
from distributed.hosts.agent.facts import facts  # noqa: E402
from lab import Lab  # noqa: E402
from whisper_tuner.data.dataset import load_manifest, write_manifest  # noqa: E402

CONFIG = """
[model:base]
base_model = {model}
[dataset:speech]
train = {data}/train.csv
validation = {data}/validation.csv
test =
[profile:full]
model = base
dataset = speech
epochs = 5
max_steps = {max_steps}
batch_size = 4
learning_rate = 1e-4
num_threads = 1
[profile:lora]
model = base
dataset = speech
method = lora
epochs = 5
max_steps = {max_steps}
batch_size = 4
learning_rate = 1e-3
num_threads = 1
[distributed:full-3]
base_profile = full
shares = fixed
communication_interval = 17
[distributed:lora-3]
base_profile = lora
shares = fixed
communication_interval = 5
"""
HEAD = (
    "model",
    "WER, `evaluate`",
    "WER, plain transformers",
    "run, s",
    "rounds",
    "sent per host, MB",
    "ranks agree",
)


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.state = args.state.resolve()
        self.state.mkdir(parents=True, exist_ok=True)
        self.commit = current_commit()  # of the code that runs, also if the tree changes under a long benchmark
        self.done_file = self.state / "done.json"
        self.done = json.loads(self.done_file.read_text()) if self.done_file.exists() else {}
        self.config = self.state / "config.ini"
        steps = 8 if args.quick else 0
        self.config.write_text(CONFIG.format(model=args.model.resolve(), data=args.data.resolve(), max_steps=steps))

    def step(self, name: str, work) -> None:
        """Do a piece of work once, also over several calls of the benchmark."""
        if name not in self.done:
            started = time.monotonic()
            result = work()
            seconds = round(time.monotonic() - started, 1)
            self.done[name] = {"seconds": seconds, "result": result, "commit": self.commit}
            self.done_file.write_text(json.dumps(self.done, indent=1))
        print(f"{name}: {self.done[name]}", flush=True)

    def run(self) -> None:
        if not {"setup", "full", "lora"} <= set(self.done):
            target = wheelhouse.target_of(facts([], str(PROJECT)))
            wheelhouse.fill("lab", target, *environment.write_lists(environment.own_pins()))
            with Lab(hosts=3, cpus=self.args.cpus, rate="100mbit", folder=self.state / "lab") as lab:
                h1, h2, h3 = (lab[name].address for name in ("h1", "h2", "h3"))
                hosts = self.state / "hosts.json"
                hosts.write_text(json.dumps({"master": h1, "workers": [h2, h3]}))
                self.step("setup", lambda: self.cli(lab, "hosts", "setup", "--hosts", str(hosts))[-300:])
                for method in ("full", "lora"):
                    self.step(method, lambda method=method: self.train(lab, method, hosts))
        test = self.test_clips()
        self.step("base WER", lambda: self.wer(str(self.args.model.resolve()), [], test))
        for method in ("full", "lora"):
            folder = f"{self.done[method]['result']['run']}/final"
            base = [str(self.args.model.resolve())] if method == "lora" else []
            self.step(f"{method} WER", lambda folder=folder, base=base: self.wer(folder, base, test))
        self.report()

    def test_clips(self) -> Path:
        """The whole test set, or its first eight clips."""
        whole = self.args.data.resolve() / "test.csv"
        if not self.args.quick:
            return whole
        few = self.state / "test.csv"
        samples = load_manifest(whole).samples[:8]
        write_manifest(few, samples)
        return few

    def cli(self, lab: Lab, *arguments: str) -> str:
        command = [sys.executable, "cli_typer.py", *arguments]
        done = lab.exec("h1", command, cwd=str(PROJECT), timeout=7200)
        if done.returncode:
            raise SystemExit(
                f"{' '.join(arguments)}: status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        return done.stdout

    def train(self, lab: Lab, method: str, hosts: Path) -> dict:
        said = self.cli(lab, "distributed-train", f"{method}-3", "--config", str(self.config), "--hosts", str(hosts))
        (self.state / f"{method}.txt").write_text(said)
        run = Path(re.search(r"run folder (.+)", said)[1].strip())
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        rounds: dict[int, set] = {}
        for event in events:
            if event["type"] == "round":
                rounds.setdefault(event["round"], set()).add((event["rank"], event["digest"]))
        agree = all(len(entries) == 3 and len({digest for _, digest in entries}) == 1 for entries in rounds.values())
        losses = [event["loss"] for event in events if event["type"] == "validation" and event["rank"] == 0]
        sent = sum(event["bytes"] for event in events if event["type"] == "round" and event["rank"] == 0)
        return {"run": str(run), "rounds": len(rounds), "agree": agree, "validation": losses, "bytes": sent}

    def wer(self, folder: str, base: list[str], test: Path) -> dict:
        ours = subprocess.run(
            [sys.executable, "cli_typer.py", "evaluate", folder, "--data", str(test), "--language", self.args.language,
             "--no-base", "--no-fallback", "--json", "--out", str(self.state / "evaluation")],
            cwd=PROJECT, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"},
        ).stdout  # fmt: skip
        script = PROJECT / "benchmarks" / "plain_wer.py"
        plain = subprocess.run(
            [sys.executable, str(script), folder, *base, str(test)], capture_output=True, text=True, check=True
        )
        return {"evaluate": round(json.loads(ours)[0]["wer"], 1), "plain": float(plain.stdout.split()[-1])}

    def report(self) -> None:
        length = "Quick: 8 steps, 8 test clips." if self.args.quick else "Five epochs."
        base = self.done["base WER"]["result"]
        rows = [["base", base["evaluate"], base["plain"], "", "", "", ""]]
        for method in ("full", "lora"):
            run, wer = self.done[method]["result"], self.done[f"{method} WER"]["result"]
            cells = [method, wer["evaluate"], wer["plain"], round(self.done[method]["seconds"]), run["rounds"]]
            rows.append([*cells, f"{run['bytes'] / 1e6:.0f}", "yes" if run["agree"] else "NO"])
        lines = [
            f"Three hosts of {self.args.cpus} core each, 100 Mbit/s links; `hosts setup` from nothing took "
            f"{self.done['setup']['seconds']:.0f} s. {length}",
            "",
            *table(HEAD, rows),
        ]
        print("\n".join(lines))
        commits = [self.done[method]["commit"] for method in ("full", "lora")]
        write_section(f"lab_finetune: {self.args.model.name} on {self.args.data.name}, three hosts", lines, commits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--language", default="", help="normaliser for WER; empty for English-only models' own")
    parser.add_argument("--state", type=Path, default=PROJECT / ".lab" / "bench-finetune")
    parser.add_argument("--cpus", type=float, default=0.5)
    parser.add_argument("--quick", action="store_true", help="8 steps, 8 test clips; leaves RESULTS.md alone")
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
