"""The tests are tables: what is wrong, the command, its exit status, what the message names, what the remedy says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mistake_desk import Desk


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Desk:
    if "transformers" in sys.modules:  # by another test, before cli_typer could set the environment
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    desk = Desk(tmp_path / "desk", capsys)
    monkeypatch.chdir(desk.folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    return desk
