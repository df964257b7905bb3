"""The report at the end of a run: what its process says, and that nothing of it changes how the run has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_launcher import launcher_of, train

from distributed.launcher import main
from distributed.launcher.main import REPORT_AT_ONCE_S, commit_of, report_event
from distributed.run_dir.log import read_events
from whisper_tuner.errors import ExitStatus

__all__ = ["launcher_of"]

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


def events_of(launcher) -> list[dict]:
    return read_events(launcher.run_dir / "events.jsonl")[0]


def test_it_is_written_after_the_last_word(launcher_of, monkeypatch):
    launcher, _ = launcher_of(train)
    launcher._report = "a.module"
    warning = {"type": "warning", "what": "the report was not written: the disk is full"}
    monkeypatch.setattr(main, "report_event", lambda *_: warning)
    assert launcher.run() == ExitStatus.OK
    assert [event["type"] for event in events_of(launcher)][-2:] == ["end", "warning"]


def test_a_second_ctrl_c_does_without_it(launcher_of, monkeypatch):
    launcher, _ = launcher_of(train)
    launcher._report = "a.module"
    monkeypatch.setattr(main, "report_event", lambda *_: launcher.interrupt())
    assert launcher.run() == ExitStatus.OK
    assert events_of(launcher)[-1]["type"] == "end"


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
