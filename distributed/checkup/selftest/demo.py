"""Runs two rounds of the bundled demo on all hosts, as any run, in a folder that is removed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from distributed.checkup.findings import Finding, ok, problem
from distributed.checkup.preflight import shared_folders
from distributed.hosts.code import PRUNED
from distributed.hosts.paths import PROJECT
from distributed.hosts.sync import sync
from distributed.launcher.follow import start_launcher
from distributed.plan.job import resolve
from distributed.plan.prepare import Prepared, prepare_run
from distributed.run_dir.folder import new_run
from distributed.run_dir.log import read_events
from distributed.ssh.connection import Remote
from whisper_tuner.config import ConfigFile

from .asking import Asking, Place, ProbeLost

ROUNDS, ALONE = 2, 2
NAME = f"selftest-{os.getpid()}"  # another one may run at the same time, also on the same hosts
STOP_S = 4.0


def send_code(asks: Asking) -> list[dict]:
    """Send the code, the bundled model and clips, as a run does. A host that cannot take them is left out from here."""
    found = shared_folders(asks.places[0].host, asks.remotes)
    refused = {name: wrong for wrong in found for name in wrong.hosts}
    with _scratch(asks) as folder, new_run(folder, NAME, keep=False) as run_dir:
        prepared = _prepare(asks, run_dir)
        ranks = prepared.launch.ranks
        models = {rank.host: rank.spec.profile.base_model for rank in ranks if rank.host and rank.spec.profile}

        def send(place: Place) -> dict:
            if not isinstance(place.machine, Remote):
                return {"files": 0, "bytes": 0, "seconds": 0.0}
            if wrong := refused.get(place.host.address):
                raise ProbeLost(str(wrong))
            place.model = models[place.host]
            [report] = sync([place.machine], prepared.items, prune=PRUNED)
            return {"files": report.files, "bytes": report.bytes, "seconds": report.seconds}

        answers = asks.on_all(send)
    asks.desk.places = [place for place, answer in zip(asks.places, answers, strict=True) if "answer" in answer]
    return answers


def run_demo(asks: Asking) -> dict:
    with _scratch(asks) as folder, new_run(folder, NAME, keep=False) as run_dir:
        began = time.monotonic()
        prepared = _prepare(asks, run_dir)
        sync(asks.remotes, prepared.items, prune=PRUNED)
        dataclasses.replace(prepared.launch, evaluate=False).save(run_dir)
        launcher = start_launcher(run_dir)

        def end() -> None:
            """Stop it, and remove what hosts have of it. Twice means at once; it then kills its workers everywhere."""
            for _ in range(2):
                if launcher.poll() is None:
                    launcher.send_signal(signal.SIGTERM)
                    time.sleep(0.3)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(STOP_S)
            if launcher.poll() is None:
                launcher.kill()
            asks.on_all(lambda place: asks.forget(place, run_dir.name), asks.places[1:])

        asks.at_end(end)
        launcher.wait()
        letters = {place.host.address: place.letter for place in asks.places}
        return {"seconds": time.monotonic() - began, **_summary(run_dir, letters)}


@contextlib.contextmanager
def _scratch(asks: Asking) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="multimac-selftest-"))
    asks.desk.sanitizer.learn_folders([str(folder)], "temporary")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(asks: Asking, run_dir: Path) -> Prepared:
    """Prepare the run of all hosts, or one of two ranks on this machine alone."""
    job = resolve(ConfigFile(PROJECT / "config.ini"), "demo-diloco")
    steps = ROUNDS * job.distribution.communication_interval
    job = job.with_profile(runs_dir=run_dir.parent, max_steps=steps, validation=None, test=None)
    if len(asks.places) < 2:
        return prepare_run(job, run_dir, local_ranks=ALONE)
    hosts = asks.hosts
    workers = asks.desk.machine_workers if len(asks.desk.machine_workers) == len(hosts.all) else ()
    address = asks.places[0].address or "127.0.0.1"
    return prepare_run(job, run_dir, hosts=hosts, address=address, machine_workers=workers)


def _summary(run_dir: Path, letters: Mapping[str, str]) -> dict:
    """Sum a run up. letters: by the label of a rank; those of one machine alone are numbered."""
    events, _ = read_events(run_dir / "events.jsonl")
    of = {kind: [event for event in events if event["type"] == kind] for kind in ("step", "round", "lost", "end")}
    hosts = list(dict.fromkeys(event["host"] for event in of["step"]))

    def own_steps(host: str) -> dict:
        own = [event for event in of["step"] if event["host"] == host]
        return {
            "steps": len(own),
            "seconds": sum(event["seconds"] for event in own),
            "communicating": sum(event.get("seconds_communicating") or 0.0 for event in own),
            "losses": [event.get("loss") for event in own],
        }

    if of["end"]:
        end = of["end"][-1]
    else:
        last = (run_dir / "launcher.log").read_text(errors="replace")[-300:]
        end = {"status": None, "message": f"the launcher ended without a word: {last}"}
    return {
        "status": end["status"],
        "message": end["message"],
        "rounds": max((event["round"] for event in of["round"]), default=0),
        "lost": [[letters.get(event["host"], event["host"]), event["reason"]] for event in of["lost"]],
        "hosts": [{"host": letters.get(host, host), **own_steps(host)} for host in hosts],
        "said": [event["what"] for event in events if event["type"] in ("warning", "problem")],
    }


def sent(report: dict) -> Finding:
    return ok(f"{report['files']} files sent in {report['seconds']:.1f} s" if report["files"] else "up to date")


def demo(about: dict) -> list[Finding]:
    text = f"{about['rounds']} rounds in {about['seconds']:.0f} s"
    if about["status"] != 0:
        return [problem(f"it ended with status {about['status']}: {about['message']}", **about)]
    if about["lost"]:
        lost = "; ".join(f"{host}: {reason}" for host, reason in about["lost"])
        return [problem(f"{text}, but a host was lost: {lost}", **about)]
    if about["rounds"] < 2 or any(not host["steps"] for host in about["hosts"]):
        return [problem(f"{text}: two were asked for, with steps of every host", **about)]
    hosts = ", ".join(f"{host['host']} {host['seconds'] / host['steps']:.2f} s a step" for host in about["hosts"])
    return [ok(f"{text}, nobody lost; {hosts}", **about)]
