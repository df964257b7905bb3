"""Events: a worker's lines, events.jsonl while it grows, and a run's folder as `runs list` and `runs show` read it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from damage import damaged, damaged_json
from fuzzing import command, fuzz, outcome, parsed
from hypothesis import example
from rich.console import Console
from test_fuzz_specs import RUN

from distributed.control.messages import split_line
from distributed.run_dir.find import speed_ups
from distributed.run_dir.folder import launcher_pid
from distributed.run_dir.log import new_events, read_events, scan
from distributed.run_dir.run_view import RunView
from distributed.run_dir.summary import BROKEN, FAILED, FINISHED, INTERRUPTED, read_run
from multimac.commands.attach_stop import follow
from multimac.commands.runs import to_json
from multimac.view.run_screen import screen
from multimac.view.run_tables import curve_lines, facts, host_table, list_table

AT = {"time": 1763726400.0, "host": "mini.local", "rank": 0}
STEP = {
    **{"time": 1763726402.5, "type": "step", "rank": 0, "epoch": 0, "step": 1, "loss": 2.5, "lr": 1e-4, "tokens": 40.0},
    **{"samples": 4, "seconds": 0.5, "grad_norm": 1.0, "bytes": 0, "memory": 0, "host": "mini.local"},
    **{"seconds_waiting": 0.01},
}
EVENTS = [
    {"time": 1763726400.0, "type": "phase", "phase": "start", "hosts": ["mini.local", "10.0.0.2"]},
    {"type": "start", "total_steps": 8, "steps_per_epoch": 4, "trainable": 900, "device": "cpu", **AT},
    {"type": "resume", "epoch": 0, "step": 0, "round": 0, **AT},
    {"type": "preparing", "done": 1, "total": 2, **AT},
    STEP,
    {"type": "round", "epoch": 0, "step": 2, "round": 1, "bytes": 4000, "seconds": 0.1, **AT},
    {"type": "checkpoint", "epoch": 0, "step": 2, "round": 1, "bytes": 4000, **AT},
    {"type": "validation", "epoch": 0, "step": 4, "loss": 2.0, **AT},
    {"type": "warning", "what": "slow", **AT},
    {"type": "problem", "what": "line 3: empty text", **AT},
    {"type": "done", "steps": 8, "seconds": 4.0, "stopped": False, **AT},
    {"time": 1763726404.0, "type": "model", "path": "runs/x/final"},
    {"time": 1763726405.0, "type": "evaluating", "model": "after", "done": 1, "total": 2},
    {"time": 1763726406.0, "type": "evaluation", "when": "after", "wer": 12.5, "cer": 6.0, "clips": 2},
    {"time": 1763726407.0, "type": "end", "status": 0, "message": ""},
]
LINES = [json.dumps(event).encode() + b"\n" for event in EVENTS]
WHOLE = b"".join(LINES)
WRITTEN = {repr(event) for event in EVENTS}  # 1 is not True here
DAMAGED = damaged(WHOLE) | damaged_json(*EVENTS).map(lambda data: LINES[0] + data + b"\n" + WHOLE)


@pytest.fixture(scope="module", autouse=True)
def no_waiting():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distributed.launcher.follow.time.sleep", lambda seconds: None)
        yield


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run's folder; what a test does not damage is whole."""
    run = folder / "runs" / "20251121-120000-mine"
    run.mkdir(parents=True)
    return run


def written(run: Path, name: str, data: bytes) -> Path:
    whole = {"run.json": json.dumps(RUN).encode(), "events.jsonl": WHOLE}
    for file, content in {**whole, name: data}.items():
        (run / file).write_bytes(content)
    return run


NO_NUMBER = re.compile(r"\b(nan|inf|None)\b")


