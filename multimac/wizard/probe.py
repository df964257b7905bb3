"""Measures how fast each machine trains: a few real steps of this model on all of them at the same time.

Each machine trains alone (world size 1) on the same clips. Its first step is not counted.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from distributed.control.messages import split_line
from distributed.hosts.code import PRUNED
from distributed.hosts.paths import PROJECT
from distributed.hosts.sync import Progress, sync
from distributed.plan.job import Job
from distributed.plan.launch import environment
from distributed.plan.prepare import for_host, prepare_run
from distributed.plan.run_spec import RunSpec
from distributed.ssh.connection import Remote
from distributed.ssh.host import Hosts
from distributed.ssh.machine import LocalMachine, Machine, Process
from exogym.membership.coordinator import Coordinator
from whisper_tuner.data.dataset import Manifest, Sample, write_manifest
from whisper_tuner.errors import HostError

from .draft import replaced

WARM_UP, COUNTED = 1, 3  # steps
LIMIT_S = 240.0  # for loading the model and all steps
ENDLESS = 100_000  # epochs and steps: the worker must not reach its end, where it would save a model

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one machine did; `clips_s` is None where it could not be measured, and `problem` says why."""

    host: str
    clips_s: float | None = None
    step_s: float | None = None
    trainable: int = 0
    problem: str = ""


def measure(
    job: Job,
    samples: Sequence[Sample],
    hosts: Hosts,
    remotes: Sequence[Remote],
    scratch: Path,
    progress: Progress,
    machine_workers: Sequence[int],
) -> list[Speed]:
    """Send what the probe needs, and run it on every machine. `job` is the job of one machine alone.

    Code, model and clips stay on the hosts: a run needs them there as well. Raises HostError, DataError.
    """
    clips = _chosen(samples, job.profile.batch_size * (WARM_UP + COUNTED))
    folder = scratch / "probe"
    folder.mkdir(exist_ok=True)
    write_manifest(folder / "clips.csv", clips)
    steps = {"epochs": ENDLESS, "max_steps": ENDLESS, "validation": None, "test": None}
    alone = replaced(job, train=folder / "clips.csv", **steps)
    spec = prepare_run(alone, folder, local_ranks=1).launch.ranks[0].spec
    spec = dataclasses.replace(spec, cache_dir=str(scratch / "cache"))
    specs, items = [spec], {}
    for host in hosts.workers:
        manifests = {"train": Manifest(job.profile.train, tuple(clips), ())}
        theirs, items[host.address] = for_host(spec, host, manifests, {"train": clips}, folder)
        specs.append(theirs)
    sync(remotes, items, progress, prune=PRUNED)
    sharing = zip(specs, machine_workers, strict=True)
    specs = [dataclasses.replace(own, machine_workers=workers) for own, workers in sharing]
    machines = [LocalMachine(hosts.master.address), *remotes]
    with ThreadPoolExecutor(max_workers=len(machines)) as pool, _Running() as running:
        return list(pool.map(lambda pair: _one(*pair, running), zip(machines, specs, strict=True)))


class _Running:
    """The workers of a probe; all are killed when it ends, however it ends."""

    def __init__(self) -> None:
        self.processes: list[Process] = []

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()


def _one(machine: Machine, spec: RunSpec, running: _Running) -> Speed:
    try:
        process = _start(machine, spec.run_id)
    except HostError as error:
        return Speed(host=machine.name, problem=str(error))
    running.processes.append(process)
    watchdog = threading.Timer(LIMIT_S, process.kill)
    watchdog.start()
    try:
        process.write(spec.to_json().encode() + b"\n")
        return _read(machine.name, process, spec)
    except HostError as error:
        return Speed(host=machine.name, problem=str(error))
    finally:
        watchdog.cancel()
        process.kill()


def _start(machine: Machine, run_id: str) -> Process:
    host = machine.host if isinstance(machine, Remote) else None
    python = machine.expand(host.python) if host else sys.executable
    project = machine.expand(host.project_path) if host else str(PROJECT)
    return machine.start([python, "-m", "distributed.worker.main", run_id], env=environment(project), cwd=project)


def _read(name: str, process: Process, spec: RunSpec) -> Speed:
    def send(_: str, message: dict) -> None:
        process.write(json.dumps(message).encode() + b"\n")

    alone = Coordinator(spec.hosts, send, emit=lambda event: None, clock=time.monotonic)
    steps: list[dict] = []
    trainable, last, problem = 0, "", ""
    for line in process.lines():
        text, event = split_line(line)
        kind = event["type"] if event else ""
        if kind == "beat":
            process.write(b"beat 1\n")
        elif kind == "ready":
            alone.ready(spec.name)
        elif kind == "vote":
            alone.vote(spec.name, event)
        elif kind == "start":
            trainable = event["trainable"]
        elif kind == "step":
            steps.append(event)
        elif kind == "error":
            problem = event["message"]
        last = text.strip() or last
        if len(steps) == WARM_UP + COUNTED:
            break
    counted = steps[WARM_UP:]
    if len(counted) < COUNTED:
        return Speed(host=name, problem=problem or last or f"no {WARM_UP + COUNTED} steps in {LIMIT_S:.0f} s")
    seconds = sum(step["seconds"] for step in counted)
    clips = sum(step["samples"] for step in counted)
    return Speed(host=name, clips_s=clips / seconds, step_s=seconds / COUNTED, trainable=trainable)


def _chosen(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Clips of all lengths; always the same ones, so that each is sent only once."""
    by_length = sorted(samples, key=lambda sample: (sample.duration_s, sample.id))
    count = min(count, len(by_length))
    return [by_length[(2 * number + 1) * len(by_length) // (2 * count)] for number in range(count)]
