"""The wizard answered from a file: what it writes, what it refuses, and whole runs from beginning to end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import cli_typer
from multimac.wizard.questions import KEYS
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.dataset import load_manifest

PROJECT = Path(__file__).parents[3]
CONFIG = f"""\
# Mine, with comments.
[DEFAULT]
seed = 7   ; lucky

[model:small]
base_model = {PROJECT}/bundled/model
"""


Wizard = Callable[..., tuple[int, str]]


@pytest.fixture
def wizard(monkeypatch, capsys) -> Wizard:
    """Its exit status and what it says, in the folder of a config.ini."""

    def run(folder: Path, answers: dict | str, *options: str) -> tuple[int, str]:
        path = folder.parent / "answers"
        path.write_text(answers if isinstance(answers, str) else json.dumps(answers))
        monkeypatch.chdir(folder)
        status = cli_typer.main(["wizard", "--answers", str(path), *options])
        return status, " ".join("".join(capsys.readouterr()).split())

    return run


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config.ini, and 24 clips in one manifest."""
    folder = tmp_path / "home"
    (folder / "clips").mkdir(parents=True)
    (folder / "config.ini").write_text(CONFIG)
    lines = (PROJECT / "bundled/data/train.csv").read_text().splitlines()[:25]
    (folder / "clips" / "all.csv").write_text("\n".join(lines).replace("train/", "") + "\n")
    for path in sorted((PROJECT / "bundled/data/train").iterdir())[:24]:
        shutil.copy(path, folder / "clips")
    return folder


