"""All checks of the self-test in order, each with a watchdog; the report, and its rows made anew from it.

The last check is two rounds of the bundled demo on all hosts, as any run, in a folder that is removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed.checkup.findings import Finding, Severity, exit_status, ok, skipped
from distributed.checkup.preflight import shared_folders
from distributed.hosts.paths import PROJECT, PRUNED, project_settings
from distributed.hosts.sync import sync
from distributed.launcher.follow import start_launcher
from distributed.plan.job import resolve
from distributed.plan.prepare import Prepared, prepare_run
from distributed.run_dir.folder import new_run
from distributed.run_dir.log import read_events
from distributed.ssh.connection import Remote
from distributed.ssh.host import Hosts
from whisper_tuner.config import ConfigFile

from . import machine, network
from .asking import Asking, Desk, Place, ProbeLost
from .machine import SEND, failed

FORMAT = 1
GRACE_S = 10.0
# A warning of doctor's lets a run go on.
VERDICTS = {Severity.OK: "pass", Severity.WARNING: "pass", Severity.ERROR: "fail", Severity.SKIPPED: "not known"}
ROUNDS, ALONE = 2, 2
NAME = f"selftest-{os.getpid()}"  # another one may run at the same time, also on the same hosts
STOP_S = 4.0


def send_code(asks: Asking) -> list[dict]:
    """Send the code, the bundled model and clips, as a run does. A host that cannot take them is left out from here."""
    found = shared_folders(asks.places[0].host, asks.remotes)
    refused = {name: wrong for wrong in found for name in wrong.hosts}
    with _prepared(asks) as (_, prepared):
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
    began = time.monotonic()
    with _prepared(asks) as (run_dir, prepared):
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
def _prepared(asks: Asking) -> Iterator[tuple[Path, Prepared]]:
    """Prepare the run of all hosts, or one of two ranks on this machine alone, in a folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="multimac-selftest-", ignore_cleanup_errors=True) as folder:
        asks.desk.sanitizer.learn_folders([folder], "temporary")
        with new_run(Path(folder), NAME, keep=False) as run_dir:
            job = resolve(ConfigFile(PROJECT / "config.ini"), "demo-diloco")
            steps = ROUNDS * job.distribution.communication_interval
            job = job.with_profile(runs_dir=run_dir.parent, max_steps=steps, validation=None, test=None)
            hosts, workers = asks.hosts, asks.desk.machine_workers
            if len(hosts.all) < 2:
                yield run_dir, prepare_run(job, run_dir, local_ranks=ALONE)
                return
            workers = workers if len(workers) == len(hosts.all) else ()
            address = asks.places[0].address or "127.0.0.1"
            yield run_dir, prepare_run(job, run_dir, hosts=hosts, address=address, machine_workers=workers)


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
        end = {"status": None, "message": f"the launcher ended without saying why: {last}"}
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
        return [failed(f"it ended with status {about['status']}: {about['message']}", **about)]
    if about["lost"]:
        lost = "; ".join(f"{host}: {reason}" for host, reason in about["lost"])
        return [failed(f"{text}, but a host was lost: {lost}", **about)]
    if about["rounds"] < 2 or any(not host["steps"] for host in about["hosts"]):
        return [failed(f"{text}: two were asked for, with steps of every host", **about)]
    hosts = ", ".join(f"{host['host']} {host['seconds'] / host['steps']:.2f} s a step" for host in about["hosts"])
    return [ok(f"{text}, nobody lost; {hosts}", **about)]


@dataclass(frozen=True)
class Check:
    """One question to the machines, and what their answers mean.

    ask: asks within `limit_s`; a text is the probe that each machine is asked. each: by the title of its rows, judges
    the answer of one machine. judge: makes further rows of all answers.
    """

    name: str
    limit_s: float
    ask: Callable[[Asking], Any] | str
    judge: Callable[[Any], list[Finding]] = lambda answers: []
    each: Mapping[str, Callable[[Any], Finding]] = field(default_factory=dict)

    def rows(self, answers: Any) -> list[Finding]:
        """Judge answers, also recorded ones. The row of a machine that gave none tells why."""
        found = []
        for title, judge in self.each.items():
            for entry in answers:
                row = failed(entry["failed"]) if "failed" in entry else judge(entry["answer"])
                found.append(row.named(f"{title}, {entry['host']}" if len(answers) > 1 else title))
        return found + [row if row.check else row.named(self.name) for row in self.judge(answers)]


