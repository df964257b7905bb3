"""A case of scaling.py in a lab: the product's own command, or Seq2SeqTrainer under torchrun, and what was counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.local_run import PROJECT
from benchmarks.scaling_figures import Point, Sample, times_of_agreements
from distributed.checkup.speed import REMEMBERED
from distributed.run_dir.log import read_events
from lab import Lab, cpu
from lab.network import INTERFACE

EVERY_S = 0.25  # between two looks at the counters
RUN_S = 7200.0  # for a case to end
MEASURING = "measuring three training steps"  # as distributed-train says it
TRAINS = ("distributed.worker.main", "distributed.worker.speed")
PORT = 29500  # of torchrun's store
ENV = {"PYTHONPATH": f"{PROJECT}/gym:{PROJECT}", "OMP_NUM_THREADS": "1"}


class Meter:
    """Looks at the counters of all hosts of a lab, while it is open. Hosts go by their addresses, as in events."""

    def __init__(self, lab: Lab):
        self.samples: list[Sample] = []
        self._lab, self._over = lab, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.samples.append(self._look())
            if self._over.wait(EVERY_S):
                return

    def _look(self) -> Sample:
        traffic = {host.address: interface(host.pid) for host in self._lab.hosts.values()}
        times = psutil.cpu_times()  # what the hypervisor takes away counts as used by others
        return Sample(
            time=time.time(),
            sent={host: sent for host, (_, sent) in traffic.items()},
            received={host: received for host, (received, _) in traffic.items()},
            hosts=sum(map(cpu_seconds, self._lab.hosts)),
            machine=sum(times) - times.idle - times.iowait - times.guest - times.guest_nice,
        )


def interface(pid: int) -> tuple[int, int]:
    """Bytes received and sent, as the network namespace of a process has them."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            values = numbers.split()
            return int(values[0]), int(values[8])
    raise ValueError(f"process {pid} sees no {INTERFACE}")


