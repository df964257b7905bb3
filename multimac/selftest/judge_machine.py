"""What the answers about each machine mean. Pure: the same answers, also recorded ones, give the same rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from distributed.control.timeouts import Timeouts
from multimac.doctor.checks import State
from whisper_tuner.text import size

from .rows import Row, Verdict, failed, passed, unknown

SEND = "Please send report.json."
NEWEST, OLDEST = (3, 14), (3, 11)
SLOWER = 4.0  # times as slow at varying shapes as at a fixed one; on mps it was 12 (pytorch: the cache is not emptied)
GROWTH = 2_000_000_000  # bytes of driver memory in six steps of a model of 1.5 million parameters
TOO_LOW = 2.0  # times what was estimated; of the small model on a CPU it is 1.4
OPEN_FILES = 3900  # beside those that Python itself has open
OFF = 1e-4  # relative; rounding is 1e-7


def each(name: str, answers: Sequence[dict], judge: Callable[[str, Any], Row]) -> list[Row]:
    """A row for every host; of one that gave no answer, why."""
    rows = []
    for entry in answers:
        title = f"{name}, {entry['host']}" if len(answers) > 1 else name
        if "failed" in entry:
            rows.append(failed(title, entry["failed"]))
        else:
            rows.append(judge(title, entry["answer"]))
    return rows


def system(answers: list[dict]) -> list[Row]:
    rows = [*each("system", answers, _system), *each("python", answers, _python)]
    known = [entry["answer"] for entry in answers if "answer" in entry]
    kinds = {about["system"] for about in known}
    if len(kinds) > 1:
        rows.append(failed("systems", f"{' and '.join(sorted(kinds))} cannot train together"))
    return rows


def _said(about: dict, program: str) -> str:
    said = about["programs"].get(program, {})
    return said.get("output", "").strip() if said.get("status") == 0 else ""


def _system(name: str, about: dict) -> Row:
    chip = _said(about, "chip") or about["machine"]
    found = re.search(r"ProductVersion:\s*(\S+)", _said(about, "sw_vers"))
    release = found[1] if found else about["release"]
    shown = "macOS" if about["system"] == "Darwin" else about["system"]
    text = f"{shown} {release}, {chip}, {about['cores']} cores, {size(about['memory'])}"
    if about["system"] == "Darwin" and not found:
        return unknown(name, f"{text}; `sw_vers` said nothing that is understood. {SEND}")
    if found and int(release.split(".")[0]) < 14:
        return failed(name, f"{text}: torch's GPU support needs macOS 14")
    return passed(name, text)


def _python(name: str, about: dict) -> Row:
    """An Intel Python works on an Apple chip too, slowly and without GPU."""
    text = f"{about['python']} {about['machine']}, torch {about['packages']['torch']}"
    if about["system"] == "Darwin" and (about["machine"] != "arm64" or _said(about, "translated") == "1"):
        return failed(name, f"{text}: an Intel Python; use one for arm64 (Homebrew in /opt/homebrew)")
    if not about["packages"]["torch"]:
        return failed(name, f"{text}: torch is not installed; run: multimac hosts setup")
    version = tuple(map(int, about["python"].split(".")[:2]))
    if not OLDEST <= version <= NEWEST:
        return failed(name, f"{text}: torch has wheels for Python 3.11 to 3.14")
    if not about["is_real_python"]:
        return failed(name, f"{text}: doctor's lines for the firewall name another program than the one that runs")
    if about["system"] != "Darwin":
        return passed(name, f"{text}, {about['executable']}")
    return _signature(name, text, about["programs"].get("codesign", {}).get("output", ""))


def _signature(name: str, text: str, said: str) -> Row:
    """`codesign -dv`: Local Network privacy knows a program by its signature."""
    if "not signed" in said:
        return failed(name, f"{text}, not signed: macOS ends unsigned programs on Apple chips")
    found = re.search(r"^Identifier=(\S+)", said, re.MULTILINE)
    if not found:
        return unknown(name, f"{text}; `codesign` said nothing that is understood. {SEND}")
    adhoc = "Signature=adhoc" in said or re.search(r"flags=\S*\(\S*adhoc", said)
    kind = "ad-hoc: the terminal's permission counts, and an update is a new program" if adhoc else "by a developer"
    return passed(name, f"{text}, signed {kind}", identifier=found[1], adhoc=bool(adhoc))


def imports(answers: list[dict]) -> list[Row]:
    return each("import of torch", answers, _imports)


def _imports(name: str, both: list[dict]) -> Row:
    seconds = [one["whole_s"] for one in both]
    gap = max(one["gap_s"] for one in both)
    parent = max(one["parent_gap_s"] for one in both)
    limit = Timeouts().silence_importing_s
    text = f"first {seconds[0]:.1f} s, second {seconds[1]:.1f} s; longest gap between beats {gap:.1f} s"
    figures = {"seconds": seconds, "gap_s": gap, "parent_gap_s": parent}
    if max(gap, parent) > limit:
        what = f"{text}, of its parent {parent:.1f} s: after {limit:g} s a host that imports torch counts as lost"
        return failed(name, what, **figures)
    return passed(name, f"{text}, of its parent {parent:.1f} s", **figures)


def process_group(answers: list[dict]) -> list[Row]:
    return [*each("process group", answers, _leader), *each("group kill", answers, _left)]


def _leader(name: str, sits: dict) -> Row:
    shells = f"login shell {sits['shells']['login'] or 'unknown'}"
    if sits["announced"] == sits["group"]:
        return passed(name, f"the command leads its own process group ({shells})")
    return failed(name, f"the command is not in the group that it reported, so it cannot be killed ({shells})")


def _left(name: str, sits: dict) -> Row:
    if sits["left"]:
        return failed(name, f"{sits['left']} of 2 processes outlived the kill of their group")
    return passed(name, "SIGKILL of a group also ends the children")


def zombie(answers: list[dict]) -> list[Row]:
    return each("kill of a zombie", answers, _zombie)


def _zombie(name: str, errors: dict) -> Row:
    text = f"killpg before the wait: {errors['unreaped'] or 'no error'}, after it: {errors['reaped'] or 'no error'}"
    if errors["unreaped"] in ("", "EPERM", "ESRCH") and errors["reaped"] in ("ESRCH", "EPERM"):
        return passed(name, text, **errors)
    return failed(name, f"{text}: the code expects EPERM (macOS), ESRCH or none", **errors)


def services(answers: list[dict]) -> list[Row]:
    judges = {"limits": _limits, "disk": _disk, "keeping awake": _awake}
    return [row for name, judge in judges.items() for row in each(name, answers, judge)]


def _limits(name: str, about: dict) -> Row:
    files, foreign = about["open_files"], about["foreign_address"]
    if why := files.get("failed") or foreign.get("failed"):
        return failed(name, why)
    if min(files["after"], files["opened"]) < OPEN_FILES:
        text = f"{files['opened']} files at once: a run that loses hosts often may need more"
        return failed(name, text, **files)
    if not foreign["error"]:
        return failed(name, "listening on another machine's address works: a run would not notice that its own is lost")
    text = f"{files['opened']} files at once; listening on another machine's address gives {foreign['error']}"
    return passed(name, text, **files)


def _disk(name: str, about: dict) -> Row:
    folder = about["folder"]
    if "failed" in folder:
        return failed(name, folder["failed"])
    sync, backups = folder["sync"], folder["backups"]
    if sync["error"]:
        return failed(name, f"{sync['how']} of a folder: {sync['error']}; a power cut may undo the last checkpoint")
    text = f"{sync['how']} of a folder took {1000 * sync['seconds']:.0f} ms"
    if backups is None:
        return passed(name, text)
    if (backups["before"], backups["after"]) == ("Included", "Excluded"):
        return passed(name, f"{text}; Time Machine leaves out what it is told to")
    said = f"{backups['before'] or 'nothing'}, then {backups['after'] or 'nothing'} (status {backups['status']})"
    return failed(name, f"{text}; of a folder that was excluded, `tmutil` says {said}: backups may be large")


def _awake(name: str, about: dict) -> Row:
    holder = about["awake"]
    if holder is None:
        return unknown(name, "checked on a Mac only")
    if "failed" in holder:
        return failed(name, holder["failed"])
    if not holder["shown"]:
        return failed(name, "`pmset -g assertions` does not show `caffeinate`: a host may fall asleep", **holder)
    if not holder["ended"] or holder["left"]:
        return failed(name, "`caffeinate` outlives its command: a host would never sleep again", **holder)
    return passed(name, "`caffeinate` keeps it awake, and ends with its connection", **holder)


def arithmetic(answers: list[dict]) -> list[Row]:
    """Values must agree everywhere; bits need not, since strategies agree on the CPU."""
    rows = [row for row in each("arithmetic", answers, lambda name, _: passed(name, "")) if row.verdict != Verdict.PASS]
    found = [(entry["host"], step) for entry in answers for step in entry.get("answer", [])]
    for kind in dict.fromkeys(step["device"] for _, step in found):
        rows.append(_alike(kind, [(host, step) for host, step in found if step["device"] == kind], found[0][1]))
    return rows


def _alike(kind: str, steps: list[tuple[str, dict]], first: dict) -> Row:
    name = f"arithmetic on {kind}"
    wrong = [host for host, step in steps if any(_is_off(step[key], first[key]) for key in ("sum", "norm"))]
    if wrong:
        return failed(name, f"{', '.join(wrong)}: another result than {'its own' if len(steps) == 1 else 'A'}'s CPU")
    hosts = ", ".join(host for host, _ in steps)
    differing = [
        what
        for key, what in (("step", "the AdamW step"), ("norm_bits", "the norm"))
        if len({step[key] for _, step in steps}) > 1
    ]
    if differing:
        return passed(name, f"bits of {' and '.join(differing)} differ among {hosts}: unlike chips; runs allow for it")
    return passed(name, f"the same bits on {hosts}" if len(steps) > 1 else f"right on {hosts}")


def _is_off(value: float, expected: float) -> bool:
    return not abs(value - expected) <= OFF * max(1.0, abs(expected))


def shapes(answers: list[dict]) -> list[Row]:
    return each("changing shapes", answers, _shapes)


def _shapes(name: str, about: dict) -> Row:
    fixed, varying = about["fixed"], about["varying"]
    grown = varying["memory"] - fixed["memory"]
    speed = f"{fixed['median_ms']:.0f} ms a step at one shape, {varying['median_ms']:.0f} ms at changing ones"
    text = f"{about['device']}: {speed}; memory {size(fixed['memory'])}, then {size(varying['memory'])}"
    if not (fixed["is_finite"] and varying["is_finite"]):
        return failed(name, f"{text}: a loss is not finite", **about)
    if fixed["memory"] - fixed["memory_before"] > GROWTH:
        return failed(name, f"{text}: memory grows at one shape too, so a run would take all of it", **about)
    if about["device"] != "cpu" and (varying["median_ms"] > SLOWER * fixed["median_ms"] or grown > GROWTH):
        return passed(name, f"{text}: changing ones cost time, so runs use few shapes", **about)
    return passed(name, text, **about)


def memory(answers: list[dict]) -> list[Row]:
    return each("memory", answers, _memory)


def _memory(name: str, about: dict) -> Row:
    taken, estimated, beyond = about["taken"], about["estimated"], about["beyond"]
    text = f"{about['device']}: a clip of 30 s takes {size(taken)}, the estimate was {size(estimated)}"
    if about["device"] != "cpu" and taken > TOO_LOW * estimated:
        return failed(name, f"{text}: the estimate of memory before a run is wrong", **about)
    if beyond is None:
        return passed(name, text, **about)
    if not beyond["is_full"]:
        said = beyond["said"] or "nothing"
        return failed(name, f"{text}; past its limit torch says {said}: a run would not know that memory is full")
    if not beyond["is_known"]:
        return unknown(name, f"{text}; past its limit torch says {beyond['said']}. {SEND}", **about)
    return passed(name, f"{text}; past its limit torch says that memory is full", **about)


def doctor(report: dict) -> list[Row]:
    """Its rows, as they are."""
    verdicts = {State.OK: Verdict.PASS, State.WARNING: Verdict.PASS, State.PROBLEM: Verdict.FAIL}
    rows = []
    for found in report["findings"]:
        verdict = verdicts.get(found["state"], Verdict.UNKNOWN)
        text = f"warning: {found['detail']}" if found["state"] == State.WARNING else found["detail"]
        if found["remedy"] and verdict is Verdict.FAIL:
            text = f"{text}. {found['remedy']}"
        rows.append(Row(name=f"doctor: {found['name']}", verdict=verdict, meaning=text))
    return rows
