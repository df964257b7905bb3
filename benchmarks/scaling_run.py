"""A case of scaling.py in a lab, by the product's own command; its steady speed, where its time goes, and its WERs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from lab import Lab, cpu
from lab.network import INTERFACE

from benchmarks.base import PROJECT, RunFailed, config_text, watching
from distributed.plan.forecast import FACTS
from distributed.run_dir.log import read_events

EVERY_S = 0.25  # between two looks at the counters
RUN_S = 7200.0  # for a case to end
MEASURING = "measuring three training steps"  # as distributed-train says it
TRAINS = ("distributed.worker.main", "distributed.worker.speed")
ENV = {"PYTHONPATH": f"{PROJECT}/gym:{PROJECT}", "OMP_NUM_THREADS": "1"}


def new_case(out: Path, case: object, profile: Mapping[str, object]) -> Path:
    """Make the folder of a case anew, with a config.ini of one profile, `bench`, whose runs are kept there."""
    folder = out / str(case).replace("/", "_")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sections = {"profile:bench": {**profile, "runs_dir": folder / "runs"}}
    (folder / "config.ini").write_text(config_text(sections), encoding="utf-8")
    return folder


def write_hosts(lab: Lab, folder: Path) -> Path:
    """Write a hosts file of a lab's hosts, the first of which is the master."""
    workers = [{"host": lab[name].address, "project_path": f"~/project-{name}"} for name in [*lab.hosts][1:]]
    hosts = {"master": lab["h1"].address, "workers": workers, "python_env": sys.prefix}
    (folder / "hosts.json").write_text(json.dumps(hosts), encoding="utf-8")
    return folder / "hosts.json"


def called(lab: Lab, folder: Path, command: Sequence[str]) -> str:
    """Call the product on the first host to its end, and return what it prints. Raises RunFailed.

    folder: of config.ini; its console.txt gets what is printed.
    """
    whole = [sys.executable, str(PROJECT / "cli_typer.py"), *command]
    whole += [] if "--config" in command else ["--config", str(folder / "config.ini")]
    try:
        done = lab.exec("h1", whole, cwd=str(PROJECT), env=ENV, timeout=RUN_S)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"{command[0]} did not end in {RUN_S:.0f} s") from error
    with (folder / "console.txt").open("a", encoding="utf-8") as console:
        console.write(done.stdout + done.stderr)
    if done.returncode:
        raise RunFailed(f"{(done.stdout + done.stderr)[-2000:]}\n{command[0]} ended with status {done.returncode}")
    return done.stdout


class Meter:
    """Keeps the counters of all hosts of a lab. Hosts go by their addresses, as in events."""

    def __init__(self, lab: Lab):
        self.samples: list[Sample] = []
        self._lab = lab

    def look(self) -> None:
        times = psutil.cpu_times()  # what the hypervisor takes away counts as used by others
        sample = Sample(
            time=time.time(),
            sent={host.address: bytes_sent(host.pid) for host in self._lab.hosts.values()},
            hosts=sum(map(cpu_seconds, self._lab.hosts)),
            machine=sum(times) - times.idle - times.iowait - times.guest - times.guest_nice,
        )
        self.samples.append(sample)