def cpu_seconds(host: str) -> float:
    """Of the processes that a host has now, and of their children that have ended."""
    found = 0.0
    for pid in cpu.pids(cpu.group(host)):
        try:
            found += sum(psutil.Process(pid).cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return found


class Product:
    """A run of `distributed-train` in a lab that is up. Hosts get their share of a core when they begin to train, be it
    for the time of a step.

    cpus: of each host, or with `whole`, what a host has, of the threads that train.
    until: the step after which it is stopped; 0: it goes on to its end.
    keeps: link the master's checkpoints before the run removes them.
    """

    def __init__(
        self,
        lab: Lab,
        cpus: Sequence[float],
        config: str,
        folder: Path,
        *,
        until: int,
        keeps: bool,
        whole: float | None = None,
    ):
        self.lab, self.cpus, self.whole = lab, cpus, whole
        self.folder, self.until, self.keeps = folder, until, keeps
        self.kept = folder / "kept"
        (folder / "config.ini").write_text(config, encoding="utf-8")
        workers = [{"host": lab[name].address, "project_path": f"~/project-{name}"} for name in [*lab.hosts][1:]]
        hosts = {"master": lab["h1"].address, "workers": workers, "python_env": sys.prefix}
        (folder / "hosts.json").write_text(json.dumps(hosts), encoding="utf-8")

    def run(self) -> tuple[list[dict], list[Sample]]:
        """Its events and what was counted. Raises RuntimeError if it fails."""
        command = [sys.executable, str(PROJECT / "cli_typer.py"), "distributed-train", "bench"]
        command += ["--config", str(self.folder / "config.ini"), "--hosts", str(self.folder / "hosts.json")]
        REMEMBERED.unlink(missing_ok=True)  # of hosts with the same addresses, and other shares
        with Meter(self.lab) as meter, (self.folder / "console.txt").open("w") as console:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": console, "stderr": subprocess.STDOUT}
            process = self.lab.popen("h1", command, cwd=str(PROJECT), env=ENV, **quiet)
            is_stopped = self._follow(process)
        if process.returncode and not is_stopped:
            said = (self.folder / "console.txt").read_text()[-2000:]
            raise RuntimeError(f"distributed-train ended with status {process.returncode}: {said}")
        return read_events(self.run_dir / "events.jsonl")[0], meter.samples

    @property
    def run_dir(self) -> Path:
        """It may not be there yet."""
        return next(self.folder.glob("runs/*/events.jsonl"), self.folder / "runs" / "none" / "events.jsonl").parent

    def _follow(self, process: subprocess.Popen) -> bool:
        """Until it ends. Whether it was stopped."""
        limited, is_stopped, read, deadline = False, False, 0, time.monotonic() + RUN_S
        made: dict[str, int] = {}  # steps, by host
        while process.poll() is None:
            events, read = read_events(self.run_dir / "events.jsonl", read)
            made |= {event["host"]: event["step"] for event in events if event["type"] == "step"}
            if self.until and not is_stopped and len(made) == len(self.cpus) and min(made.values()) >= self.until:
                is_stopped = True
                process.terminate()  # Ctrl-C is ignored where the benchmark runs in the background
            measuring = MEASURING in (self.folder / "console.txt").read_text()
            if not limited and (measuring or any(event["type"] == "start" for event in events)):
                limited = True
                for name, share in zip(self.lab.hosts, self.cpus, strict=True):
                    self.lab.set_cpus(name, self.whole or share)
            if limited and self.whole:
                for name, share in zip(self.lab.hosts, self.cpus, strict=True):
                    training = [p.pid for module in TRAINS for p in self.lab.processes(name, f"-m {module}")]
                    self.lab.set_cpus_of_first_threads(name, training, share)
            if self.keeps:
                self._keep_checkpoints()
            if time.monotonic() > deadline:
                for name in self.lab.hosts:
                    self.lab.kill(name, "distributed")
            time.sleep(0.5)
        return is_stopped

    def _keep_checkpoints(self) -> None:
        """Whole ones have an index."""
        for index in self.run_dir.glob("checkpoints/*/*.json"):
            folder = self.kept / index.parent.name
            if not folder.exists():
                folder.mkdir(parents=True)
                for file in (index, index.with_suffix(".safetensors")):
                    os.link(file, folder / file.name)

    def curve(self, unseen: Path, language: str) -> list[Point]:
        """WER of each checkpoint that was kept, and of the final model, by `evaluate` on the whole machine."""
        events = read_events(self.run_dir / "events.jsonl")[0]
        kept = sorted((int(path.name) for path in self.kept.iterdir()), reverse=True) if self.kept.exists() else []
        # Odd ones are states inside a round, and hold those of the agreement before it as well.
        numbers = sorted({number // 2: number for number in kept}.values())
        at = times_of_agreements(events, [number // 2 for number in numbers])
        places = [at[number // 2] for number in numbers]
        steps = [event for event in events if event["type"] == "step"]
        began = min(event["time"] - event["seconds"] for event in steps)
        places.append((max(s["step"] for s in steps), max(s["time"] for s in steps) - began))
        models = [*self._exported(numbers), self.run_dir / "final"]
        rates = wers(models, unseen, language, self.folder)
        return [Point(step=s, seconds=t, wer=wer) for (s, t), wer in zip(places, rates, strict=True)]

    def _exported(self, numbers: Sequence[int]) -> list[Path]:
        from transformers.utils import logging

        from distributed.worker.whisper_wrapper import WhisperModelWrapper
        from exogym.flat import FlatParameters
        from exogym.state.checkpoint import Checkpoints
        from whisper_tuner.config import ConfigFile
        from whisper_tuner.export.final import save_final
        from whisper_tuner.model.base_model import load_base, prepare, set_language

        logging.disable_progress_bar()
        profile = ConfigFile(self.folder / "config.ini").profile("bench")
        found = []
        for number in numbers:
            [index] = (self.kept / f"{number:07d}").glob("*.json")
            state = Checkpoints(self.kept, index.stem).load(number)["agreed"]["strategy"]
            model, processor = load_base(profile.base_model)
            set_language(model, profile.language or None, profile.task)
            model = prepare(model, profile)
            FlatParameters(WhisperModelWrapper(model, processor, "cpu")).write(state["weights"])
            found.append(save_final(model, processor, self.folder / "models" / f"{number:07d}", profile.base_model))
        return found

    def clear(self) -> None:
        """Leave texts and figures: weights take much room."""
        for folder in (self.kept, self.folder / "models", *self.folder.glob("runs/*/checkpoints")):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (*self.folder.glob("runs/*/final"), *self.lab["h1"].home.glob("project-*/runs")):
            shutil.rmtree(folder, ignore_errors=True)


def wers(models: Sequence[Path], unseen: Path, language: str, folder: Path) -> list[float]:
    command = [sys.executable, "cli_typer.py", "evaluate", *map(str, models), "--data", str(unseen), "--no-base"]
    command += ["--no-fallback", "--json", "--out", str(folder / "evaluation"), "--language", language]
    env = os.environ | {"PYTHONPATH": ENV["PYTHONPATH"]}
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"evaluate ended with status {done.returncode}: {done.stderr[-2000:]}")
    return [record["wer"] for record in json.loads(done.stdout)]


def run_recipe(
    lab: Lab, cpus: Sequence[float], options: dict[str, object], model: Path, train: Path, folder: Path
) -> tuple[dict, list[Sample]]:
    """seq2seq_recipe.py on all hosts: what rank 0 told, and what was counted. Raises RuntimeError if it fails."""
    for name, share in zip(lab.hosts, cpus, strict=True):
        lab.set_cpus(name, share)
    words = [f"--{name}={value}" for name, value in options.items()]
    script, env = str(PROJECT / "benchmarks" / "seq2seq_recipe.py"), ENV | {"GLOO_SOCKET_IFNAME": INTERFACE}
    processes: list[subprocess.Popen] = []
    with Meter(lab) as meter:
        for rank, host in enumerate(lab.hosts.values()):
            between = ["-m", "torch.distributed.run", f"--nnodes={len(cpus)}", "--nproc-per-node=1"]
            between += [f"--node-rank={rank}", f"--master-addr={lab['h1'].address}", f"--master-port={PORT}"]
            between += [f"--local-addr={host.address}"]
            command = [sys.executable, *(between if len(cpus) > 1 else []), script, str(model), str(train)]
            with (folder / f"{host.name}.txt").open("w") as errors:
                out = {"stdin": subprocess.DEVNULL, "stderr": errors, "cwd": str(PROJECT), "env": env}
                processes.append(lab.popen(host.name, [*command, str(folder / host.name), *words], **out))
        try:
            told = [process.communicate(timeout=RUN_S)[0] for process in processes]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it had not ended after {RUN_S:.0f} s: see {folder}") from None
    if any(process.returncode for process in processes):
        said = "\n".join((folder / f"{name}.txt").read_text()[-1000:] for name in lab.hosts)
        raise RuntimeError(f"seq2seq_recipe.py failed: {said}")
    for name in lab.hosts:
        shutil.rmtree(folder / name)
    return json.loads(told[0].strip().splitlines()[-1]), meter.samples
