"""What a Mac's user gets back from Time Machine, and what only takes its room."""

from pathlib import Path

import pytest
from waiting import wait_until

from distributed.hosts import keep_awake as backups
from distributed.plan.run_spec import CHECKPOINTS
from distributed.worker import main


@pytest.fixture
def excluded(tmp_path, monkeypatch) -> Path:
    """The arguments of a stand-in for tmutil, one a line."""
    program, said = tmp_path / "tmutil", tmp_path / "said"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}.part\nmv {said}.part {said}\n')
    program.chmod(0o755)
    monkeypatch.setattr(backups, "TMUTIL", str(program))
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    return said


def test_what_can_be_made_anew_is_left_out_of_backups_and_the_model_is_not(tmp_path, monkeypatch, excluded):
    project = tmp_path / "project"
    for folder in (".venv", ".multimac", "runs/a/final", f"runs/a/{CHECKPOINTS}", "my recordings"):
        (project / folder).mkdir(parents=True)
    monkeypatch.chdir(project)
    told = main.spare_backups(Path("runs/a"))
    wait_until(excluded.exists)
    verb, *folders = excluded.read_text().splitlines()
    assert verb == "addexclusion"
    assert folders == [str(project / name) for name in (".venv", ".multimac", f"runs/a/{CHECKPOINTS}")]
    assert told == f"Time Machine leaves out from now on, as can be made anew: {', '.join(folders)} (docs/removing.md)"
    assert main.spare_backups(Path("runs/b")) == ""  # once is enough


def test_the_folder_behind_a_link_is_the_users_own_and_other_systems_have_no_such_program(
    tmp_path, excluded, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".venv").symlink_to("elsewhere")
    monkeypatch.setattr("subprocess.Popen", pytest.fail)
    assert backups.exclude_from_backups(tmp_path / ".venv", tmp_path / "none") == ""
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert backups.exclude_from_backups(tmp_path) == ""
