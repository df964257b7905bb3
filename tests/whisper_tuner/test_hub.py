"""A base model by its hub id, from a hub on loopback. In processes of their own: this one was told to stay offline."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import Hub, hub
from safetensors.torch import load_file

PROJECT = Path(__file__).parents[2]
NAME = "someone/whisper-nano"
CONFIG = f"""\
[profile:mine]
base_model = {NAME}
train = {PROJECT}/bundled/data/validation.csv
max_steps = 1
batch_size = 2
num_threads = 1
device = cpu
"""


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(PROJECT / "bundled/model", folder)
    return folder


def fetch(found: Hub) -> subprocess.CompletedProcess:
    code = f"from whisper_tuner.hub import model_folder; print(model_folder({NAME!r}, show=True))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=found.env, cwd=PROJECT)


@pytest.mark.slow
def test_finetune_downloads_in_sight_and_only_once(model, tmp_path):
    (tmp_path / "config.ini").write_text(CONFIG)
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "finetune", "mine"]
    with hub(tmp_path / "home", NAME, model) as found:
        first = subprocess.run(command, capture_output=True, text=True, env=found.env, cwd=tmp_path, timeout=400)
        assert first.returncode == 0, first.stderr
        assert "Fetching" in first.stderr
        assert found.downloads().count("model.safetensors") == 1
        found.asked.clear()
        second = subprocess.run(command, capture_output=True, text=True, env=found.env, cwd=tmp_path, timeout=400)
        assert second.returncode == 0 and second.stderr == ""
        assert found.downloads() == []
    [*_, final] = sorted((tmp_path / "runs").glob("*/final"))
    assert load_file(final / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()


def test_a_model_that_is_not_on_the_disk_is_not_downloaded_to_listen_to_clips(model, tmp_path):
    def here(name: str) -> str:
        code = f"from whisper_tuner.hub import folder_here; print(folder_here({name!r}))"
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=found.env, cwd=PROJECT).stdout.strip()

    with hub(tmp_path / "home", NAME, model) as found:
        assert here(NAME) == "None" and found.asked == []
        assert here("someone/" + "a" * 200) == "None" and here(str(model)) == str(model)
        assert Path(fetch(found).stdout.strip()) == Path(here(NAME))


def test_the_second_copy_of_large_v3_is_left_where_it_is(model, tmp_path):
    (model / "model.fp32-00001-of-00002.safetensors").write_bytes(b"gigabytes")
    (model / "README.md").write_text("words")
    with hub(tmp_path / "home", NAME, model) as found:
        folder = Path(fetch(found).stdout.strip())
    assert {path.name for path in folder.iterdir()} == {path.name for path in (PROJECT / "bundled/model").iterdir()}


def test_older_weights_will_do(model, tmp_path):
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with hub(tmp_path / "home", NAME, model) as found:
        folder = Path(fetch(found).stdout.strip())
    assert (folder / "pytorch_model.bin").is_file() and (folder / "config.json").is_file()


def test_a_model_without_weights(model, tmp_path):
    (model / "model.safetensors").unlink()
    with hub(tmp_path / "home", NAME, model) as found:
        done = fetch(found)
    assert f"{NAME}: the hub has no weights for it" in done.stderr


def test_without_network_what_was_downloaded_is_enough(model, tmp_path):
    with hub(tmp_path / "home", NAME, model) as found:
        folder = fetch(found).stdout
    assert Path(folder.strip(), "model.safetensors").is_file()
    assert fetch(found).stdout == folder
