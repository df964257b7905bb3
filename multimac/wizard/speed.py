"""How fast each machine trains, measured by a few real steps; what training together promises, and the strategy for it.

Each machine trains alone on the same clips, all at the same time; see distributed/worker/speed.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from distributed.hosts.code import PRUNED
from distributed.hosts.keep_awake import awake, hosts_awake
from distributed.hosts.paths import PROJECT
from distributed.hosts.sync import Progress, sync
from distributed.plan.job import Job
from distributed.plan.launch import environment
from distributed.plan.prepare import for_host, prepare_run
from distributed.plan.run_spec import RunSpec
from distributed.ssh.connection import Remote
from distributed.ssh.host import Hosts
from distributed.ssh.machine import LocalMachine, Machine
from whisper_tuner.data.dataset import Manifest, Sample, write_manifest
from whisper_tuner.errors import HostError

from .draft import replaced

PROBE = "distributed.worker.speed"
STEPS = 4  # of the probe, which counts all but the first
LIMIT_S = 250.0  # the probe ends after 240 s by itself, unless its machine sleeps or hangs
HOME_NETWORK = 12.5e6  # bytes a second, which is 100 Mbit/s; assumed where nothing was measured
SMALL_SHARE = 0.2  # of the time that communication may take
FEWEST_ROUNDS = 20  # with fewer, DiLoCo's outer optimizer has too few steps to learn from


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one machine did; `clips_s` is None where it could not be measured, and `problem` says why."""

    host: str
    clips_s: float | None = None
    step_s: float | None = None
    trainable: int = 0
    problem: str = ""


@awake()
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
    each = math.ceil(job.profile.batch_size / len(hosts.all))  # of a step's clips, as in the run
    clips = _chosen(samples, each * STEPS)
    folder = scratch / "probe"
    folder.mkdir(exist_ok=True)
    write_manifest(folder / "clips.csv", clips)
    settings = {"validation": None, "test": None, "batch_size": each, "epochs": STEPS, "max_steps": STEPS}
    alone = replaced(job, train=folder / "clips.csv", **settings)
    spec = prepare_run(alone, folder, local_ranks=1).launch.ranks[0].spec
    spec = dataclasses.replace(spec, cache_dir=str(scratch / "cache"))
    specs, items = [spec], {}
    for host in hosts.workers:
        manifests = {"train": Manifest(job.profile.train, tuple(clips), ())}
        theirs, items[host.address] = for_host(spec, host, manifests, {"train": clips}, folder)
        specs.append(theirs)
    with hosts_awake(remotes):
        sync(remotes, items, progress, prune=PRUNED)
    sharing = zip(specs, machine_workers, strict=True)
    specs = [dataclasses.replace(own, machine_workers=workers) for own, workers in sharing]
    machines = [LocalMachine(hosts.master.address), *remotes]
    # However this ends, the processes are killed first: the threads wait for them.
    with ThreadPoolExecutor(max_workers=len(machines)) as pool, ExitStack() as running:
        return list(pool.map(lambda machine, own: _one(machine, own, running), machines, specs))


def _chosen(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Clips of all lengths; always the same ones, so that each is sent only once."""
    by_length = sorted(samples, key=lambda sample: (sample.duration_s, sample.id))
    count = min(count, len(by_length))
    return [by_length[(2 * number + 1) * len(by_length) // (2 * count)] for number in range(count)]


def _one(machine: Machine, spec: RunSpec, running: ExitStack) -> Speed:
    host = machine.host if isinstance(machine, Remote) else None
    python = machine.expand(host.python) if host else sys.executable
    project = machine.expand(host.project_path) if host else str(PROJECT)
    last = ""
    try:
        process = machine.start([python, "-m", PROBE, spec.run_id], env=environment(project), cwd=project)
        running.callback(process.kill)
        watchdog = threading.Timer(LIMIT_S, process.kill)
        watchdog.daemon = True  # what is started as this is left ends by itself, and holds nobody up
        running.callback(watchdog.cancel)
        watchdog.start()
        process.write(spec.to_json().encode() + b"\n")
        for line in process.lines():
            last = line.strip() or last
        return Speed(host=machine.name, **json.loads(last))
    except HostError as error:
        return Speed(host=machine.name, problem=str(error))
    except (ValueError, TypeError):
        return Speed(host=machine.name, problem=last or f"it did not finish {STEPS} training steps in time")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run has to do: the bytes of one agreement, the optimizer steps of each host, the number of hosts."""

    payload: int
    steps: int
    hosts: int


def exchange_s(work: Work, bytes_s: float | None) -> float:
    """Seconds of one agreement: a ring all-reduce sends 2 (N - 1) / N times the payload."""
    return 2 * (work.hosts - 1) / work.hosts * work.payload / (bytes_s or HOME_NETWORK)


def speed_up(speeds: Sequence[Speed], work: Work, bytes_s: float | None, steps_a_round: int) -> float | None:
    """How many times as fast as the first machine (the master) alone; None if a machine was not measured.

    Every host gets clips in proportion to its speed. What a step takes beside its clips is left out: alone, the master
    makes as many steps, of more clips.
    """
    if not speeds or any(speed.clips_s is None for speed in speeds):
        return None
    computing = step_s(speeds) * steps_a_round
    share = computing / (computing + exchange_s(work, bytes_s))
    return sum(speed.clips_s for speed in speeds) / speeds[0].clips_s * share


def step_s(speeds: Sequence[Speed]) -> float:
    """Seconds of a step of all machines that were measured, with clips in proportion to their speeds; 1 if none was."""
    measured = [speed for speed in speeds if speed.clips_s]
    clips = sum(speed.clips_s * speed.step_s for speed in measured)
    return clips / sum(speed.clips_s for speed in measured) if measured else 1.0


def suggested_interval(speeds: Sequence[Speed], work: Work, bytes_s: float | None) -> int:
    """Steps in a DiLoCo round: SMALL_SHARE of the time for communication at most, FEWEST_ROUNDS at least."""
    wanted = math.ceil(exchange_s(work, bytes_s) / (SMALL_SHARE * step_s(speeds)))
    return max(1, min(max(5, wanted), work.steps // FEWEST_ROUNDS))


def suggested_strategy(speeds: Sequence[Speed], work: Work, bytes_s: float | None) -> str:
    """AllReduce where agreeing at every step costs little, or where a run is too short for rounds."""
    cheap = exchange_s(work, bytes_s) <= SMALL_SHARE * step_s(speeds)
    return "allreduce" if cheap or work.steps < 2 * FEWEST_ROUNDS else "diloco"
