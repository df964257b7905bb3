"""Real runs of two processes into each logger, and what it wrote read back."""

import csv
import io
import os
import pty
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import wandb
import wandb_file
from exogym_toys import Line, Points
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exogym
from exogym import DiLoCoStrategy, LocalTrainer
from exogym.errors import ExogymError, SettingError
from exogym.logger import ConsoleLogger, CSVLogger, Logger, Summary, TensorBoardLogger, WandbLogger
from exogym.logger.logger import line

INTERVAL, STEPS = 3, 10
PATH = {**os.environ, "PYTHONPATH": str(Path(exogym.__file__).parents[1])}
START = {"type": "start", "rank": 0, "num_nodes": 1, "total_steps": 4, "device": "cpu", "trainable": 5}


def fit(logger, num_nodes=2):
    trainer = LocalTrainer(Line(), Points(64), Points(8))
    trainer.fit(
        strategy=DiLoCoStrategy(H=4, lr=0.01),
        num_nodes=num_nodes,
        max_steps=STEPS,
        val_interval=4,
        batch_size=4,
        device="cpu",
        log_correlation=1,
        logger=logger,
    )
    return trainer


def steps(count, **more):
    return [
        {"type": "step", "rank": 0, "step": n, "loss": 1.0, "tokens": 4, "samples": 4, "seconds": 0.5} | more
        for n in range(1, count + 1)
    ]


def give(logger, *events):
    for event in (START, *events):
        logger(event)
    logger.close()


class Together(Logger):
    """Several loggers, and all events that came."""

    def __init__(self, *loggers):
        super().__init__(log_interval=INTERVAL)
        self.loggers, self.events, self.records = loggers, [], []

    def saw(self, event):
        self.events.append(event)
        for logger in self.loggers:
            logger(event)

    def write(self, record):
        self.records.append(record)

    def ended(self):
        for logger in self.loggers:
            logger.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run into all loggers."""
    folder, printed = tmp_path_factory.mktemp("run"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.delenv("WANDB_MODE", raising=False)
        patch.setenv("HOME", str(folder))  # where there is no login
        log = Together(
            ConsoleLogger(stream=printed, log_interval=INTERVAL),
            CSVLogger(folder / "sub" / "run.csv", log_interval=INTERVAL),
            TensorBoardLogger(folder / "board", log_interval=INTERVAL),
            WandbLogger("p", "e", config={"note": "x"}, directory=folder / "w", log_interval=INTERVAL),
        )
        result = fit(log)
    log.printed, log.folder, log.result = printed.getvalue(), folder, result
    return log


def same(found, record):
    """A logger's figures of a record, those of time apart."""
    figures = {key: value for key, value in record.figures().items() if key != "seconds"}
    return {key: float(found[key]) for key in figures} == pytest.approx(figures, rel=1e-6)


def test_the_records_are_those_of_the_run(run):
    kinds = [(record.kind, record.step) for record in run.records]
    trained = [("train", n) for n in (3, 6, 9, 10)]
    assert sorted(kinds[:-1]) == sorted(
        [*trained, *((k, n) for k in ("correlation", "validation") for n in (4, 8, 10))]
    )
    assert kinds[-1] == ("end", STEPS) and [step for _, step in kinds] == sorted(step for _, step in kinds)
    train = [record for record in run.records if record.kind == "train"]
    made = [event for event in run.events if event["type"] == "step"]
    for record, first in zip(train, (1, 4, 7, 10), strict=True):
        of = [event for event in made if first <= event["step"] <= record.step]
        assert len(of) == 2 * (record.step - first + 1) == record.ranks * (record.step - first + 1)
        assert record.loss == pytest.approx(sum(e["loss"] * e["tokens"] for e in of) / sum(e["tokens"] for e in of))
        assert record.memory == max(event["memory"] for event in of) > 1e7
        assert record.samples_per_s == pytest.approx(2 * sum(e["samples"] for e in of) / sum(e["seconds"] for e in of))
    end = run.records[-1]
    rounds = [event for event in run.events if event["type"] == "round"]
    assert end.bytes_total == sum(event["bytes"] for event in rounds) > 0
    assert end.bandwidth == pytest.approx(end.bytes_total / sum(event["seconds"] for event in rounds))
    assert [r.val_loss for r in run.records if r.kind == "validation"][-1] == end.val_loss
    assert all(0.9 < record.correlation <= 1 for record in run.records if record.kind == "correlation")


@pytest.mark.slow
def test_the_start_event_has_the_settings(run):
    start = run.events[0]
    assert start["strategy"] | {"name": "DiLoCoStrategy", "H": 4, "lr": 0.01} == start["strategy"]
    assert (start["settings"]["batch_size"], start["num_nodes"], start["trainable"]) == (4, 2, 5)
    assert start["steps_in_round"] == 4


