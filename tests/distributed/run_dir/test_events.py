"""Whole histories: attempts, damage, and what the events add up to; a disk that is full, and folders that vanish."""

import contextlib
import errno
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from distributed.run_dir.events import event_of
from distributed.run_dir.folder import disk_use
from distributed.run_dir.log import FULL, RESERVE, EventLog, RunEvents, new_events, read_events, scan
from distributed.run_dir.run_view import RunView
from distributed.run_dir.summary import Curves, figures

BEGIN = {"time": 1.0, "type": "phase", "phase": "start", "hosts": ["a", "b"]}
START = {"time": 2.0, "type": "start", "total_steps": 4, "device": "cpu"}
END = {"time": 99.0, "type": "end", "status": 0, "message": ""}
STEP = {"type": "step", "epoch": 0, "samples": 4, "seconds": 0.5, "lr": 1e-4, "loss": 2.0, "bytes": 0, "memory": 0}


def step(host: str, number: int, **more) -> dict:
    return {**STEP, "time": 10.0 + number, "host": host, "step": number, **more}


def a_round(host: str, number: int, *, kind: str = "round", **more) -> dict:
    return {"time": 11.0 + number, "type": kind, "host": host, "step": number, "round": 1, "seconds": 0.1, **more}


@pytest.fixture
def history(tmp_path):
    """Scans a file of these events; text stands for a line as it is."""

    def of(*events: dict | str):
        lines = [event if isinstance(event, str) else json.dumps(event) + "\n" for event in events]
        (tmp_path / "events.jsonl").write_text("".join(lines))
        return scan(tmp_path / "events.jsonl")

    return of


def test_a_run_that_has_not_begun_has_no_attempts(tmp_path):
    assert scan(tmp_path / "events.jsonl") == RunEvents()


def test_half_a_line_of_a_launcher_that_was_killed_is_removed_by_the_next(history, tmp_path):
    assert history(BEGIN, step("a", 1), '{"time": 1').left_out == ""
    log = EventLog(tmp_path / "events.jsonl")
    for event in (BEGIN, step("a", 2), END):
        log(event)
    log.close()
    resumed = scan(tmp_path / "events.jsonl")
    assert resumed.left_out == "" and [len(attempt.steps) for attempt in resumed.attempts] == [1, 1]


def test_a_last_event_that_only_lacks_the_end_of_its_line_is_kept(history, tmp_path):
    history(BEGIN, step("a", 1), json.dumps(END))
    log = EventLog(tmp_path / "events.jsonl")
    log(BEGIN)
    log.close()
    found = scan(tmp_path / "events.jsonl")
    assert found.left_out == "" and found.attempts[0].of_type("end") == [event_of(END)] and len(found.attempts) == 2


def test_half_a_line_that_an_earlier_version_left_before_a_resume_is_not_told(history):
    assert history(BEGIN, '{"time": 1\n', BEGIN, END).left_out == ""
    assert history(BEGIN, "{\n", "{\n", BEGIN, END).left_out == "events.jsonl:2 cannot be read: left out"


@pytest.mark.parametrize(
    ("events", "left_out"),
    [
        (("{\n", BEGIN, END), "events.jsonl:1 cannot be read: left out"),
        ((BEGIN, "{\n", END), "events.jsonl:2 cannot be read: left out"),
        ((BEGIN, '{"type": "end"}\n', END), "events.jsonl:2 cannot be read: left out"),
        ((BEGIN, {**END, "status": 77}, END, "{\n"), "events.jsonl:2 cannot be read, nor can 1 more: left out"),
    ],
)
def test_lines_that_cannot_be_read_are_told_once_and_the_others_are_read(history, events, left_out):
    found = history(*events)
    assert found.left_out == left_out
    assert [attempt.others for attempt in found.attempts] == [[event_of(BEGIN), event_of(END)]]


@pytest.mark.parametrize("lines", ["{\n", "{", '{"type": "end"}\n'])
def test_a_file_without_an_event_has_no_history(history, lines):
    with pytest.raises(ValueError, match="holds no event that can be read"):
        history(lines)


def test_what_a_validation_by_wer_costs_is_told():
    said = {"type": "validation", "time": 1.0, "host": "a", "step": 8, "loss": 0.5, "score": 0.25, "seconds": 4.4}
    assert event_of(said).line == "step 8: validation loss 0.500, WER 25.0 (4 s)"
    assert event_of({key: said[key] for key in said if key not in ("score", "seconds")}).line.endswith("loss 0.500")


def test_followers_and_histories_read_the_same_events(history, tmp_path):
    found = history(BEGIN, START, "{\n", step("a", 1), step("a", 2, loss="low"), END)
    read, position = read_events(tmp_path / "events.jsonl")
    assert read == [BEGIN, START, step("a", 1), END]
    [attempt] = found.attempts
    assert new_events(tmp_path / "events.jsonl")[0] == [*attempt.others[:2], *attempt.steps, *attempt.others[2:]]
    assert position == (tmp_path / "events.jsonl").stat().st_size


def test_bytes_of_a_round_count_once_and_its_seconds_are_communication(history):
    steps = [step("a", 1), step("a", 2, bytes=100), step("a", 3)]
    rounds = [a_round("a", 2, bytes=100), a_round("a", 3, bytes=50)]
    found = figures(history(BEGIN, *steps, *rounds, END))
    assert (found["bytes"], found["rounds"]) == (150, 1)
    assert found["per_host"][0].communicating == pytest.approx(0.2)
    alone = figures(history(BEGIN, *steps, a_round("a", 3, kind="stop", bytes=50), END))
    assert (alone["bytes"], alone["per_host"][0].communicating) == (150, None)


