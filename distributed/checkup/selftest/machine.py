"""What is asked of each machine by itself, also while somebody closes its lid (`--lid`), and what the answers mean.

Judging is pure: the same answers, also recorded ones, give the same rows.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

from distributed.checkup.findings import Finding, Severity, ok, skipped
from distributed.control.timeouts import Timeouts
from distributed.hosts.paths import PROJECT
from distributed.ssh.connection import Remote
from distributed.ssh.machine import LocalMachine
from whisper_tuner.errors import TunerError
from whisper_tuner.text import size

from .asking import Asked, Asking, Place, ProbeLost

SEND = "Please send report.json."
NEWEST, OLDEST = (3, 14), (3, 11)
SLOWER = 4.0  # times as slow at varying shapes as at a fixed one; on mps it was 12 (pytorch: the cache is not emptied)
GROWTH = 2_000_000_000  # bytes of driver memory in six steps of a model of 1.5 million parameters
TOO_LOW = 2.0  # times what was estimated; of the small model on a CPU it is 1.4
OPEN_FILES = 3900  # beside those that Python itself has open
OFF = 1e-4  # relative; rounding is 1e-7
WATCH_S = 60.0
BACK_S = 30.0  # for a host to answer again, after that
SILENCE_S = 3.0
AGAIN_S = 2.0  # for a new connection, as a run tries it
ASK = "Now close the lid of one Mac, wait 20 seconds, and open it again. This takes a minute; without a lid, just wait."


def failed(what: str, **figures: Any) -> Finding:
    return Finding(what=what, figures=figures)


def with_model(probe: str):
    """Make the question that gives each machine the bundled Whisper there."""
    return lambda asks: asks.on_all(lambda each: asks.ask(each, probe, model=each.model, device=each.host.device))


def said_in(about: dict, program: str) -> str:
    said = about["programs"].get(program, {})
    return said.get("output", "").strip() if said.get("status") == 0 else ""


def system(about: dict) -> Finding:
    chip = said_in(about, "chip") or about["machine"]
    found = re.search(r"ProductVersion:\s*(\S+)", said_in(about, "sw_vers"))
    release = found[1] if found else about["release"]
    shown = "macOS" if about["system"] == "Darwin" else about["system"]
    text = f"{shown} {release}, {chip}, {about['cores']} cores, {size(about['memory'])}"
    if about["system"] == "Darwin" and not found:
        return skipped(f"{text}; `sw_vers` said nothing that is understood. {SEND}")
    if found and int(release.split(".")[0]) < 14:
        return failed(f"{text}: torch's GPU support needs macOS 14")
    return ok(text)


def systems(answers: list[dict]) -> list[Finding]:
    kinds = {entry["answer"]["system"] for entry in answers if "answer" in entry}
    mixed = failed(f"{' and '.join(sorted(kinds))} cannot train together").named("systems")
    return [mixed] if len(kinds) > 1 else []


def python(about: dict) -> Finding:
    """Judge the Python. An Intel one works on an Apple chip too, slowly and without GPU."""
    text = f"{about['python']} {about['machine']}, torch {about['packages']['torch']}"
    if about["system"] == "Darwin" and (about["machine"] != "arm64" or said_in(about, "translated") == "1"):
        return failed(f"{text}: an Intel Python; use one for arm64 (Homebrew in /opt/homebrew)")
    if not about["packages"]["torch"]:
        return failed(f"{text}: torch is not installed; run: multimac hosts setup")
    if not OLDEST <= tuple(map(int, about["python"].split(".")[:2])) <= NEWEST:
        return failed(f"{text}: torch has wheels for Python 3.11 to 3.14")
    if not about["is_real_python"]:
        return failed(f"{text}: doctor's lines for the firewall name another program than the one that runs")
    if about["system"] != "Darwin":
        return ok(f"{text}, {about['executable']}")
    # `codesign -dv`: Local Network privacy knows a program by its signature.
    said = about["programs"].get("codesign", {}).get("output", "")
    if "not signed" in said:
        return failed(f"{text}, not signed: macOS ends unsigned programs on Apple chips")
    found = re.search(r"^Identifier=(\S+)", said, re.MULTILINE)
    if not found:
        return skipped(f"{text}; `codesign` said nothing that is understood. {SEND}")
    adhoc = "Signature=adhoc" in said or re.search(r"flags=\S*\(\S*adhoc", said)
    kind = "ad-hoc: the terminal's permission counts, and an update is a new program" if adhoc else "by a developer"
    return ok(f"{text}, signed {kind}", identifier=found[1], adhoc=bool(adhoc))


def imports(both: list[dict]) -> Finding:
    seconds = [one["whole_s"] for one in both]
    gap = max(one["gap_s"] for one in both)
    parent = max(one["parent_gap_s"] for one in both)
    limit = Timeouts().silence_importing_s
    text = f"first {seconds[0]:.1f} s, second {seconds[1]:.1f} s; longest gap between beats {gap:.1f} s"
    text = f"{text}, of its parent {parent:.1f} s"
    figures = {"seconds": seconds, "gap_s": gap, "parent_gap_s": parent}
    if max(gap, parent) > limit:
        return failed(f"{text}: after {limit:g} s a host that imports torch counts as lost", **figures)
    return ok(text, **figures)


def kill_a_group(asks: Asking) -> list[dict]:
    """Start a process with a child in its group as a worker is started, kill it, and look who is left."""

    def one(each: Place) -> dict:
        asked = asks.start(each, "system.sit")
        event = asked.next("sits", timeout=20.0)
        asked.process.kill()
        left = asks.ask(each, "system.alive", pids=[event["pid"], event["child"]])
        sits = {"announced": asked.process.pid, "pid": event["pid"], "group": event["group"]}
        return {**sits, "shells": event["shells"], "left": len(left)}

    return asks.on_all(one)


def leader(sits: dict) -> Finding:
    shells = f"login shell {sits['shells']['login'] or 'unknown'}"
    if sits["announced"] == sits["group"]:
        return ok(f"the command leads its own process group ({shells})")
    return failed(f"the command is not in the group that it reported, so it cannot be killed ({shells})")


def left(sits: dict) -> Finding:
    if sits["left"]:
        return failed(f"{sits['left']} of 2 processes outlived the kill of their group")
    return ok("SIGKILL of a group also ends the children")


def zombie(errors: dict) -> Finding:
    text = f"killpg before the wait: {errors['unreaped'] or 'no error'}, after it: {errors['reaped'] or 'no error'}"
    if errors["unreaped"] in ("", "EPERM", "ESRCH") and errors["reaped"] in ("ESRCH", "EPERM"):
        return ok(text, **errors)
    return failed(f"{text}: the code expects EPERM (macOS), ESRCH or none", **errors)


def limits(about: dict) -> Finding:
    files, foreign = about["open_files"], about["foreign_address"]
    if why := files.get("failed") or foreign.get("failed"):
        return failed(why)
    if min(files["after"], files["opened"]) < OPEN_FILES:
        text = f"{files['opened']} files at once: a run that loses hosts often may need more"
        return failed(text, **files)
    if not foreign["error"]:
        return failed("listening on another machine's address works: a run would not notice that its own is lost")
    text = f"{files['opened']} files at once; listening on another machine's address gives {foreign['error']}"
    return ok(text, **files)


def disk(about: dict) -> Finding:
    folder = about["folder"]
    if "failed" in folder:
        return failed(folder["failed"])
    sync, backups = folder["sync"], folder["backups"]
    if sync["error"]:
        return failed(f"{sync['how']} of a folder: {sync['error']}; a power cut may undo the last checkpoint")
    text = f"{sync['how']} of a folder took {1000 * sync['seconds']:.0f} ms"
    if backups is None:
        return ok(text)
    if (backups["before"], backups["after"]) == ("Included", "Excluded"):
        return ok(f"{text}; Time Machine leaves out what it is told to")
    said = f"{backups['before'] or 'nothing'}, then {backups['after'] or 'nothing'} (status {backups['status']})"
    return failed(f"{text}; of a folder that was excluded, `tmutil` says {said}: backups may be large")


def awake(about: dict) -> Finding:
    holder = about["awake"]
    if holder is None:
        return skipped("checked on a Mac only")
    if "failed" in holder:
        return failed(holder["failed"])
    if not holder["shown"]:
        return failed("`pmset -g assertions` does not show `caffeinate`: a host may fall asleep", **holder)
    if not holder["ended"] or holder["left"]:
        return failed("`caffeinate` outlives its command: a host would never sleep again", **holder)
    return ok("`caffeinate` keeps it awake, and ends with its connection", **holder)


def arithmetic(answers: list[dict]) -> list[Finding]:
    """Compare what hosts compute. Values must agree; bits need not, since strategies agree on the CPU."""
    rows = []
    for entry in answers:
        if "failed" in entry:
            title = f"arithmetic, {entry['host']}" if len(answers) > 1 else "arithmetic"
            rows.append(failed(entry["failed"]).named(title))
    found = [(entry["host"], step) for entry in answers for step in entry.get("answer", [])]
    for kind in dict.fromkeys(step["device"] for _, step in found):
        steps = [(host, step) for host, step in found if step["device"] == kind]
        rows.append(_alike(steps, found[0][1]).named(f"arithmetic on {kind}"))
    return rows


def _alike(steps: list[tuple[str, dict]], first: dict) -> Finding:
    def is_off(value: float, expected: float) -> bool:
        return not abs(value - expected) <= OFF * max(1.0, abs(expected))

    wrong = [host for host, step in steps if any(is_off(step[key], first[key]) for key in ("sum", "norm"))]
    if wrong:
        return failed(f"{', '.join(wrong)}: another result than {'its own' if len(steps) == 1 else 'A'}'s CPU")
    hosts = ", ".join(host for host, _ in steps)
    names = {"step": "the AdamW step", "norm_bits": "the norm"}
    differing = [name for key, name in names.items() if len({step[key] for _, step in steps}) > 1]
    if differing:
        return ok(f"bits of {' and '.join(differing)} differ among {hosts}: unlike chips; runs allow for it")
    return ok(f"the same bits on {hosts}" if len(steps) > 1 else f"right on {hosts}")


def shapes(about: dict) -> Finding:
    fixed, varying = about["fixed"], about["varying"]
    grown = varying["memory"] - fixed["memory"]
    speed = f"{fixed['median_ms']:.0f} ms a step at one shape, {varying['median_ms']:.0f} ms at changing ones"
    text = f"{about['device']}: {speed}; memory {size(fixed['memory'])}, then {size(varying['memory'])}"
    if not (fixed["is_finite"] and varying["is_finite"]):
        return failed(f"{text}: a loss is not finite", **about)
    if fixed["memory"] - fixed["memory_before"] > GROWTH:
        return failed(f"{text}: memory grows at one shape too, so a run would take all of it", **about)
    if about["device"] != "cpu" and (varying["median_ms"] > SLOWER * fixed["median_ms"] or grown > GROWTH):
        return ok(f"{text}: changing ones cost time, so runs use few shapes", **about)
    return ok(text, **about)


def memory(about: dict) -> Finding:
    taken, estimated, beyond = about["taken"], about["estimated"], about["beyond"]
    text = f"{about['device']}: a clip of 30 s takes {size(taken)}, the estimate was {size(estimated)}"
    if about["device"] != "cpu" and taken > TOO_LOW * estimated:
        return failed(f"{text}: the estimate of memory before a run is wrong", **about)
    if beyond is None:
        return ok(text, **about)
    if not beyond["is_full"]:
        said = beyond["said"] or "nothing"
        return failed(f"{text}; past its limit torch says {said}: a run would not know that memory is full")
    if not beyond["is_known"]:
        return skipped(f"{text}; past its limit torch says {beyond['said']}. {SEND}", **about)
    return ok(f"{text}; past its limit torch says that memory is full", **about)


def run_doctor(asks: Asking) -> dict:
    """Run `multimac doctor --deep` on this machine, in a process of its own."""
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "doctor", "--deep", "--hosts", "--json"]
    device = asks.desk.hosts.master.device
    process = LocalMachine().start(command, cwd=str(PROJECT), env={"EXOGYM_DEVICE": device} if device else None)
    asks.at_end(process.kill)
    said = "\n".join(process.lines())
    try:
        return json.loads(said[said.index("{\n") :])
    except ValueError:
        raise ProbeLost(f"doctor ended with status {process.wait()}: {said[-300:]}") from None


def doctor(report: dict) -> list[Finding]:
    """Read doctor's findings from its JSON, where an error is called a problem."""
    return [
        Finding(
            check=f"doctor: {found['name']}",
            what=found["detail"],
            remedy=found["remedy"],
            severity=Severity.ERROR if found["state"] == "problem" else Severity(found["state"]),
        )
        for found in report["findings"]
    ]


