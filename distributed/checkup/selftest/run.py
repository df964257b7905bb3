"""All checks of the self-test in order, each with a watchdog; the report, and its rows made anew from it."""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed.checkup.findings import Finding, Severity, exit_status, ok, problem, skipped
from distributed.hosts.paths import project_settings
from distributed.ssh.host import Hosts

from . import demo, machine, network
from .asking import Asking, Desk
from .machine import SEND

FORMAT = 1
GRACE_S = 10.0
# A warning of doctor's lets a run go on.
VERDICTS = {Severity.OK: "pass", Severity.WARNING: "pass", Severity.ERROR: "fail", Severity.SKIPPED: "not known"}


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
                row = problem(entry["failed"]) if "failed" in entry else judge(entry["answer"])
                found.append(row.named(f"{title}, {entry['host']}" if len(answers) > 1 else title))
        return found + [row if row.check else row.named(self.name) for row in self.judge(answers)]


# The import of torch comes before all that imports it, and what later checks need before them.
CHECKS = [
    Check("ssh", 30, network.ask_ssh, each={"ssh": ok}),
    Check("code", 120, demo.send_code, each={"code": demo.sent}),
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
    Check("demo", 180, demo.run_demo, demo.demo),
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
        return [problem(entry["ended"]).named(name)]
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
