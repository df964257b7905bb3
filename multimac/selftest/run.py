"""All checks of the self-test in order, each with a watchdog; the report, and its rows made anew from it."""

from __future__ import annotations

import dataclasses
import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed.hosts.paths import PROJECT
from distributed.ssh.host import Hosts
from multimac.doctor.machine import settings
from whisper_tuner.errors import ExitStatus

from . import demo, gather, judge_machine, judge_network, lid
from .asking import Asking, Desk, asking
from .judge_machine import SEND
from .rows import Row, Verdict, failed, unknown

FORMAT = 1
GRACE_S = 10.0


@dataclass(frozen=True)
class Check:
    """`gather` asks the machines, within `limit_s`; `judge` makes rows of the answers, or of recorded ones."""

    name: str
    limit_s: float
    gather: Callable[[Asking], Any]
    judge: Callable[[Any], list[Row]]


def asked(probe: str) -> Callable[[Asking], list[dict]]:
    return lambda asks: asks.ask_all(probe)


# The import of torch comes before all that imports it, and what later checks need before them.
CHECKS = [
    Check("ssh", 30, gather.ssh, judge_network.ssh),
    Check("code", 120, demo.code, judge_network.code),
    Check("import of torch", 150, asked("imports"), judge_machine.imports),
    Check("system", 40, asked("system"), judge_machine.system),
    Check("interfaces", 40, asked("interfaces"), judge_network.interfaces),
    Check("names", 40, gather.names, judge_network.names),
    Check("own address", 30, gather.place, judge_network.place),
    Check("hosts check", 30, gather.hosts_check, judge_network.hosts_check),
    Check("connect", 60, gather.connect, judge_network.connect),
    Check("gloo", 120, gather.gloo, judge_network.gloo),
    Check("killed peer", 70, gather.killed_peer, judge_network.killed_peer),
    Check("silent peer", 70, gather.silent_peer, judge_network.silent_peer),
    Check("process group", 40, gather.process_group, judge_machine.process_group),
    Check("kill of a zombie", 20, asked("zombie"), judge_machine.zombie),
    Check("services", 40, asked("services"), judge_machine.services),
    Check("arithmetic", 60, asked("arithmetic"), judge_machine.arithmetic),
    Check("changing shapes", 120, gather.shapes, judge_machine.shapes),
    Check("memory", 60, gather.memory, judge_machine.memory),
    Check("doctor", 180, gather.doctor, judge_machine.doctor),
    Check("demo", 180, demo.demo, judge_network.demo),
]
LID = Check("lid", lid.WATCH_S + lid.BACK_S + 20, lid.lid, judge_network.lid)
JUDGES: Mapping[str, Callable[[Any], list[Row]]] = {check.name: check.judge for check in [*CHECKS, LID]}


def run(desk: Desk, checks: Sequence[Check]) -> Iterator[dict]:
    """An entry of the report for each check, as soon as it is done. Ends what it has started, whatever happens."""
    for number, check in enumerate(checks):
        if number and not desk.places:
            return  # this is not the master of the hosts file
        desk.tell(check.name)
        yield _one(desk, check)


def _one(desk: Desk, check: Check) -> dict:
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["answers"] = check.gather(running)
        except Exception as error:  # whatever it is, it is a row, and the others still have their turn
            outcome["ended"] = str(error) or type(error).__name__

    began = time.monotonic()
    with asking(desk, check.limit_s + GRACE_S) as running:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(check.limit_s)
        late = {"ended": f"no end within {check.limit_s:g} s"} if thread.is_alive() else None
    entry = {"check": check.name, "seconds": round(time.monotonic() - began, 1), **(late or outcome)}
    return cleaned(desk, entry)


def cleaned(desk: Desk, entry: dict) -> dict:
    """What is judged is what is written, so that a report gives the same rows again. Twice is as good as once."""
    own = {key: desk.sanitizer.clean(entry[key]) for key in ("answers", "ended") if key in entry}
    return {**entry, **json.loads(json.dumps(own))}


def rows_of(entry: Mapping[str, Any]) -> list[Row]:
    name = entry["check"]
    if "ended" in entry:
        return [failed(name, entry["ended"])]
    try:
        return JUDGES[name](entry["answers"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return [unknown(name, f"the answer is not understood ({type(error).__name__}: {error}). {SEND}")]


def report_of(hosts: Hosts, entries: Sequence[dict], *, whole: bool) -> dict:
    rows = [row for entry in entries for row in rows_of(entry)]
    return {
        "format": FORMAT,
        "version": settings(PROJECT)["version"],
        "system": platform.system(),
        "created": time.strftime("%Y-%m"),
        "hosts": len(hosts.all),
        "complete": whole,
        "exit_status": int(exit_status(rows)),
        "rows": [dataclasses.asdict(row) for row in rows],
        "checks": list(entries),
    }


def exit_status(rows: Sequence[Row]) -> ExitStatus:
    """As doctor's: HOST if something failed; what is not known is allowed."""
    return ExitStatus.HOST if any(row.verdict is Verdict.FAIL for row in rows) else ExitStatus.OK