def watch(asks: Asking) -> list[dict]:
    """Hear beats of all hosts while somebody closes a lid; tell who came back."""
    asks.desk.ask_user(ASK)
    return asks.on_all(lambda place: _watch(asks, place))


def _watch(asks: Asking, place: Place) -> dict:
    """Hear one host, by the wall clock: the other one may stand still while this machine sleeps itself."""
    began = heard = time.time()
    until, connections = began + WATCH_S, 1
    silences: list[list[float]] = []

    def start() -> Asked:
        seconds = max(1.0, until - time.time())
        return asks.start(place, "system.beats", seconds=seconds, life_s=seconds + 60)

    asked, own = start(), None
    while own is None and time.time() < until + BACK_S:
        try:
            event = asked.next("beat", "answer", timeout=1.0)
        except ProbeLost:
            if asked.has_ended:  # the connection is gone: another one, unless the host does not answer yet
                try:
                    if isinstance(place.machine, Remote):
                        place.machine = Remote.connect(place.host, timeout=AGAIN_S)
                    connections += 1
                    asked = start()
                except TunerError:
                    time.sleep(1.0)
            continue
        now = time.time()
        if now - heard > SILENCE_S:
            silences.append([round(heard - began, 1), round(now - began, 1)])
        heard = now
        own = event.get("answer")
    return {"silences": silences, "connections": connections, "own": own, "silent_at_end_s": time.time() - heard}


def lid(about: dict) -> Finding:
    own = about["own"]
    if own is None:
        return failed(f"it has not come back: silent for {about['silent_at_end_s']:.0f} s", **about)
    slept = own["wall_gap_s"]
    if not about["silences"] and slept < 3.0:
        return ok(f"it did not sleep; longest gap {slept:.1f} s", **about)
    when = ", ".join(f"from {begin:.0f} to {end:.0f} s" for begin, end in about["silences"])
    clock = f"its clocks jumped by {slept:.0f} s (wall) and {own['steady_gap_s']:.0f} s (monotonic)"
    way = "the connection survived" if about["connections"] == 1 else f"connections made: {about['connections']}"
    return ok(f"silent {when or 'nowhere'}; {clock}; {way}", **about)