def summarised(run: Path) -> None:
    """The figures agree with each other and with what is printed; the same is read again."""
    summary = read_run(run)
    assert repr(read_run(run)) == repr(summary)
    assert summary.state in (FINISHED, INTERRUPTED, FAILED, BROKEN)
    assert summary.state != BROKEN or summary.message
    assert summary.bytes == sum(host.bytes for host in summary.per_host)
    trained = sum(host.clips for host in summary.per_host)
    assert summary.clips <= trained and (summary.attempts > 1 or summary.clips == trained)
    assert summary.steps <= max((host.steps for host in summary.per_host), default=0)
    assert {step for step, _ in summary.curves.loss} <= set(map(float, range(1, summary.steps + 1))) | {0.0}
    [speed_up] = speed_ups([summary])
    json.dumps(to_json(summary, speed_up, whole=True)["per_host"], allow_nan=False)
    assert ("profile", summary.name) in facts(summary, speed_up) or not summary.name
    shown = io.StringIO()
    console = Console(file=shown, width=100, markup=False)
    for picture in (host_table(summary), list_table([(summary, speed_up)], width=100), *curve_lines(summary, width=80)):
        console.print(picture)
    assert not NO_NUMBER.search(shown.getvalue().replace(summary.name, "")), shown.getvalue()


def with_step(**changes: object) -> bytes:
    return LINES[0] + json.dumps(STEP).encode() + b"\n" + json.dumps(STEP | changes).encode() + b"\n"


@fuzz("events.jsonl, summarised", DAMAGED, cost=3)
@example(data=b"[" * 3000 + b"\n")
@example(data=with_step(time=10**400))
@example(data=with_step(step=float("inf")))
@example(data=with_step(seconds=float("nan")))
@example(data=with_step(bytes=10**400))
@example(data=with_step(loss=1.7e308) + with_step(loss=-1.7e308, step=2))
@example(data=with_step().replace(b"1e-04", b"-"))
@example(data=WHOLE.replace(b"12.5", b"9" * 400))
@example(data=WHOLE.replace(b'"after"', b"[]"))
@example(data=WHOLE.replace(b"1763726407.0", b'"1"'))
def test_events_summarised(run: Path, data: bytes):
    outcome(summarised, written(run, "events.jsonl", data))


@fuzz("run.json, summarised", damaged_json(RUN), cost=3)
@example(data=json.dumps(RUN).replace('"shards": []', '"shards": 7').encode())
@example(data=json.dumps(RUN).replace('"batch_size": 8', '"batch_size": []').encode())
@example(data=json.dumps(RUN).replace('"created": 0.0', '"created": 1e300').encode())
def test_run_json_summarised(run: Path, data: bytes):
    outcome(summarised, written(run, "run.json", data))


def shown(run: Path) -> None:
    """Two commands say the same of a run."""
    state = read_run(run).state
    for words in (("list", "--json"), ("show", "last")):
        status, said = command("runs", *words, "--runs-dir", str(run.parent))
        assert status == 0 and run.name in said and state in said
        if "--json" in words:
            [listed] = json.loads(said)
            assert (listed["id"], listed["state"]) == (run.name, state)


@fuzz("events.jsonl, shown", DAMAGED, few=6, cost=20)
@example(data=with_step(host="\ud800"))
@example(data=with_step(host="[/b]"))
def test_events_shown(run: Path, data: bytes):
    shown(written(run, "events.jsonl", data))


@fuzz("run.json, shown", damaged_json(RUN), few=6, cost=20)
@example(data=json.dumps(RUN).replace('"mine"', '"[/b]\\ud800"').encode())
def test_run_json_shown(run: Path, data: bytes):
    shown(written(run, "run.json", data))


