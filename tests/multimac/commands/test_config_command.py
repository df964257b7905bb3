"""`config show` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cli_typer

CONFIG = """\
[profile:mine]
base_model = openai/whisper-tiny
train = clips.csv
lora_targets = q_proj fc1

[distributed:both]
base_profile = mine
min_hosts = 2
"""


@pytest.fixture
def show(tmp_path: Path, capsys):
    (tmp_path / "config.ini").write_text(CONFIG)

    def call(*arguments: str) -> str:
        assert cli_typer.main(["config", "show", *arguments, "--config", str(tmp_path / "config.ini")]) == 0
        return capsys.readouterr().out

    return call


def test_as_json_each_setting_has_its_value_and_where_it_comes_from(show, tmp_path):
    found = {row["setting"]: row for row in json.loads(show("both", "--json"))}
    assert found["train"]["value"] == str(tmp_path / "clips.csv")
    assert found["lora_targets"]["value"] == ["q_proj", "fc1"]
    assert (found["min_hosts"]["value"], found["min_hosts"]["from"]) == (2, "config.ini:8 [distributed:both]")
    assert (found["epochs"]["from"], found["epochs"]["meaning"]) == ("default", "passes over the training clips")
    assert (found["wire"]["value"], found["wire"]["from"]) == (None, "chosen at the start")


def test_as_json_all_names_are_listed(show):
    assert json.loads(show("--json")) == {"model": [], "dataset": [], "profile": ["mine"], "distributed": ["both"]}


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_nothing_is_cut_off(show, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    said = show("both")
    assert max(map(len, said.splitlines())) <= columns and "…" not in said
    assert "speed_perturbation" in said


def test_what_is_no_profile_is_told_without_a_heading(tmp_path, capsys):
    (tmp_path / "config.ini").write_text(CONFIG)
    assert cli_typer.main(["config", "show", "mien", "--config", str(tmp_path / "config.ini")]) == 3
    told = capsys.readouterr()
    assert told.out == "" and "did you mean 'mine'?" in told.err
