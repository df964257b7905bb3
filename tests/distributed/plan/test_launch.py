"""run.json: what was asked, written and read again; also as an earlier version wrote it."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from small_run import PROJECT

import cli_typer
from distributed.hosts.host_process import environment
from distributed.plan.launch import Launch
from distributed.run_dir.summary import read_run
from whisper_tuner.errors import RunError

GPU_PATIENCE = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
OLD = Path(__file__).with_name("run-of-version-0.1.json").read_text()


@pytest.fixture
def old_run(folder, run_dir, prepared) -> Path:
    """run.json of version 0.1, with the lists of clips that this version has written: they are alike."""
    text = OLD
    for name, path in {"run_dir": run_dir, "folder": folder, "project": PROJECT}.items():
        text = text.replace(f"{{{name}}}", str(path))
    (run_dir / "run.json").write_text(text)
    return run_dir


def test_what_is_saved_is_read_again(run_dir, prepared):
    assert Launch.load(run_dir) == prepared.launch


def test_a_run_of_version_0_1_is_refused_with_what_to_do(old_run):
    with pytest.raises(RunError, match=r"unknown key 'checkpoint_interval'\n.*start a new one"):
        Launch.load(old_run)


def test_a_run_of_version_0_1_is_shown(old_run):
    settings = read_run(old_run).settings
    assert (settings["strategy"], settings["diloco: H"]) == ("diloco", 10)


def test_settings_that_were_not_made_are_not_shown(run_dir, prepared):
    settings = read_run(run_dir).settings
    assert settings["diloco: H"] == 2 and "diloco: outer_lr" not in settings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": []}, "'ranks' is empty"),
        ({"min_hosts": "1"}, "min_hosts: expected int, found str"),
        ({"gpu": 1}, "unknown key 'gpu'"),
        ({"timeout_s": 10**400}, "timeout_s: a number of 401 digits"),
    ],
)
def test_a_damaged_run_is_refused_by_file_and_key(run_dir, prepared, change, words):
    data = json.loads((run_dir / "run.json").read_text()) | change
    (run_dir / "run.json").write_text(json.dumps(data))
    with pytest.raises(RunError, match=words) as caught:
        Launch.load(run_dir)
    assert str(run_dir / "run.json") in str(caught.value) and "start a new one" in str(caught.value)


def test_the_command_that_goes_on(run_dir, prepared):
    assert prepared.launch.resume_command(run_dir).endswith(f"distributed-train --resume {run_dir}")
    alone = dataclasses.replace(prepared.launch, ranks=prepared.launch.ranks[:1])
    assert alone.resume_command(PROJECT / "runs" / "a-run").endswith("finetune --resume a-run")


def test_the_watermarks_of_a_macs_gpu_are_ones_that_torch_takes():
    """It raises unless 0 <= low <= high <= 2; what is not set is 1.7 and 1.4 (MPSAllocator.mm)."""
    variables = {"HIGH": 1.7, "LOW": 1.4} | {
        name.split("_")[2]: float(value) for name, value in environment("/p").items() if "_WATERMARK_" in name
    }
    assert 0 < variables["LOW"] <= variables["HIGH"] <= 1


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0")])
def test_macs_wait_longer_for_what_computes_on_the_gpu(monkeypatch, given, expected):
    """Workers by their environment, `evaluate`, `transcribe` and the doctor by that of the command line."""
    monkeypatch.delenv(GPU_PATIENCE, raising=False)
    if given:
        monkeypatch.setenv(GPU_PATIENCE, given)
    assert environment("/p")[GPU_PATIENCE] == "1"
    assert cli_typer.main(["--help"]) == 0 and os.environ[GPU_PATIENCE] == expected