@fuzz("lock", damaged(b"4711\n", b"-1\n"))
@example(data=b"-1\n")
@example(data=b"9" * 30)
def test_the_process_that_holds_the_lock(run: Path, data: bytes):
    (run / "lock").write_bytes(data)
    with (run / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pid = outcome(launcher_pid, run)
    assert pid is None or 1 < pid < 2**31
    if re.fullmatch(rb"[1-9]\d{1,8}\n", data):
        assert pid == int(data)
    assert outcome(launcher_pid, run) is None  # nobody holds it now


@fuzz("events.jsonl, scanned", DAMAGED)
@example(data=LINES[0] + b"[" * 3000 + b"\n")
@example(data=with_step(step=float("inf")))
@example(data=with_step().replace(b"0.0001", b"-"))
def test_events_scanned(run: Path, data: bytes):
    scanned(run, data)


@fuzz("events.jsonl, followed", DAMAGED, cost=2)
def test_events_followed(run: Path, data: bytes):
    followed(run, data)


@fuzz("a worker's line", damaged_json(*EVENTS).map(lambda data: b"text\x1e" + data))
@example(data=b"\x1e" + b"[" * 3000)
def test_a_workers_line(data: bytes):
    split(data.decode("utf-8", "replace"))


def undamaged(data: bytes) -> list[dict]:
    """The lines that hold one of EVENTS still, as the JSON library reads them, in order."""
    return [event for line in data.split(b"\n")[:-1] if repr(event := parsed(line)) in WRITTEN]


def scanned(run: Path, data: bytes) -> None:
    """Whole lines are read as they are, whatever is around them; a line that is named as left out is none of them."""
    file = written(run, "events.jsonl", data) / "events.jsonl"
    events, _ = outcome(read_events, file)
    assert [event for event in events if repr(event) in WRITTEN] == undamaged(data)
    if data and not events:
        with pytest.raises(ValueError, match="no event"):
            scan(file)
        return
    found = outcome(scan, file)
    read = [event.written for attempt in found.attempts for event in (*attempt.steps, *attempt.others)]
    assert sorted(map(repr, read)) == sorted(map(repr, events))
    lines = data.split(b"\n")
    if all(line + b"\n" in LINES for line in lines[:-1]) and len(lines) > 1:
        assert found.left_out == ""
    if named := re.match(r"events.jsonl:(\d+) cannot be read", found.left_out):
        assert lines[int(named[1]) - 1] + b"\n" not in LINES


def followed(run: Path, data: bytes) -> None:
    """By a command on a terminal, which shows a table, and by one that is not."""
    file = written(run, "events.jsonl", data) / "events.jsonl"
    events, position = outcome(new_events, file)
    assert position == len(data[: data.rfind(b"\n") + 1])
    view, told, last = RunView(), [], {}
    for event in events:
        outcome(view.take, event)
        told += view.lines
        view.lines.clear()
        if event.type in ("step", "resume"):
            last[event.host] = event.step
    assert {name: view.hosts[name].step for name in last} == last
    assert ("mini.local: skipped: line 3: empty text" in told) >= (EVENTS[8] in [event.written for event in events])
    ends = [event for event in events if event.type == "end" or (event.type == "phase" and event.host is None)]
    assert view.end == (ends[-1] if ends and ends[-1].type == "end" else None)
    console = Console(file=io.StringIO(), width=200, height=50, markup=False)
    outcome(lambda: console.print(*screen(view, told, name="run", console=console, now=0.0), sep="\n"))
    assert not re.search(r"\b(nan|inf|None)\b", console.file.getvalue()) or b"nan" in data.lower() or b"None" in data
    with contextlib.redirect_stdout(io.StringIO()):
        status = outcome(follow, run, lambda: SimpleNamespace(poll=lambda: 0, returncode=0), console)
    assert status is None or status == view.end.status
    assert status is not None or view.end is None or view.end.status not in (0, 130)


def split(line: str) -> None:
    """An event is what stands after the mark; what is none stays text, every character of it."""
    text, event = outcome(split_line, line)
    before, mark, after = line.partition("\x1e")
    document = parsed(after) if mark else None
    if isinstance(document, dict) and isinstance(document.get("type"), str):
        assert text == before and repr(event) == repr(document)
    else:
        assert (text, event) == (line, None)


SENSELESS = {
    "no type": {},
    "a host that is a list": {"type": "start", "host": []},
    "hosts that are a number": {"type": "phase", "phase": "start", "hosts": 7},
    "a loss in words": {**STEP, "loss": "low"},
    "no loss": {key: value for key, value in STEP.items() if key != "loss"},
    "bytes without end": {**STEP, "bytes": 10**400},
    "seconds that are none": {**STEP, "seconds": math.nan},
    "a status that is none": {"type": "end", "status": 77, "message": ""},
    "an end without a status": {"type": "end"},
}


@pytest.mark.parametrize("event", SENSELESS.values(), ids=SENSELESS.keys())
def test_following_an_event_that_makes_no_sense(run: Path, event: dict):
    followed(run, b"".join(LINES[:4]) + json.dumps(event).encode() + b"\n")