def test_exchanges_between_rounds_and_the_round_after_the_last_step_all_count(history):
    """As SPARTA inside DiLoCo's rounds: its steps tell the sparse exchanges."""
    sparse = {"bytes": 10, "seconds_communicating": 0.01}
    steps = [step("a", 1, **sparse), step("a", 2, bytes=100), step("a", 3, **sparse)]
    rounds = [a_round("a", 2, bytes=100), a_round("a", 3, bytes=50)]
    found = figures(history(BEGIN, *steps, *rounds, END))
    assert found["bytes"] == 170 and found["per_host"][0].communicating == pytest.approx(0.22)
    stopped = figures(history(BEGIN, steps[0], a_round("a", 1, kind="stop", bytes=10), END))
    assert (stopped["bytes"], stopped["per_host"][0].communicating) == (10, 0.01)


def test_seconds_that_a_host_waited_for_batches_are_added_up(history):
    steps = [step("a", 1, seconds_waiting=0.5), step("a", 2, seconds_waiting=0.25), step("b", 1)]
    told = {host.name: host.waiting for host in figures(history(BEGIN, *steps, END))["per_host"]}
    assert told == {"a": 0.75, "b": None}


def test_curves_are_means_over_hosts_and_steps_made_again_replace_the_old_ones(history):
    first = [step("a", 1), step("a", 2, loss=9.0), {"time": 13.0, "type": "validation", "step": 2, "loss": 9.0}]
    again = [
        step("a", 2, loss=1.0),
        step("b", 2, loss=2.0),
        {"time": 20.0, "type": "validation", "step": 2, "loss": 3.0},
    ]
    found = figures(history(BEGIN, *first, BEGIN, *again, END))
    own = {"a": ((1.0, 2.0), (2.0, 1.0)), "b": ((2.0, 2.0),)}
    means = {"loss": ((1, 2.0), (2, 1.5)), "validation": ((2, 3.0),), "lr": ((1, 1e-4), (2, 1e-4))}
    assert found["curves"] == Curves(of_hosts=own, **means)
    assert (found["steps"], found["clips"], found["attempts"]) == (2, 12, 2)
    assert [(host.name, host.clips) for host in found["per_host"]] == [("a", 8), ("b", 4)]


def test_hosts_that_were_stopped_in_different_steps_keep_their_own(history):
    first = [step("a", 1), step("b", 1), step("a", 2)]
    at = {"a": 2, "b": 1}
    resumes = [{"time": 11.9, "type": "resume", "host": h, "step": s, "round": 0, "epoch": 0} for h, s in at.items()]
    found = figures(history(BEGIN, *first, BEGIN, *resumes, step("b", 2), step("a", 3), step("b", 3), END))
    assert [(host.name, host.steps, host.clips) for host in found["per_host"]] == [("a", 3, 12), ("b", 3, 12)]
    assert (found["steps"], found["clips"]) == (3, 24)


def test_readings_of_machines_change_no_figure_and_a_host_shows_the_latest(history, tmp_path):
    told = [{"time": 3.0 + n, "type": "machine", "host": "a", "cpu": n, "on_mains": False} for n in range(3)]
    found = history(BEGIN, step("a", 1), *told, END)
    assert found == history(BEGIN, step("a", 1), END)
    history(BEGIN, *told, {**told[0], "cpu": "hot"})
    view = RunView()
    for event in new_events(tmp_path / "events.jsonl")[0]:
        view.take(event)
    machine = view.hosts["a"].machine
    assert machine and (machine.cpu, machine.on_mains, machine.battery) == (2, False, None) and view.lines == []


def test_what_every_host_tells_is_shown_once_at_the_first_step_too():
    view = RunView()
    for number in (0, 1):
        for host in ("a", "b"):
            event = {"time": 3.0, "type": "shares", "host": host, "step": number, "what": "a 3, b 1"}
            view.take(event_of(event))
    assert view.lines == ["step 0: a 3, b 1", "step 1: a 3, b 1"]


def test_a_folder_that_vanishes_while_a_run_is_measured_counts_no_more(tmp_path, monkeypatch):
    """As checkpoints do while the run goes on."""
    (tmp_path / "checkpoints" / "0000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "0000002" / "state").write_bytes(bytes(50))
    (tmp_path / "run.json").write_bytes(bytes(7))
    assert disk_use(tmp_path)[0] == 57
    lstat = Path.lstat

    def removing(path: Path):
        if path.name == "0000002":
            shutil.rmtree(path.parent)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", removing)
    assert disk_use(tmp_path)[0] == 7


def test_events_wait_while_the_disk_is_full(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log({"type": "a"})
    whole, log._file = log._file, FullDisk(log._file, room=10)
    log({"type": "b"})
    log({"type": "c"})
    log._file = whole
    log({"type": "d"})
    assert [event["type"] for event in read_events(tmp_path / "events.jsonl")[0]] == ["a", "b", "c", "d"]


def test_a_reserve_lets_a_full_disk_be_told(tmp_path):
    """On a real one: the launcher's last word is written there, and that the disk was full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        log = EventLog(folder / "events.jsonl", reserve=RESERVE)
        log({"type": "a"})
        assert [path.name for path in folder.iterdir()] == ["events.jsonl"]
        with contextlib.suppress(OSError), (folder / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for number in range(200):
            log({"type": "b", "what": "x" * 100, "number": number})
        assert log.was_full
        events = read_events(folder / "events.jsonl")[0]
        log.close()
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert [event["what"] for event in events if event["type"] == "warning"] == [FULL]
    assert [event["number"] for event in events if event["type"] == "b"] == [*range(200)]


class FullDisk:
    """Takes a few bytes, and then no more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken, self.room = self.file.write(data[: self.room]), 0
        return taken