def test_all_defaults_are_saved_as_a_profile_and_the_rest_stays(folder, tmp_path, wizard, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = files(folder)
    status, said = wizard(folder, {"start": "later", "learning_rate": "0,0005"})
    assert status == 0, said
    after = files(folder)
    text = after.pop("config.ini").decode()
    assert text.startswith(CONFIG)
    new = {f"clips/all-{kind}.csv" for kind in ("train", "validation", "test")}
    assert set(after) - set(before) == new
    assert all(after[name] == content for name, content in before.items() if name != "config.ini")
    profile = ConfigFile(folder / "config.ini").profile("clips-lora")
    assert profile.train == folder / "clips/all-train.csv"
    assert (profile.method, profile.epochs, profile.seed) == ("lora", 5, 7)
    assert profile.learning_rate == 5e-4  # a decimal comma is a point
    parts = [load_manifest(folder / name).samples for name in sorted(new)]
    assert sorted(sample.id for part in parts for sample in part) == [f"train-{n:03}" for n in range(24)]
    assert "multimac finetune clips-lora" in said
    assert not list(temporary.iterdir())  # the scratch folder is gone


@pytest.mark.parametrize(
    ("clips", "answers", "kept"),
    [
        (24, {}, ("", 0)),  # 2 clips for validation
        (24, {"keep_best": "yes"}, ("loss", 3)),
        (240, {}, ("loss", 3)),
        (240, {"keep_best": "no"}, ("", 0)),
        (240, {"epochs": 1, "keep_best": "yes"}, ("", 0)),
    ],
)
def test_the_best_epoch_is_offered_where_validation_can_tell_it(folder, wizard, clips, answers, kept):
    data = folder / "clips/all.csv" if clips == 24 else PROJECT / "bundled/data/train.csv"
    status, said = wizard(folder, {"start": "later", "name": "mine", "data": str(data)} | answers)
    assert status == 0, said
    profile = ConfigFile(folder / "config.ini").profile("mine")
    assert (profile.keep_best, profile.early_stopping) == kept


@pytest.mark.parametrize("own", ["false", "true"])
def test_what_a_profile_of_the_same_has_chosen_is_suggested(folder, wizard, own):
    with (folder / "config.ini").open("a") as file:
        file.write(f"[dataset:d]\ntrain = {PROJECT}/bundled/data/train.csv\ntest = {PROJECT}/bundled/data/test.csv\n")
        file.write(f"validation = {PROJECT}/bundled/data/validation.csv\n")
        file.write(f"[profile:own]\nmodel = small\ndataset = d\nmethod = full\nepochs = 7\nkeep_best = {own}\n")
    status, said = wizard(folder, {"start": "later", "name": "mine", "model": "small", "data": "d", "method": "full"})
    assert status == 0, said
    profile = ConfigFile(folder / "config.ini").profile("mine")
    assert (profile.epochs, profile.keep_best) == (7, "loss" if own == "true" else "")


def test_saved_answers_give_the_same_again(folder, tmp_path, wizard):
    copy = shutil.copytree(folder, tmp_path / "copy")
    status, said = wizard(folder, {"start": "later", "epochs": 3}, "--save-answers", str(tmp_path / "a.ini"))
    assert status == 0, said
    answers = (tmp_path / "a.ini").read_text()
    assert "epochs = 3" in answers
    status, said = wizard(copy, answers.replace(str(folder), str(copy)))
    assert status == 0, said
    assert files(copy) == files(folder)


def test_a_test_set_that_all_profiles_share_is_used(folder, wizard):
    text = CONFIG.replace("[DEFAULT]\n", "[DEFAULT]\ntest = clips/all.csv\n")
    (folder / "config.ini").write_text(text)
    status, said = wizard(folder, {"start": "later", "split": "no", "name": "mine"})
    assert status == 0, said
    assert ConfigFile(folder / "config.ini").profile("mine").test == folder / "clips/all.csv"


def test_a_section_is_replaced_only_when_told_to(folder, wizard):
    wizard(folder, {"start": "later", "name": "mine"})
    with (folder / "config.ini").open("a") as file:
        file.write("\n# after\n[model:other]\nbase_model = openai/whisper-tiny\n")
    before = files(folder)
    answers = {"start": "later", "name": "mine", "epochs": 9, "data": "mine"}
    status, said = wizard(folder, answers)
    assert status == 3 and "[profile:mine] would be replaced" in said
    assert files(folder) == before
    status, said = wizard(folder, answers | {"overwrite": "yes"})
    assert status == 0, said
    text = (folder / "config.ini").read_text()
    assert text == before["config.ini"].decode().replace("epochs = 5", "epochs = 9")


@pytest.mark.parametrize(
    ("answers", "status", "words"),
    [
        ({"epochs": 0}, 3, "epochs = 0: expected a number at least 1"),
        ({"learning_rate": "0"}, 3, "learning_rate = 0"),
        ({"learning_rate": "5"}, 3, "learning_rate = 5: above 0.1 a model forgets all it knows"),
        ({"batch_size": "4000"}, 3, "batch_size = 4000: a step cannot have more clips than the training set"),
        ({"model": "nobody"}, 3, "model = nobody: no such folder"),
        ({"model": "."}, 3, "holds no Whisper model"),
        ({"data": "lists/broken.csv"}, 4, "no usable row"),
        ({"data": "a" * 300}, 3, "File name too long"),
        ({"name": "a b"}, 3, "name = a b"),
        ({"strategy": "diloco"}, 3, "strategy was answered, but"),
        ({"where": "hosts"}, 3, "where = hosts: expected one of alone, new"),
        ({"where": "new"}, 3, "workers is missing"),
        ({"where": "new", "workers": "user@there"}, 3, "workers = user@there"),
        ({"where": "new", "workers": "127.0.0.2", "ssh_key_path": "no.key"}, 3, "ssh_key_path = no.key"),
        ({"model": "openai/whisper-tiny", "language": "klingon"}, 3, "unknown language 'klingon'"),
        ({"model": "openai/whisper-tiny"}, 3, "language is missing, and it has no default"),
        ("[answer]\nepochs = 3\n", 3, "expected one section [answers]"),
        ({"epochs": None}, 3, "epochs: expected a text or a number"),
    ],
)
def test_an_impossible_answer_names_its_key_and_nothing_is_written(folder, wizard, answers, status, words):
    (folder / "lists").mkdir()
    (folder / "lists/broken.csv").write_text("audio,words\n")
    before = files(folder)
    ended, said = wizard(folder, answers)
    assert ended == status and words in said
    assert files(folder) == before


@pytest.mark.slow
def test_a_run_with_a_host_is_measured_first(folder, ssh_server):
    """The host is this machine, reached through a real sshd."""
    hosts = json.dumps({"master": "localhost", "workers": [ssh_server.worker]})
    (folder / "distributed_hosts.json").write_text(hosts)
    answers = {"epochs": 1, "split": "no", "strategy": "diloco", "communication_interval": 2, "together": "yes"}
    (folder.parent / "answers").write_text(json.dumps({**answers, "where": "hosts", "name": "both"}))
    command = [sys.executable, str(PROJECT / "wizard.py"), "--answers", str(folder.parent / "answers")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Estimated speed-up" in done.stdout, done.stdout + done.stderr
    job = ConfigFile(folder / "config.ini").section("distributed", "both-hosts").values
    assert job == {
        "base_profile": "both",
        "strategy": "diloco",
        "communication_interval": "2",
        "hosts_config": "distributed_hosts.json",
    }
    [run] = (folder / "runs").iterdir()
    assert (run / "final").is_dir()
    assert (folder / "distributed_hosts.json").read_text() == hosts
    assert not list((ssh_server.folder / "project" / "runs").glob("probe*"))


def test_every_key_is_in_the_documentation():
    text = (PROJECT / "docs" / "wizard.md").read_text()
    assert not [key for key in KEYS if f"`{key}`" not in text]


def test_a_model_that_is_not_at_hand_is_told_when_it_is_chosen(folder, wizard):
    """Tests are offline. The profile is saved: the model may be there when the training begins."""
    status, said = wizard(folder, {"model": "someone/whisper-nano", "language": "fr", "start": "later"})
    assert status == 0 and said.count("someone/whisper-nano is not on this disk, and HF_HUB_OFFLINE is set") == 1
    assert said.index("is not on this disk") < said.index("written: ")
