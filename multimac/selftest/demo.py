"""Two rounds of the bundled demo on all hosts: the real run, in a folder that is removed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from distributed.hosts.code import PRUNED
from distributed.hosts.paths import PROJECT
from distributed.hosts.sync import sync
from distributed.launcher.follow import start_launcher
from distributed.plan.job import Job, resolve
from distributed.plan.prepare import Prepared, prepare_run
from distributed.preflight.folders import shared_folders
from distributed.run_dir.folder import new_run
from distributed.run_dir.log import read_events
from distributed.ssh.host import Hosts
from whisper_tuner.config import ConfigFile

from .asking import Asking, Place, ProbeLost
from .gather import reached

ROUNDS, ALONE = 2, 2
NAME = f"selftest-{os.getpid()}"  # another one may run at the same time, also on the same hosts
STOP_S = 4.0


def code(asks: Asking) -> list[dict]:
    """Send the code, the bundled model and clips, as a run does. Who cannot take them is left out from here on."""
    found = shared_folders(asks.places[0].host, [place.machine for place in asks.places[1:]])
    refused = {name: problem for problem in found for name in problem.hosts}
    with _scratch(asks) as folder, new_run(folder, NAME, keep=False) as run_dir:
        prepared = _prepare(asks, run_dir)
        models = {rank.host: rank.spec.profile.base_model for rank in prepared.launch.ranks if rank.host}

        def send(place: Place) -> dict:
            if place is asks.places[0]:
                return {"files": 0, "bytes": 0, "seconds": 0.0}
            if problem := refused.get(place.host.address):
                raise ProbeLost(str(problem))
            place.model = models[place.host]
            [report] = sync([place.machine], prepared.items, prune=PRUNED)
            return {"files": report.files, "bytes": report.bytes, "seconds": report.seconds}

        answers = asks.on_all(send)
    asks.desk.places = [place for place, answer in zip(asks.places, answers, strict=True) if "answer" in answer]
    return answers


def demo(asks: Asking) -> dict:
    with _scratch(asks) as folder, new_run(folder, NAME, keep=False) as run_dir:
        began = time.monotonic()
        prepared = _prepare(asks, run_dir)
        sync([place.machine for place in asks.places[1:]], prepared.items, prune=PRUNED)
        dataclasses.replace(prepared.launch, evaluate=False).save(run_dir)
        launcher = start_launcher(run_dir)
        asks.at_end(lambda: _end(asks, launcher, run_dir.name))
        launcher.wait()
        letters = {place.host.address: place.letter for place in asks.places}
        return {"seconds": time.monotonic() - began, **_summary(run_dir, letters)}


@contextlib.contextmanager
def _scratch(asks: Asking):
    folder = Path(tempfile.mkdtemp(prefix="multimac-selftest-"))
    asks.desk.sanitizer.learn_folders([str(folder)], "temporary")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _job(runs_dir: Path) -> Job:
    job = resolve(ConfigFile(PROJECT / "config.ini"), "demo-diloco")
    steps = ROUNDS * job.distribution.communication_interval
    values = {"runs_dir": runs_dir, "max_steps": steps, "validation": None, "test": None}
    return dataclasses.replace(job, profile=dataclasses.replace(job.profile, **values))


def _prepare(asks: Asking, run_dir: Path) -> Prepared:
    """Of one machine alone, two ranks on it."""
    if len(asks.places) < 2:
        return prepare_run(_job(run_dir.parent), run_dir, local_ranks=ALONE)
    hosts = Hosts(master=asks.desk.hosts.master, workers=reached(asks))
    workers = asks.desk.machine_workers if len(asks.desk.machine_workers) == len(hosts.all) else ()
    address = asks.places[0].address or "127.0.0.1"
    return prepare_run(_job(run_dir.parent), run_dir, hosts=hosts, address=address, machine_workers=workers)


def _end(asks: Asking, launcher: subprocess.Popen, run: str) -> None:
    """Stop it, and remove what the hosts have of it. Twice means at once; it then kills its workers, on all hosts."""
    for _ in range(2):
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
            time.sleep(0.3)
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(STOP_S)
    if launcher.poll() is None:
        launcher.kill()
    asks.on_all(lambda place: asks.forget(place, run), asks.places[1:])


def _summary(run_dir: Path, letters: Mapping[str, str]) -> dict:
    """letters: by the label of a rank; those of one machine alone are numbered."""
    events, _ = read_events(run_dir / "events.jsonl")
    of = {kind: [event for event in events if event["type"] == kind] for kind in ("step", "round", "lost", "end")}
    hosts = list(dict.fromkeys(event["host"] for event in of["step"]))
    end = of["end"][-1] if of["end"] else {"status": None, "message": _last_words(run_dir)}
    return {
        "status": end["status"],
        "message": end["message"],
        "rounds": max((event["round"] for event in of["round"]), default=0),
        "lost": [[letters.get(event["host"], event["host"]), event["reason"]] for event in of["lost"]],
        "hosts": [{"host": letters.get(host, host), **_of_host(host, of["step"])} for host in hosts],
        "said": [event["what"] for event in events if event["type"] in ("warning", "problem")],
    }


def _of_host(host: str, steps: list[dict]) -> dict:
    own = [event for event in steps if event["host"] == host]
    return {
        "steps": len(own),
        "seconds": sum(event["seconds"] for event in own),
        "communicating": sum(event.get("seconds_communicating") or 0.0 for event in own),
        "losses": [event.get("loss") for event in own],
    }


def _last_words(run_dir: Path) -> str:
    return "the launcher ended without a word: " + (run_dir / "launcher.log").read_text(errors="replace")[-300:]
