"""How fast each machine trains, measured by a few real steps, and remembered.

Each machine trains alone on the same clips, all at the same time; see distributed/worker/speed.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from distributed.hosts.host_process import HostProcess
from distributed.hosts.keep_awake import awake, hosts_awake
from distributed.hosts.paths import PRUNED
from distributed.hosts.sync import Progress, sync
from distributed.plan import forecast
from distributed.plan.forecast import Speed
from distributed.plan.job import Job
from distributed.plan.on_hosts import for_host
from distributed.plan.prepare import prepare_run
from distributed.plan.run_spec import RunSpec
from distributed.ssh.connection import Remote
from distributed.ssh.host import Hosts
from distributed.ssh.machine import LocalMachine, Machine
from whisper_tuner.data.dataset import Manifest, Sample, write_manifest
from whisper_tuner.errors import HostError

from .this_machine import one_machine

PROBE = "distributed.worker.speed"
STEPS = 4  # of the probe, which counts all but the first
LATE_S, LIMIT_S = 235.0, 250.0  # the probe ends after 240 s by itself, unless its machine sleeps or hangs
SPEED = "speed of a machine 1"  # a kind of facts
NOT_IN_A_STEP = {
    *("epochs", "max_steps", "learning_rate", "weight_decay", "schedule", "warmup_ratio", "seed", "validation", "test"),
    *("runs_dir", "checkpoint_interval", "keep_checkpoints", "early_stopping", "keep_best", "blend"),
}


@awake()
def measure(
    job: Job,
    samples: Sequence[Sample],
    hosts: Hosts,
    remotes: Sequence[Remote],
    scratch: Path,
    progress: Progress,
    machine_workers: Sequence[int],
    *,
    steps: int = STEPS,
    test: Sequence[Sample] = (),
    alone: bool = False,
) -> list[Speed]:
    """Send what the probe needs, and run it on every machine. `job` is the job of one machine alone.

    steps: of the probe, which counts all but the first. test: clips that the master transcribes as well. alone: also
    measure steps of one host alone, of the whole batch.
    Code, model and clips stay on the hosts: a run needs them there as well. Raises HostError, DataError.
    """
    each = clips_of_each(job.profile.batch_size, len(hosts.all))
    sizes = sorted({each, job.profile.batch_size}) if alone else [each]
    # Clips of all lengths; always the same ones, so that each is sent only once.
    clips = of_all_lengths(samples, max(sizes) * steps)
    folder = scratch / "probe"
    folder.mkdir(exist_ok=True)
    write_manifest(folder / "clips.csv", clips)
    settings = {"validation": None, "test": None, "batch_size": each, "epochs": steps, "max_steps": steps}
    of_one = job.with_profile(train=folder / "clips.csv", **settings)
    room = None if hosts.workers else one_machine
    spec = prepare_run(of_one, folder, local_ranks=1, measured=room).launch.ranks[0].spec
    spec = dataclasses.replace(spec, device=hosts.master.device or "")
    specs, items = [spec], {}
    if test:
        write_manifest(folder / "test.csv", test)
        assert spec.profile
        specs = [dataclasses.replace(spec, profile=dataclasses.replace(spec.profile, test=folder / "test.csv"))]
    for host in hosts.workers:
        manifests = {"train": Manifest(job.profile.train, tuple(clips), ())}
        theirs, files = for_host(spec, host, manifests, {"train": clips}, folder)
        assert theirs.profile is not None, "made of a profile"
        listing = theirs.profile.train
        own_list = listing.with_name("probe.csv")  # beside that of the run, which stays as it is
        items[host.address] = [
            dataclasses.replace(item, remote=own_list.as_posix()) if item.remote == listing.as_posix() else item
            for item in files
        ]
        specs.append(dataclasses.replace(theirs, profile=dataclasses.replace(theirs.profile, train=own_list)))
    with hosts_awake(remotes):
        sync(remotes, items, progress, prune=PRUNED)
    shared = zip(specs, machine_workers, strict=True)
    specs = [dataclasses.replace(own, machine_workers=workers) for own, workers in shared]
    machines: list[Machine] = [LocalMachine(hosts.master.address), *remotes]
    # However this ends, the processes are killed first: the threads wait for them.
    with ThreadPoolExecutor(max_workers=len(machines)) as pool, ExitStack() as running:
        return list(pool.map(lambda machine, own: _one(machine, own, sizes, running), machines, specs))


def of_all_lengths(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Choose at most `count` clips, which stand for the lengths of all."""
    by_length = sorted(samples, key=lambda sample: (sample.duration_s, sample.id))
    count = min(count, len(by_length))
    return [by_length[(2 * number + 1) * len(by_length) // (2 * count)] for number in range(count)]


def clips_of_each(batch_size: int, hosts: int) -> int:
    """Return how many clips a machine's step has: as near to the mean of a run's steps as whole ones come."""
    return max(1, math.floor(batch_size / hosts + 0.5))


def _one(machine: Machine, spec: RunSpec, sizes: Sequence[int], running: ExitStack) -> Speed:
    last, began = "", time.monotonic()
    try:
        probe = HostProcess(machine, PROBE, spec.run_id)
        running.callback(probe.process.kill)
        watchdog = threading.Timer(LIMIT_S, probe.process.kill)
        watchdog.daemon = True  # what is started as this is left ends by itself, and holds nobody up
        running.callback(watchdog.cancel)
        watchdog.start()
        with suppress(HostError):  # it has ended already: what it said tells why
            probe.write(spec.to_json())
            probe.write(json.dumps([*sizes]))
        for _ in probe.events():
            pass
        last = probe.last_words
        return Speed(host=machine.name, **json.loads(last))
    except HostError as error:
        return Speed(host=machine.name, problem=str(error))
    except (ValueError, TypeError):
        is_late = time.monotonic() - began > LATE_S  # then its last words are nothing but a warning
        what = "" if is_late else last
        return Speed(host=machine.name, problem=what or f"it did not finish {STEPS} training steps in time")


def remember(job: Job, hosts: Hosts, speeds: Sequence[Speed]) -> None:
    """Keep what was measured for the next runs like this one, if every machine was measured."""
    if not speeds or any(speed.clips_s is None for speed in speeds):
        return
    kept = {name: dataclasses.asdict(speed) for name, speed in zip(_names(job, hosts), speeds, strict=True)}
    forecast.FACTS.keep(SPEED, dict.fromkeys(kept, ""), kept)


def remembered(job: Job, hosts: Hosts, *, alone: bool = False) -> list[Speed]:
    """Return the speeds of all hosts, if each was measured with about as many clips as a step has; else none.

    alone: as many as a step of all hosts has, and of one alone.
    """
    names, batch_size = _names(job, hosts), job.profile.batch_size
    clips = {clips_of_each(batch_size, len(hosts.all)), *([batch_size] if alone else [])}
    known = forecast.FACTS.known(SPEED, dict.fromkeys(names, ""))
    if not all(name in known for name in names):
        return []
    speeds = [Speed(**known[name] | {"host": host.address}) for name, host in zip(names, hosts.all, strict=True)]
    ranges = [(min(speed.sizes)[0], max(speed.sizes)[0]) for speed in speeds]
    return speeds if all(least <= min(clips) and max(clips) <= most for least, most in ranges) else []


def _names(job: Job, hosts: Hosts) -> list[str]:
    """Name each host with all that the time of a step depends on, as far as the profile says it. "": this machine."""
    profile = dataclasses.asdict(job.profile)
    # What is frozen in which precision follows from the memory, unless the profile says it.
    left_out = NOT_IN_A_STEP | ({"frozen_precision"} - set(job.origin))
    about = {key: value for key, value in profile.items() if key not in left_out}
    devices = [("", hosts.master.device), *((host.address, host.device) for host in hosts.workers)]
    texts = [json.dumps([*device, about], sort_keys=True, default=str) for device in devices]
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]
