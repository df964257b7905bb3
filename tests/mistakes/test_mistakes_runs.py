"""Runs that are named, resumed, compared; checkpoints that are damaged; answers for the wizard."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mistake_desk import Desk

from distributed.plan.job import resolve
from distributed.plan.prepare import prepare_run
from distributed.run_dir.folder import new_run
from whisper_tuner.config import ConfigFile

RUN = "20251121-101010-mine"
RESUME = f"finetune --resume {RUN}"


def a_run(desk: Desk, end: int | None = 6) -> Path:
    """A run as `finetune` writes it down, that ended in its first step with this exit status."""
    job = resolve(ConfigFile(desk.folder / "config.ini"), "mine", strategy="allreduce")
    with new_run(job.profile.runs_dir, job.name) as made:
        prepare_run(job, made).launch.save(made)
    run = made.rename(made.with_name(RUN))
    asked = (run / "run.json").read_text().replace(made.name, RUN)
    (run / "run.json").write_text(asked)
    events = [{"time": 1.0, "type": "phase", "phase": "start", "hosts": ["localhost"]}]
    events += [{"time": 2.0, "type": "end", "status": end, "message": ""}] if end is not None else []
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def finished(desk: Desk) -> None:
    a_run(desk, end=0)


def damaged(text: str):
    def make(desk: Desk) -> None:
        (a_run(desk) / "run.json").write_text(text)

    return make


def without_run_json(desk: Desk) -> None:
    (a_run(desk) / "run.json").unlink()


def model_is_gone(desk: Desk) -> None:
    a_run(desk)
    shutil.rmtree(desk.folder / "model")


def no_test_set(desk: Desk) -> None:
    desk.write("test.csv", (desk.folder / "clips.csv").read_text())
    desk.change("config.ini", "max_steps = 2\n", "max_steps = 2\ntest = test.csv\n")
    a_run(desk)
    (desk.folder / "test.csv").unlink()


def two_runs(desk: Desk) -> None:
    run = a_run(desk)
    shutil.copytree(run, run.with_name("20251121-101011-mine"))


def answers(**changes: str):
    def make(desk: Desk) -> None:
        given = {"model": "{desk}/model", "data": "{desk}/clips.csv", "start": "later"} | changes
        text = json.dumps({key: value.replace("{desk}", str(desk.folder)) for key, value in given.items()})
        desk.write("answers.json", text)

    return make


WIZARD = "wizard --answers answers.json"

# name: (what is wrong; command; exit status; the message names; the remedy says)
MISTAKES = {
    "a run that there is not": (
        a_run,
        "finetune --resume 20251121-101010-mien",
        3,
        f"there is no run '20251121-101010-mien', did you mean '{RUN}'?",
        f"Runs in runs:\n    {RUN}",
    ),
    "no run at all": (None, "finetune --resume last", 3, "there is no run 'last'", "There is no run in {desk}/runs"),
    "a name that two runs begin with": (two_runs, "runs show 2025", 3, "2 runs begin with '2025'", RUN),
    "a finished run": (finished, RESUME, 6, f"run {RUN} is finished", "start a new run with more epochs"),
    "a run of another profile": (
        a_run,
        f"finetune other --resume {RUN}",
        3,
        f"run {RUN} trains mine, not other",
        "Leave the name out",
    ),
    "a damaged run.json": (damaged("{"), RESUME, 6, f"{RUN}/run.json", "start a new one"),
    "a run.json without ranks": (damaged("{}"), RESUME, 6, f"{RUN}/run.json: no 'run_id'", "start a new one"),
    "no run.json": (without_run_json, RESUME, 6, (f"{RUN}/run.json", "No such file"), "start a new one"),
    "the model is gone": (model_is_gone, RESUME, 6, f"run {RUN} needs {{desk}}/model, which is gone", "Put it back"),
    "the test set is gone": (no_test_set, RESUME, 6, "test.csv, which is gone", "Put it back"),
    "compare one run": (a_run, f"runs compare {RUN}", 3, "a comparison needs two runs", "Name two or more"),
    "a runs folder that there is not": (None, "runs list --runs-dir nowhere", 3, "nowhere", "--runs-dir"),
    "an age that is none": (a_run, "runs clean --older-than 7", 3, "--older-than 7: not an age", "12h"),
    "clean a run that there is not": (a_run, "runs clean nothing --yes", 3, "no run 'nothing'", RUN),
    "the wizard without a terminal": (None, "wizard", 3, "it needs a terminal", "--answers"),
    "no answers": (None, "wizard --answers no.json", 3, "no.json: cannot be read", "--answers"),
    "answers that are no JSON": (
        lambda desk: desk.write("answers.json", '{"model": "x",\n "data"}'),
        WIZARD,
        3,
        "answers.json:2",
        ("comma", "--save-answers"),
    ),
    "answers saved into a folder": (
        answers(),
        f"{WIZARD} --save-answers audio",
        3,
        "--save-answers audio is a folder",
        "Name a file",
    ),
    "an answer to no question": (
        answers(modle="x"),
        WIZARD,
        3,
        "answers.json: unknown key 'modle', did you mean 'model'?",
        "Known keys: model",
    ),
    "a model that there is not, as an answer": (answers(model="none"), WIZARD, 3, "none", "model"),
    "data that there are not, as an answer": (
        answers(data="none.csv"),
        WIZARD,
        3,
        "data = none.csv: there is no such file",
        "path of a manifest",
    ),
    "an unknown method, as an answer": (answers(method="loar"), WIZARD, 3, "loar", "lora"),
    "a word for a number, as an answer": (
        answers(epochs="many"),
        WIZARD,
        3,
        "epochs = many: expected a whole number",
        "passes over",
    ),
}


@pytest.mark.parametrize(("make", "command", "status", "place", "remedy"), MISTAKES.values(), ids=MISTAKES.keys())
def test_runs(desk, make, command, status, place, remedy):
    if make:
        make(desk)
    desk.refuses(command, status, place, remedy)


@pytest.mark.parametrize(
    ("command", "status", "remedy"),
    [(RESUME, 6, f"multimac runs attach {RUN}"), (f"runs clean {RUN} --yes", 3, f"multimac runs stop {RUN}")],
    ids=["resume", "clean"],
)
def test_a_run_that_is_going_on(desk, command, status, remedy):
    lock = (a_run(desk) / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    desk.refuses(command, status, RUN, remedy)


def damage(run: Path) -> None:
    for weights in (run / "checkpoints").glob("*/localhost.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])


def nothing(run: Path) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        pytest.param(damage, "all checkpoints are damaged: localhost", id="damaged"),
        pytest.param(
            nothing,
            "belongs to a run with other settings: strategy was DiLoCoStrategy, and is AllReduceStrategy",
            id="of another run",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_checkpoints_that_cannot_be_used(desk, harm, message):
    """Found by the rank that reads them; tests/exogym/state/test_checkpoint.py has every kind of damage."""
    from exogym.state.checkpoint import Checkpoints

    run = a_run(desk)
    for number in (1, 2):
        kept = Checkpoints(run / "checkpoints", "localhost")
        kept.save(number, {"settings": {"strategy": "DiLoCoStrategy"}, "agreed": {"version": (1, 1), "strategy": {}}})
    harm(run)
    before = {name: digest for name, digest in desk.snapshot().items() if "/checkpoints/" in name}
    status, _, err = desk.run(RESUME)
    assert status == 6 and message in err and "Traceback" not in err
    assert "Start a new run, or put the run's checkpoints back on that host." in err
    assert before == {name: digest for name, digest in desk.snapshot().items() if "/checkpoints/" in name}
    assert not (run / "final").exists() and not list(run.glob(".*"))


@pytest.mark.slow
def test_the_disk_fills_up_while_it_trains(desk):
    """What there is of the run stays: it tells how far it came."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small disk is mounted by root on Linux")
    runs = desk.folder / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(runs)], check=True)
    try:
        status, out, err = desk.run("finetune mine")
        assert status == 6, out + err
        assert err.startswith("error: localhost: ") and "No space left on device" in err and "Traceback" not in err
        assert "Free some space" in err and "runs_dir" in err
        [run] = runs.iterdir()
        assert not list(run.glob("final*"))
    finally:
        subprocess.run(["umount", "-l", str(runs)], check=True)
