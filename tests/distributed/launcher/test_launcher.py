"""The launcher, over simulated workers: how a run ends, and that what was agreed is saved however it breaks off."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from simulated import Run, Toy

from distributed.launcher import main
from distributed.launcher.main import NOT_EVALUATED, REPORT_AT_ONCE_S, Launcher, commit_of, report_event
from distributed.launcher.training import Training
from distributed.plan.launch import Launch, Rank
from distributed.plan.run_spec import CHECKPOINTS, Bundle, RunSpec
from distributed.run_dir.log import read_events
from whisper_tuner.errors import ExitStatus, HostError, RunError


def train(toy: Toy) -> None:
    toy.train()


@pytest.fixture
def launcher_of(tmp_path, monkeypatch):
    def build(*bodies, all_rounds: int | None = 3, **about) -> tuple[Launcher, Run]:
        simulated = Run(*bodies, all_rounds=all_rounds)
        bundle = Bundle(path="bundle.pickle", sha256="0" * 64)
        spec = RunSpec(run_id="run", run_dir=str(tmp_path), cache_dir="cache", bundle=bundle)
        ranks = tuple(Rank(label=host.name, spec=spec) for host in simulated.hosts)
        Launch(run_id="run", name="tiny", ranks=ranks, **about).save(tmp_path)
        hosts = {host.name: host for host in simulated.hosts}
        monkeypatch.setattr(main, "spawner_of", lambda rank, *_, **__: hosts[rank.label])
        monkeypatch.setattr(main, "Training", functools.partial(Training, background=simulated.background))
        return Launcher(tmp_path), simulated

    return build


def end_of(launcher: Launcher) -> dict:
    events, _ = read_events(launcher.run_dir / "events.jsonl", 0)
    assert [event["type"] for event in events].count("end") == 1
    return events[-1]


def test_a_run_that_ends_well_leaves_the_model_and_no_checkpoints(launcher_of):
    launcher, simulated = launcher_of(train, train)
    (launcher.run_dir / "final").mkdir()
    assert launcher.run() == ExitStatus.OK
    events, _ = read_events(launcher.run_dir / "events.jsonl", 0)
    assert [event["path"] for event in events if event["type"] == "model"] == [str(launcher.run_dir / "final")]
    assert all(host.left == "finished" and host.toy.status == 75 for host in simulated.hosts)
    assert not any(host.toy.saved for host in simulated.hosts)
    assert end_of(launcher)["message"] == ""


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("in the launcher"), MemoryError(), OSError(28, "no space")], ids=repr
)
def test_whatever_breaks_a_run_off_the_workers_save_what_was_agreed(launcher_of, monkeypatch, error):
    launcher, simulated = launcher_of(train, train)
    keep_a_checkpoint(launcher)

    def decide(event: dict) -> None:
        if event["type"] == "commit":
            raise error

    monkeypatch.setattr(launcher, "events", Failing(launcher.events, decide))
    assert launcher.run() == ExitStatus.ERROR
    assert all(host.toy.saved and host.left == "left" for host in simulated.hosts)
    assert type(error).__name__ in end_of(launcher)["message"] and "--resume" in end_of(launcher)["message"]


class Failing:
    def __init__(self, events, fails):
        self._events, self._fails = events, fails

    def __call__(self, event: dict) -> None:
        self._fails(event)
        self._events(event)


def test_an_error_that_was_foreseen_is_told_in_its_own_words(launcher_of):
    def body(toy):
        toy.say({"type": "error", "kind": "NotFinite", "foreseen": True, "message": "the loss is nan"})
        toy.exit(6)

    launcher, simulated = launcher_of(train, lambda toy: toy.train(rounds=1, then=body))
    assert launcher.run() == ExitStatus.RUN
    assert end_of(launcher)["message"] == "host1: the loss is nan" and simulated.hosts[0].toy.saved


@pytest.mark.parametrize(("kind", "cured"), [("CheckpointError", False), ("NotFinite", False), ("ModelError", True)])
def test_to_go_on_is_proposed_only_where_that_may_help(launcher_of, kind, cured):
    def body(toy):
        toy.say({"type": "error", "kind": kind, "foreseen": True, "message": "it is so"})
        toy.exit(6)

    launcher, _ = launcher_of(train, body)
    keep_a_checkpoint(launcher)
    assert launcher.run() == ExitStatus.RUN
    assert ("--resume" in end_of(launcher)["message"]) == cured


def keep_a_checkpoint(launcher: Launcher) -> None:
    (launcher.run_dir / CHECKPOINTS / "0000001").mkdir(parents=True)
    (launcher.run_dir / CHECKPOINTS / "0000001" / "host0.json").touch()


def test_a_host_that_cannot_be_reached_at_first_is_an_error_of_its_own(launcher_of):
    launcher, simulated = launcher_of(train, train)
    simulated.hosts[1].start_errors[1] = HostError("host1", "no route to host")
    assert launcher.run() == HostError.exit_status
    assert "host1: no route to host" in end_of(launcher)["message"] and all(
        host.left == "left" for host in simulated.hosts
    )


def test_the_first_interrupt_ends_in_order_and_keeps_the_checkpoints(launcher_of):
    launcher, simulated = launcher_of(train, train, all_rounds=None)
    simulated.background.at(5, launcher.interrupt)
    assert launcher.run() == ExitStatus.INTERRUPTED
    assert end_of(launcher)["message"].startswith("stopped as asked")
    assert all(host.toy.stopping and host.left == "left" for host in simulated.hosts)


def test_an_interrupt_after_the_last_step_leaves_only_the_evaluation(launcher_of, monkeypatch):
    launcher, simulated = launcher_of(train, test="test.csv")
    monkeypatch.setattr(launcher, "_evaluate", lambda test: pytest.fail("it was to stop"))

    def interrupt(event: dict) -> None:
        if event["type"] == "saved":
            launcher.interrupt()

    monkeypatch.setattr(launcher, "events", Failing(launcher.events, interrupt))
    assert launcher.run() == ExitStatus.INTERRUPTED
    assert end_of(launcher)["message"].startswith(NOT_EVALUATED)
    assert all(host.left == "finished" for host in simulated.hosts)


def test_the_second_interrupt_ends_at_once(launcher_of):
    launcher, simulated = launcher_of(train, lambda toy: toy.train(rounds=2), all_rounds=None)
    simulated.background.at(5, launcher.interrupt)
    simulated.background.at(6, launcher.interrupt)
    assert launcher.run() == ExitStatus.INTERRUPTED
    assert end_of(launcher)["message"].startswith("stopped at once") and simulated.background.time < 10
    assert all(host.toy.status is not None and not host.toy.saved for host in simulated.hosts)


@pytest.mark.parametrize(
    ("how", "status"),
    [("whole", ExitStatus.OK), ("stopped", ExitStatus.INTERRUPTED), ("failed", ExitStatus.RUN)],
)
def test_an_evaluation_that_does_not_end_leaves_the_model(launcher_of, monkeypatch, how, status):
    launcher, simulated = launcher_of(train, test="test.csv")
    measured = []

    def evaluate() -> None:
        measured.append(simulated.hosts[0].toy.status)
        if how == "stopped":
            launcher.interrupt()
        if how == "failed":
            raise RunError("memory ran out")

    monkeypatch.setattr(launcher, "_evaluate", evaluate)
    assert launcher.run() == status
    message = end_of(launcher)["message"]
    assert measured == [75] and message.startswith("" if how == "whole" else NOT_EVALUATED)
    assert ("Measure it with: multimac evaluate " in message) == (how != "whole")
    assert ("memory ran out" in message) == (how == "failed")


def test_the_user_is_told_of_the_end_and_a_command_that_fails_harms_nothing(launcher_of, tmp_path):
    launcher, _ = launcher_of(train, notify=f"exec >> {tmp_path}/told; echo $MULTIMAC_EVENT; exit 3; true")
    assert launcher.run() == ExitStatus.OK
    last, warning = read_events(launcher.run_dir / "events.jsonl")[0][-2:]
    assert last["type"] == "end" and warning["what"] == "notify: it ended with status 3; see launcher.log"
    assert (tmp_path / "told").read_text() == "end\n"


# the report at the end, and the commit


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module of a program, for a process started from here."""

    def made(program: str) -> str:
        (tmp_path / "a_report.py").write_text(f"import os, sys, time\n{program}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "a_report"

    return made


@pytest.mark.parametrize(
    ("program", "event"),
    [
        ("print(sys.argv[1] + '/report.html')", {"type": "report", "path": "RUN/report.html"}),
        ("", None),
        (
            "print('no space left'); sys.exit(1)",
            {"type": "warning", "what": "the report was not written: no space left"},
        ),
        ("raise ZeroDivisionError", "its process ended with status 1; see launcher.log"),
        ("os.kill(os.getpid(), 9)", "its process ended with status -9; see launcher.log"),
        ("time.sleep(60)", "it took over 3 s"),
    ],
)
def test_what_its_process_says(module, program, event):
    if isinstance(event, str):
        event = {"type": "warning", "what": f"the report was not written: {event}"}
    assert report_event(module(program), Path("RUN"), longest_s=3.0) == event


def test_it_is_written_after_the_last_word(launcher_of, monkeypatch):
    launcher, _ = launcher_of(train)
    launcher._report = "a.module"
    warning = {"type": "warning", "what": "the report was not written: the disk is full"}
    monkeypatch.setattr(main, "report_event", lambda *_: warning)
    assert launcher.run() == ExitStatus.OK
    assert [event["type"] for event in read_events(launcher.run_dir / "events.jsonl")[0]][-2:] == ["end", "warning"]


def test_a_second_ctrl_c_does_without_it(launcher_of, monkeypatch):
    launcher, _ = launcher_of(train)
    launcher._report = "a.module"
    monkeypatch.setattr(main, "report_event", lambda *_: launcher.interrupt())
    assert launcher.run() == ExitStatus.OK
    assert read_events(launcher.run_dir / "events.jsonl")[0][-1]["type"] == "end"


def test_a_run_that_was_stopped_at_once_waits_only_seconds_for_it(launcher_of, monkeypatch):
    def stopped(self) -> None:
        raise KeyboardInterrupt

    launcher, _ = launcher_of(train)
    launcher._report = "a.module"
    monkeypatch.setattr(main.Launcher, "_train", stopped)
    asked = []
    monkeypatch.setattr(main, "report_event", lambda *about: asked.append(about))
    assert launcher.run() == ExitStatus.INTERRUPTED
    assert asked == [("a.module", launcher.run_dir, REPORT_AT_ONCE_S)]


@pytest.mark.parametrize("kept", ["file", "packed", "detached", "worktree", "none", "odd"])
def test_the_commit_is_read_from_gits_files(tmp_path, kept):
    git, project = tmp_path / "clone" / ".git", tmp_path / "clone"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text(f"{COMMIT}\n" if kept == "detached" else "ref: refs/heads/main\n")
    if kept in ("file", "worktree"):
        (git / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")
    if kept == "packed":
        (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{COMMIT} refs/heads/main\n")
    if kept == "worktree":
        project, folder = tmp_path / "other", git / "worktrees" / "other"
        folder.mkdir(parents=True)
        project.mkdir()
        (project / ".git").write_text(f"gitdir: {folder}\n")
        (folder / "HEAD").write_text("ref: refs/heads/main\n")
        (folder / "commondir").write_text("../..\n")
    if kept == "odd":
        (git / "HEAD").write_bytes(b"\xff")
    assert commit_of(project) == ("" if kept in ("none", "odd") else COMMIT)
    assert commit_of(tmp_path) == ""