def bytes_sent(pid: int) -> int:
    """Read what the interface in the network namespace of a process has sent."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise ValueError(f"process {pid} sees no {INTERFACE}")


def cpu_seconds(host: str) -> float:
    """Add up the CPU seconds of the processes that a host has now, and of their children that have ended."""
    found = 0.0
    for pid in cpu.pids(cpu.group(host)):
        try:
            found += sum(psutil.Process(pid).cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return found


class Product:
    """A run of `distributed-train` in a lab that is up. Hosts get their share of a core when they begin to train, even
    for the three steps that are measured.

    cpus: of each host, or with `whole`, what a host has, of the threads that train.
    until: the step after which it is stopped; 0: it goes on to its end.
    keeps: link the master's checkpoints before the run removes them.
    """

    def __init__(
        self,
        lab: Lab,
        cpus: Sequence[float],
        sections: Mapping[str, Mapping[str, object]],
        folder: Path,
        *,
        until: int,
        keeps: bool,
        whole: float | None = None,
    ):
        self.lab, self.cpus, self.whole = lab, cpus, whole
        self.folder, self.until, self.keeps = folder, until, keeps
        self.kept = folder / "kept"
        (folder / "config.ini").write_text(config_text(sections), encoding="utf-8")
        write_hosts(lab, folder)

    def run(self) -> tuple[list[dict], list[Sample]]:
        """Return its events and what was counted. Raises RunFailed."""
        command = [sys.executable, str(PROJECT / "cli_typer.py"), "distributed-train", "bench"]
        command += ["--config", str(self.folder / "config.ini"), "--hosts", str(self.folder / "hosts.json")]
        FACTS.file.unlink(missing_ok=True)  # of hosts with the same addresses, and other shares
        meter = Meter(self.lab)
        with watching(meter.look, EVERY_S), (self.folder / "console.txt").open("w") as console:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": console, "stderr": subprocess.STDOUT}
            process = self.lab.popen("h1", command, cwd=str(PROJECT), env=ENV, **quiet)
            is_stopped = self._follow(process)
        if process.returncode and not is_stopped:
            said = (self.folder / "console.txt").read_text()[-2000:]
            raise RunFailed(f"{said}\ndistributed-train ended with status {process.returncode}")
        return read_events(self.run_dir / "events.jsonl")[0], meter.samples

    @property
    def run_dir(self) -> Path:
        """Return the folder of the run, which may not be there yet."""
        return next(self.folder.glob("runs/*/events.jsonl"), self.folder / "runs" / "none" / "events.jsonl").parent

    def _follow(self, process: subprocess.Popen) -> bool:
        """Wait until it ends, and return whether it was stopped."""
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
        """Link the checkpoints that are whole: those have an index."""
        for index in self.run_dir.glob("checkpoints/*/*.json"):
            folder = self.kept / index.parent.name
            if not folder.exists():
                folder.mkdir(parents=True)
                for file in (index, index.with_suffix(".safetensors")):
                    os.link(file, folder / file.name)

    def curve(self, unseen: Path, language: str) -> list[Point]:
        """Measure each checkpoint that was kept, and the final model, by `evaluate` on the whole machine."""
        events = read_events(self.run_dir / "events.jsonl")[0]
        kept = sorted((int(path.name) for path in self.kept.iterdir()), reverse=True) if self.kept.exists() else []
        # Odd ones are states inside a round, and hold those of the agreement before it as well.
        numbers = sorted({number // 2: number for number in kept}.values())
        at = times_of_agreements(events, [number // 2 for number in numbers])
        places = [at[number // 2] for number in numbers]
        steps = [event for event in events if event["type"] == "step"]
        began = min(event["time"] - event["seconds"] for event in steps)
        places.append((max(s["step"] for s in steps), max(s["time"] for s in steps) - began))
        models = [str(folder) for folder in (*self._exported(numbers), self.run_dir / "final")]
        command = [sys.executable, "cli_typer.py", "evaluate", *models, "--data", str(unseen), "--no-base"]
        command += ["--no-fallback", "--json", "--out", str(self.folder / "evaluation"), "--language", language]
        done = subprocess.run(command, cwd=PROJECT, env=os.environ | ENV, capture_output=True, text=True)
        if done.returncode:
            raise RunFailed(f"{done.stderr[-2000:]}\nevaluate ended with status {done.returncode}")
        rates = [record["wer"] for record in json.loads(done.stdout)]
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


# What is made of events and counters.


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was counted until `time`. sent: bytes by host. hosts, machine: CPU seconds of these and of all."""

    time: float
    sent: dict[str, int]
    hosts: float
    machine: float


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Figures of some steps. rate: clips a second of all hosts. computing, waiting (for others) and exchanging: shares
    of the hosts' time; the rest is mostly waiting for batches. counted, sent: bytes by host, by our counter and by the
    interface. others: cores that something else used. cores: of all hosts, with what is not training.
    """

    rate: float
    clips: int
    computing: float
    waiting: float
    exchanging: float
    counted: dict[str, int]
    sent: dict[str, float]
    others: float
    cores: float

    def mb_per_1000(self, bytes_by_host: Mapping[str, float]) -> float:
        """Return the MB of a host, on average, for 1,000 clips that all hosts train."""
        return sum(bytes_by_host.values()) / len(bytes_by_host) / 1e6 / self.clips * 1000


def steady(events: Iterable[dict], samples: Sequence[Sample], window: tuple[int, int]) -> Steady:
    """Make the figures of the steps after `window[0]` up to `window[1]`, of the hosts that are in the samples.

    Each host's clips by its own time: hosts that never wait for each other make their steps at different times.
    """
    first, last = window
    of_host: dict[str, dict[int, dict]] = {name: {} for name in samples[0].sent}
    for event in events:
        if event["type"] == "step" and first <= event["step"] <= last:
            of_host[event["host"]][event["step"]] = event
    if missing := [name for name, steps in of_host.items() if {first, last} - set(steps)]:
        raise ValueError(f"no steps {first} and {last} of {', '.join(missing)}")
    times = {name: (steps.pop(first)["time"], steps[last]["time"]) for name, steps in of_host.items()}
    seconds = {name: end - begin for name, (begin, end) in times.items()}
    clips = {name: sum(step["samples"] for step in steps.values()) for name, steps in of_host.items()}
    total = sum(seconds.values())
    steps = [step for steps in of_host.values() for step in steps.values()]
    exchanges = _exchanges(of_host)
    spent = sum(step.get("seconds_exchanging") or 0.0 for step in steps)
    at, begin, end = [s.time for s in samples], min(b for b, _ in times.values()), max(e for _, e in times.values())

    def grown(counter: Sequence[float], between: tuple[float, float]) -> float:
        before, after = np.interp(between, at, counter)
        return float(after - before)

    def cores(counter: Sequence[float]) -> float:
        return grown(counter, (begin, end)) / (end - begin)

    return Steady(
        rate=sum(clips[name] / seconds[name] for name in times),
        clips=sum(clips.values()),
        computing=(sum(step["seconds"] for step in steps) - spent) / total,
        waiting=(spent - exchanges) / total,
        exchanging=exchanges / total,
        counted={name: sum(step.get("bytes") or 0 for step in steps.values()) for name, steps in of_host.items()},
        sent={name: grown([s.sent[name] for s in samples], times[name]) for name in times},
        others=cores([s.machine - s.hosts for s in samples]),
        cores=cores([s.hosts for s in samples]),
    )


def _exchanges(of_host: Mapping[str, Mapping[int, dict]]) -> float:
    """Add up the seconds in exchanges, over all hosts: each is as long as for who comes last and waits for nobody."""
    by_step: dict[int, list[float]] = {}
    for steps in of_host.values():
        for number, step in steps.items():
            by_step.setdefault(number, []).append(step.get("seconds_exchanging") or 0.0)
    return sum(len(seconds) * min(seconds) for seconds in by_step.values() if len(seconds) > 1)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A model that a run had after `seconds` of training."""

    step: int
    seconds: float
    wer: float


def time_to(curve: Sequence[Point], wer: float) -> float | None:
    """Return the seconds until it is as good, along straight lines between the points; None: never."""
    for before, point in zip([None, *curve], curve, strict=False):
        if point.wer <= wer:
            if before is None:
                return point.seconds
            part = (before.wer - wer) / (before.wer - point.wer)
            return before.seconds + part * (point.seconds - before.seconds)
    return None


def times_of_agreements(events: Sequence[dict], agreements: Iterable[int]) -> dict[int, tuple[int, float]]:
    """Return (step, seconds since the first step began) of each: a round, or where there are none, a step."""
    steps = [event for event in events if event["type"] == "step"]
    began = min(event["time"] - event["seconds"] for event in steps)
    rounds = [(event["round"], event) for event in events if event["type"] == "round"]
    found: dict[int, tuple[int, float]] = {}
    for number, event in rounds or [(step["step"], step) for step in steps]:
        step, seconds = found.get(number, (0, 0.0))
        found[number] = (max(step, event["step"]), max(seconds, event["time"] - began))
    return {number: found[number] for number in agreements}
