"""What decides, without the programs that start ranks, whether a launch fits Slurm and finds its run again."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed.launched import PLAN, LaunchedRun
from distributed.run_dir.folder import new_run, runs_named
from multimac.commands.engines import job_script
from whisper_tuner.errors import ExitStatus, RunError


def test_sbatch_reads_each_option_as_one_word(tmp_path, monkeypatch):
    folder = tmp_path / 'Ada\'s runs 50% "new"'
    folder.mkdir()
    monkeypatch.chdir(folder)
    script = job_script("it's mine", folder, 2, "", (), (), Path("config.ini"))
    words = [shlex.split(line) for line in script.splitlines() if line.startswith("#SBATCH")]
    options = dict(word.partition("=")[::2] for _, word in words)
    assert options["--chdir"] == os.fspath(folder)
    assert options["--output"] == str(folder).replace("%", "%%") + "/%x-%j.txt"
    assert options["--job-name"] == "it-s-mine"


def test_a_run_is_found_by_any_name_and_by_no_other(tmp_path):
    made = {}
    for name in ("mine-a b/*", "mine-1", "not-mine-1", "mine-12"):
        with new_run(tmp_path, name) as made[name]:
            (made[name] / "run.json").touch()
    for name, folder in made.items():
        assert runs_named(tmp_path, name) == [folder]


def test_a_rank_ends_with_the_status_of_rank_0_that_cannot_begin(monkeypatch):
    """Slurm goes by the highest: a job that no other start would mend is not to be requeued."""
    store = dist.HashStore()
    store.set(PLAN, json.dumps({"refused": "no such model", "status": ExitStatus.DATA}))
    with pytest.raises(RunError, match="no such model") as caught:
        LaunchedRun(job=None, known="")._follow(store)
    assert caught.value.exit_status == ExitStatus.DATA
