"""What the benchmark of options trains, does again, and makes of the runs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
import soundfile

from benchmarks.regularisation import NONE, OPTIONS, PROJECT, SETTINGS, Bench, Result, losses
from whisper_tuner.config import ConfigFile

MODEL = PROJECT / "bundled" / "model"


@pytest.fixture
def data(tmp_path):
    for kind in ("train", "validation", "test"):
        soundfile.write(tmp_path / f"{kind}.wav", [0.0, 0.1] * 8000, 16_000)
        (tmp_path / f"{kind}.csv").write_text(f"audio_path,transcription\n{kind}.wav,{kind}\n")
    return tmp_path


@pytest.fixture
def bench_of(data):
    return lambda options=tuple(OPTIONS): Bench(MODEL, data, options, 2, data / "out", quick=False)


def test_each_profile_differs_from_none_by_its_option_alone(bench_of, tmp_path):
    bench, profiles = bench_of(), {}
    for task in bench.tasks:
        (tmp_path / "config.ini").write_text(bench.config(task))
        profiles[task.option, task.seed] = ConfigFile(tmp_path / "config.ini").profile("mine")
    for (option, seed), profile in profiles.items():
        assert profile == replace(profiles[NONE, seed], **OPTIONS[option])
        assert profile.seed == seed and profile.epochs == SETTINGS["epochs"]
    unseen = list(csv.DictReader((bench.data / "unseen.csv").open()))
    assert [row["transcription"] for row in unseen] == ["validation", "test"]
    assert all(soundfile.info(bench.data / row["audio_path"]).frames for row in unseen)


def test_what_is_done_is_not_done_again_and_what_failed_is(bench_of, monkeypatch):
    asked, failing = [], ["speed"]

    def train(self, task, folder):
        asked.append((task.option, task.seed))
        failed = task.option in failing and not failing.remove(task.option)
        wer = None if failed else 40.0 + task.seed - 2 * (task.option == "speed")
        about = {"seconds": 9.0, "commit": "abc", "status": int(failed)}
        return Result(task=task, wer=wer, train_loss=1.5, validation_loss=None, **about)

    monkeypatch.setattr(Bench, "train", train)
    bench_of((NONE, "speed")).run(3)
    assert asked == [(NONE, 0), ("speed", 0), (NONE, 1)]
    bench = bench_of((NONE, "speed"))
    assert "- speed, seed 0: the run failed, status 1" in bench.report()
    bench.run(9)
    assert asked[3:] == [("speed", 0), ("speed", 1)]
    lines = bench_of((NONE, "speed")).report()
    assert lines[-1] == "No misses."
    assert "| none |  | 40.0, 41.0 | 40.5 |  | 1.500 ?, 1.500 ? |" in lines
    assert "| speed | speed_perturbation = 0.1 | 38.0, 39.0 | 38.5 | -2.0 | 1.500 ?, 1.500 ? |" in lines


def test_losses_are_those_of_the_last_epoch(tmp_path):
    events = [{"type": "step", "epoch": epoch, "loss": loss} for epoch, loss in ((0, 9.0), (1, 2.0), (1, 4.0))]
    events += [{"type": "validation", "loss": loss} for loss in (8.0, 7.0)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert losses(tmp_path / "events.jsonl") == (3.0, 7.0)