def test_csv(run):
    with (run.folder / "sub" / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["kind"], int(row["step"])) for row in rows] == [(r.kind, r.step) for r in run.records]
    assert all(same(row, record) for row, record in zip(rows, run.records, strict=True))
    assert rows[0]["val_loss"] == "" and float(rows[-1]["seconds"]) > 0


def test_console(run):
    first, *lines = run.printed.splitlines()
    assert first.startswith("DiLoCoStrategy(inner_optim=adamw, lr=0.01") and "2 ranks on cpu, 5 parameters" in first
    assert first.endswith("batch size 4, 10 steps")
    assert lines == [line(record, STEPS) for record in run.records]


def test_tensorboard(run):
    read = EventAccumulator(str(run.folder / "board")).Reload()
    train = [record for record in run.records if record.kind == "train"]
    for name in ("loss", "perplexity", "lr", "samples_per_s", "bytes_total", "memory", "epoch"):
        found = {scalar.step: scalar.value for scalar in read.Scalars(name)}
        assert {r.step: found[r.step] for r in train} == pytest.approx({r.step: getattr(r, name) for r in train})
    assert [scalar.step for scalar in read.Scalars("val_loss")] == [4, 8, 10]
    assert [scalar.step for scalar in read.Scalars("correlation")] == [4, 8, 10]
    assert read.Scalars("end/bytes_total")[0].value == run.records[-1].bytes_total
    assert b'"H": 4' in read.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


def test_wandb_offline(run):
    [file] = run.folder.glob("w/wandb/offline-run-*/run-*.wandb")
    rows = wandb_file.history(file)
    assert [row["step"] for row in rows] == [record.step for record in run.records[:-1]]
    assert all(same(row, record) for row, record in zip(rows, run.records[:-1], strict=True))
    end, last = wandb_file.summary(file), run.records[-1]
    assert same(end, last) and end["step"] == STEPS
    config = wandb_file.config(file)
    assert (config["note"], config["strategy"]["H"], config["settings"]["batch_size"]) == ("x", 4, 4)
    [about] = {(r.run.project, r.run.display_name) for r in wandb_file.records(file) if r.run.project}
    assert about == ("p", "e")


def no_wandb_process_is_left():
    end = time.monotonic() + 10
    while left := [p for p in psutil.Process().children(recursive=True) if "wandb" in p.name()]:
        if time.monotonic() > end:
            return not left
        time.sleep(0.1)
    return True


def test_wandb_leaves_no_process_behind(run, tmp_path):
    assert no_wandb_process_is_left()
    log = WandbLogger(mode="offline", directory=tmp_path)
    log(START)
    assert [p for p in psutil.Process().children(recursive=True) if "wandb" in p.name()]
    log.close()
    assert no_wandb_process_is_left()


def test_wandb_leaves_a_run_of_the_user_alone(tmp_path):
    own = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off"))
    give(WandbLogger(mode="offline", directory=tmp_path), *steps(2))
    assert wandb.run is own
    own.log({"x": 1})
    own.finish()
    wandb.teardown()
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_wandb_without_internet(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    began = time.monotonic()
    give(WandbLogger(directory=tmp_path, log_interval=1), *steps(2))
    assert time.monotonic() - began < 30
    assert "the run is kept offline" in capfd.readouterr().err
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert [row["loss"] for row in wandb_file.history(file)] == [1.0, 1.0]
    assert no_wandb_process_is_left()


def test_wandb_mode_of_the_environment_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    give(WandbLogger(mode="online", directory=tmp_path), *steps(2))
    assert not list(tmp_path.glob("wandb/*run*"))
    with pytest.raises(SettingError, match="mode must be one of online, offline"):
        WandbLogger(mode="sometimes")


@pytest.mark.parametrize(
    ("package", "made", "remedy"),
    [
        ("wandb", "WandbLogger()", "WandbLogger needs a package: pip install 'wandb>="),
        ("tensorboard", "TensorBoardLogger('board')", "TensorBoardLogger needs a package: pip install 'tensorboard>="),
    ],
)
def test_a_package_that_is_not_installed(tmp_path, package, made, remedy):
    code = f"import sys; sys.modules['{package}'] = None; from exogym.logger import *; {made}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=PATH, capture_output=True, text=True)
    assert f"SettingError: {remedy}" in done.stderr and not list(tmp_path.iterdir())


def test_loggers_are_imported_without_torch_and_their_packages():
    code = "import sys, exogym.logger; print({'torch', 'wandb', 'tensorboard', 'rich', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], env=PATH, capture_output=True, text=True).stdout == "set()\n"


def test_csv_without_arguments_chooses_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fit(first := CSVLogger(), num_nodes=1)
    second, named = CSVLogger(), CSVLogger(project="p", experiment_name="e")
    again = CSVLogger(project="p", experiment_name="e")
    folders = [logger.path.parent for logger in (first, second, named, again)]
    assert len(set(folders)) == 4 and [str(folder) for folder in folders[2:]] == ["logs/p/e", "logs/p/e-2"]
    assert folders[0].parent == Path("logs/exogym")
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()] == [str(f) for f in folders]
    with first.path.open(newline="") as file:
        assert [row["kind"] for row in csv.DictReader(file)][-1] == "end"
    for logger in (second, named, again):
        logger.close()
    with pytest.raises(SettingError, match="give path, or project and experiment_name"):
        CSVLogger("run.csv", project="p")