# The import of torch comes before all that imports it, and what later checks need before them.
CHECKS = [
    Check("ssh", 30, network.ask_ssh, each={"ssh": ok}),
    Check("code", 120, send_code, each={"code": sent}),
    Check("import of torch", 150, "system.imports", each={"import of torch": machine.imports}),
    Check("system", 40, "system.system", machine.systems, each={"system": machine.system, "python": machine.python}),
    Check("interfaces", 40, "network.interfaces", each={"interfaces": network.interfaces}),
    Check("names", 40, network.ask_names, each={"names": network.names}),
    Check("own address", 30, network.ask_place, each={"own address": network.place}),
    Check("hosts check", 30, network.ask_preflight, network.hosts_check),
    Check("connect", 60, network.ask_connect, network.connect),
    Check("gloo", 120, network.ask_gloo, network.gloo),
    Check("killed peer", 70, network.ask_killed_peer, network.killed_peer),
    Check("silent peer", 70, network.ask_silent_peer, network.silent_peer),
    Check(
        "process group", 40, machine.kill_a_group, each={"process group": machine.leader, "group kill": machine.left}
    ),
    Check("kill of a zombie", 20, "system.zombie", each={"kill of a zombie": machine.zombie}),
    Check(
        "services",
        40,
        "system.services",
        each={"limits": machine.limits, "disk": machine.disk, "keeping awake": machine.awake},
    ),
    Check("arithmetic", 60, "compute.arithmetic", machine.arithmetic),
    Check("changing shapes", 120, machine.with_model("compute.shapes"), each={"changing shapes": machine.shapes}),
    Check("memory", 60, machine.with_model("compute.memory"), each={"memory": machine.memory}),
    Check("doctor", 180, machine.run_doctor, machine.doctor),
    Check("demo", 180, run_demo, demo),
]
LID = Check("lid", machine.WATCH_S + machine.BACK_S + 20, machine.watch, each={"lid": machine.lid})
BY_NAME: Mapping[str, Check] = {check.name: check for check in [*CHECKS, LID]}


def run(desk: Desk, checks: Sequence[Check]) -> Iterator[dict]:
    """Yield an entry of the report for each check, as soon as it is done. What was started is ended, come what may."""
    for number, check in enumerate(checks):
        if number and not desk.places:
            return  # this is not the master of the hosts file
        desk.tell(check.name)
        yield _one(desk, check)


def _one(desk: Desk, check: Check) -> dict:
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["answers"] = running.ask_all(check.ask) if isinstance(check.ask, str) else check.ask(running)
        except Exception as error:  # whatever it is, it is a row, and the others still have their turn
            outcome["ended"] = str(error) or type(error).__name__

    began = time.monotonic()
    with Asking(desk, check.limit_s + GRACE_S) as running:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(check.limit_s)
        late = {"ended": f"no end within {check.limit_s:g} s"} if thread.is_alive() else None
    entry = {"check": check.name, "seconds": round(time.monotonic() - began, 1), **(late or outcome)}
    return cleaned(desk, entry)


def cleaned(desk: Desk, entry: dict) -> dict:
    """Clean an entry: what is judged is what is written, so that a report gives the same rows again.

    Twice is as good as once.
    """
    own = {key: desk.sanitizer.clean(entry[key]) for key in ("answers", "ended") if key in entry}
    return {**entry, **json.loads(json.dumps(own))}


def rows_of(entry: Mapping[str, Any]) -> list[Finding]:
    name = entry["check"]
    if "ended" in entry:
        return [failed(entry["ended"]).named(name)]
    try:
        return BY_NAME[name].rows(entry["answers"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"the answer is not understood ({type(error).__name__}: {error}). {SEND}"
        return [skipped(what).named(name)]


def as_row(found: Finding) -> dict[str, Any]:
    """Write a finding as a row of the report; its meaning is what it means for a run."""
    meaning = found.what
    if found.severity is Severity.WARNING:
        meaning = f"warning: {meaning}"
    elif found.is_error and found.remedy:
        meaning = f"{meaning}. {found.remedy}"
    return {"name": found.check, "verdict": VERDICTS[found.severity], "meaning": meaning, "figures": found.figures}


def report_of(hosts: Hosts, entries: Sequence[dict], *, whole: bool) -> dict:
    rows = [row for entry in entries for row in rows_of(entry)]
    return {
        "format": FORMAT,
        "version": project_settings()["version"],
        "system": platform.system(),
        "created": time.strftime("%Y-%m"),
        "hosts": len(hosts.all),
        "complete": whole,
        "exit_status": int(exit_status(rows)),
        "rows": [as_row(row) for row in rows],
        "checks": list(entries),
    }
