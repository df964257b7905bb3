"""Fine-tune a real Whisper on real speech on three lab hosts that start with nothing but sshd and Python.

    sudo python benchmarks/lab_finetune.py --model whisper-tiny.en --data prompts-fr [--out DIR] [--quick]

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
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym"), str(PROJECT / "tests")]

from lab import Lab  # noqa: E402

from benchmarks.base import Done, RunFailed, config_text, parser_of, profile_of, publish, table  # noqa: E402
from distributed.hosts import environment, wheelhouse  # noqa: E402
from distributed.hosts.agent.facts import facts  # noqa: E402
from whisper_tuner.data.dataset import load_manifest, write_manifest  # noqa: E402

METHODS = {"full": (1e-4, 17), "lora": (1e-3, 5)}  # learning rate, and steps of a round
QUICK_STEPS, QUICK_CLIPS = 8, 8
HEAD = ("model", "WER, `evaluate`", "WER, plain transformers", "run, s", "rounds", "sent per host, MB", "ranks agree")


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.model, self.data = args, args.model.resolve(), args.data.resolve()
        self.out = (args.out / "quick" if args.quick else args.out).resolve()
        self.done = Done(self.out)
        self.config = self.out / "config.ini"
        sections: dict[str, dict[str, object]] = {}
        for method, (rate, steps) in METHODS.items():
            settings = {"epochs": 5, "max_steps": QUICK_STEPS if args.quick else 0, "batch_size": 4, "num_threads": 1}
            profile = profile_of(self.model, self.data, method=method, learning_rate=rate, **settings)
            sections[f"profile:{method}"] = profile
            distribution = {"base_profile": method, "shares": "fixed", "communication_interval": steps}
            sections[f"distributed:{method}-3"] = distribution
        self.config.write_text(config_text(sections), encoding="utf-8")
        self.in_lab = ["setup", *METHODS]
        self.wers = [f"{name} WER" for name in ("base", *METHODS)]

    def run(self) -> int:
        if self.done.left(self.in_lab):
            target = wheelhouse.target_of(facts([], str(PROJECT)))
            wheelhouse.fill("lab", target, *environment.write_lists(environment.own_pins()))
            with Lab(hosts=3, cpus=self.args.cpus, rate="100mbit", folder=self.out / "lab") as lab:
                h1, h2, h3 = (lab[name].address for name in ("h1", "h2", "h3"))
                hosts = self.out / "hosts.json"
                hosts.write_text(json.dumps({"master": h1, "workers": [h2, h3]}))
                self.done.run(self.in_lab[:1], lambda step: self.set_up(lab, hosts))
                if not self.done.failed:
                    self.done.run(self.in_lab[1:], lambda method: self.train(lab, method, hosts))
        if not self.done.left(self.in_lab):
            test = self.test_clips()
            self.done.run(self.wers, lambda step: self.wer(step.removesuffix(" WER"), test))
        if not self.done.left(self.wers):
            self.report()
        return int(bool(self.done.failed))

    def set_up(self, lab: Lab, hosts: Path) -> dict:
        began = time.monotonic()
        self.cli(lab, "hosts", "setup", "--hosts", str(hosts))
        return {"seconds": round(time.monotonic() - began, 1)}

    def test_clips(self) -> Path:
        """Return the whole test set, or its first clips."""
        if not self.args.quick:
            return self.data / "test.csv"
        write_manifest(self.out / "test.csv", load_manifest(self.data / "test.csv").samples[:QUICK_CLIPS])
        return self.out / "test.csv"

    def cli(self, lab: Lab, *arguments: str) -> str:
        command = [sys.executable, "cli_typer.py", *arguments]
        done = lab.exec("h1", command, cwd=str(PROJECT), timeout=7200)
        if done.returncode:
            raise RunFailed(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{arguments[0]}: status {done.returncode}")
        return done.stdout

    def train(self, lab: Lab, method: str, hosts: Path) -> dict:
        began = time.monotonic()
        said = self.cli(lab, "distributed-train", f"{method}-3", "--config", str(self.config), "--hosts", str(hosts))
        seconds = round(time.monotonic() - began, 1)
        (self.out / f"{method}.txt").write_text(said)
        run = Path(re.search(r"run folder (.+)", said)[1].strip())
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        rounds: dict[int, set] = {}
        for event in events:
            if event["type"] == "round":
                rounds.setdefault(event["round"], set()).add((event["rank"], event["digest"]))
        agree = all(len(entries) == 3 and len({digest for _, digest in entries}) == 1 for entries in rounds.values())
        sent = sum(event["bytes"] for event in events if event["type"] == "round" and event["rank"] == 0)
        return {"run": str(run), "seconds": seconds, "rounds": len(rounds), "agree": agree, "bytes": sent}

    def wer(self, name: str, test: Path) -> dict:
        """Measure the base model, or what a method has trained, by our `evaluate` and by plain transformers."""
        model = str(self.model) if name == "base" else f"{self.done[name]['run']}/final"
        ours = subprocess.run(
            [sys.executable, "cli_typer.py", "evaluate", model, "--data", str(test), "--language", self.args.language,
             "--no-base", "--no-fallback", "--json", "--out", str(self.out / "evaluation")],
            cwd=PROJECT, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"},
        ).stdout  # fmt: skip
        plain = [sys.executable, str(PROJECT / "benchmarks" / "plain_wer.py"), model, str(test)]
        plain += ["--base", str(self.model)] if name == "lora" else []
        said = subprocess.run(plain, capture_output=True, text=True, check=True).stdout
        return {"evaluate": round(json.loads(ours)[0]["wer"], 1), "plain": float(said.split()[-1])}

    def report(self) -> None:
        setup, *runs = (self.done[step] for step in self.in_lab)
        base, *wers = (self.done[step] for step in self.wers)
        rows = [["base", base["evaluate"], base["plain"], "", "", "", ""]]
        for method, run, wer in zip(METHODS, runs, wers, strict=True):
            cells = [method, wer["evaluate"], wer["plain"], round(run["seconds"]), run["rounds"]]
            rows.append([*cells, f"{run['bytes'] / 1e6:.0f}", "yes" if run["agree"] else "NO"])
        lines = [
            f"Three hosts of {self.args.cpus} core each, 100 Mbit/s links; `hosts setup` from nothing took "
            f"{setup['seconds']:.0f} s. Five epochs.",
            "",
            *table(HEAD, rows),
        ]
        name = f"lab_finetune: {self.model.name} on {self.data.name}, three hosts"
        publish(name, lines, self.done.commits(self.in_lab), write=not self.args.quick)


def main() -> int:
    parser = parser_of(__doc__, "finetune", f"{QUICK_STEPS} steps, {QUICK_CLIPS} test clips", more=False)
    parser.set_defaults(out=PROJECT / ".lab" / "bench-finetune")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--language", default="", help="normaliser for WER; empty for English-only models' own")
    parser.add_argument("--cpus", type=float, default=0.5)
    return Bench(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())