def test_csv_is_flushed_and_can_be_gone_on_with(tmp_path):
    path = tmp_path / "run.csv"
    log = CSVLogger(path, log_interval=2)
    for event in (START, *steps(3)):
        log(event)
    assert [row["step"] for row in csv.DictReader(path.open())] == ["2"]
    log.close()
    give(CSVLogger(path, append=True), *steps(1, step=4))
    assert [row["step"] for row in csv.DictReader(path.open())] == ["2", "3", "3", "4", "4"]
    give(CSVLogger(path), *steps(1))
    assert [row["kind"] for row in csv.DictReader(path.open())] == ["train", "end"]


def test_tensorboard_chooses_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = TensorBoardLogger(project="p", experiment_name="e", log_interval=2)
    give(log, *steps(4))
    assert log.directory == Path("logs/p/e")
    assert [s.value for s in EventAccumulator(str(log.directory)).Reload().Scalars("loss")] == [1.0, 1.0]


def test_console_tells_once_what_all_ranks_say_and_each_warning():
    out, what = io.StringIO(), "shares rank0 60 %, rank1 40 %: rank0 is 1.5 times as fast as rank1"
    both = [{"rank": n, "step": 8} for n in range(2)]
    warnings = [about | {"type": "warning", "what": f"clip {about['rank']} [x] left out"} for about in both]
    shares = [about | {"type": "shares", "what": what} for about in both]
    give(ConsoleLogger(stream=out), *(about | {"type": "resume"} for about in both), *warnings, *shares)
    said = ["goes on from step 8", "rank 0: clip 0 [x] left out", "rank 1: clip 1 [x] left out", f"step 8: {what}"]
    assert out.getvalue().splitlines()[1:5] == said and out.getvalue().count(what) == 1


def test_console_has_a_progress_bar_on_a_terminal():
    code = """
        import os, sys
        from exogym.logger import ConsoleLogger
        log = ConsoleLogger(log_interval=2)
        log({"type": "start", "rank": 0, "num_nodes": 1, "total_steps": 4})
        for n in range(1, 5):
            log({"type": "step", "rank": 0, "step": n, "loss": 1.0, "tokens": 4})
        log.close()
    """
    ours, theirs = pty.openpty()
    environment = {**PATH, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # Linux says so at the end
        pass
    assert process.wait() == 0
    os.close(ours)
    assert b"4/4" in shown and "━".encode() in shown
    assert b"step 2/4  epoch 1  loss 1.0000 (perplexity 2.718)" in shown and b"end at step 4/4" in shown


def test_a_logger_is_for_one_run_and_its_interval_can_be_set(tmp_path):
    log = CSVLogger(tmp_path / "run.csv")
    assert log.log_interval == 10
    log.log_interval = 1
    give(log, *steps(2))
    log.close()
    with (tmp_path / "run.csv").open() as file:
        assert [row["kind"] for row in csv.DictReader(file)] == ["train", "train", "end"]
    with pytest.raises(ExogymError, match="CSVLogger is closed: make a new one"):
        log(START)
    with pytest.raises(SettingError, match="log_interval"):
        log.log_interval = 0


def test_a_run_that_is_stopped_shows_its_last_steps(tmp_path):
    """The same records as a summary of the events gives."""
    events = []
    trainer, count = LocalTrainer(Line(), Points(64), Points(8)), iter(range(10**6))
    trainer.fit(
        strategy=DiLoCoStrategy(H=50, lr=0.01), max_steps=1000, batch_size=4, device="cpu",
        logger=events.append, should_stop=lambda: next(count) >= 12,
    )  # fmt: skip
    summary = Summary(5)
    records = [record for event in events for record in summary.take(event)] + summary.finish()
    assert [(record.kind, record.step) for record in records] == [
        *(("train", 5), ("train", 10), ("train", 13), ("end", 13)),
    ]
