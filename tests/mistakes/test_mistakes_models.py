"""Base models and what is asked of them: found before anything is trained, without loading torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from fake_hub import hub
from mistake_desk import PROJECT, Desk

CLI = PROJECT / "cli_typer.py"
TRAIN = "finetune mine"
NO_GPU = "cuda" if sys.platform == "darwin" else "mps"


def setting(line: str):
    def make(desk: Desk) -> None:
        desk.change("config.ini", "max_steps = 2\n", f"max_steps = 2\n{line}\n")

    return make


def base_model(name: str):
    def make(desk: Desk) -> None:
        desk.change("config.ini", "base_model = model", f"base_model = {name}")

    return make


def gone(name: str):
    def make(desk: Desk) -> None:
        (desk.folder / "model" / name).unlink()

    return make


def adapter(text: str, folder: str = "adapter"):
    def make(desk: Desk) -> None:
        desk.write(f"{folder}/adapter_config.json", text)

    return make


def checkpoint(desk: Desk) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json"):
        target = desk.folder / "model/checkpoint-20" / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(desk.folder / "model" / name, target)


def of_another_kind(desk: Desk) -> None:
    desk.change("model/config.json", '"model_type": "whisper"', '"model_type": "wav2vec2"')


def damaged_settings(desk: Desk) -> None:
    desk.write("model/config.json", (desk.folder / "model/config.json").read_text()[:100])


def truncated_weights(desk: Desk) -> None:
    weights = desk.folder / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def a_part_is_missing(desk: Desk) -> None:
    (desk.folder / "model/model.safetensors").rename(desk.folder / "model/model-00001-of-00002.safetensors")
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    desk.write("model/model.safetensors.index.json", json.dumps({"weight_map": parts}))


def multilingual(line: str = ""):
    def make(desk: Desk) -> None:
        desk.change("model/generation_config.json", '"is_multilingual": false', '"is_multilingual": true')
        setting(line)(desk)

    return make


# name: (what is wrong; command; exit status; the message names; the remedy says)
MISTAKES = {
    "a folder that is not there": (
        base_model("./modle"),
        TRAIN,
        3,
        "config.ini:2 [profile:mine]: base_model = ./modle: no such folder",
        ("looked at {desk}/modle", "hub id"),
    ),
    "a misspelt folder is no hub id": (base_model("modle"), TRAIN, 3, "base_model = modle", "looked at {desk}/modle"),
    "a file for a folder": (base_model("clips.csv"), TRAIN, 3, "config.ini:2 [profile:mine]", "transformers layout"),
    "a folder of something else": (base_model("audio"), TRAIN, 4, "{desk}/audio has no config.json", "transformers"),
    "a model that is no Whisper": (
        of_another_kind,
        TRAIN,
        4,
        ("model does not load as a Whisper", "'wav2vec2'"),
        "openai/whisper",
    ),
    "damaged settings": (damaged_settings, TRAIN, 4, "model/config.json is damaged", "Copy the model again"),
    "no weights": (gone("model.safetensors"), TRAIN, 4, "{desk}/model has no model.safetensors", "Give a folder"),
    "truncated weights": (truncated_weights, TRAIN, 4, "model/model.safetensors is damaged", "Copy the model again"),
    "a part of the weights is missing": (a_part_is_missing, TRAIN, 4, "00002-of-00002", "Copy the model again"),
    "no tokenizer": (gone("tokenizer.json"), TRAIN, 4, "{desk}/model has no tokenizer.json", "it was trained from"),
    "a Trainer's checkpoint": (
        checkpoint,
        "evaluate model/checkpoint-20 --data clips.csv",
        4,
        "model/checkpoint-20 has no tokenizer.json",
        ("tokenizer*.json, vocab.json", "from model into this folder"),
    ),
    "train an adapter": (
        adapter("{}", "model"),
        TRAIN,
        4,
        "model is a LoRA adapter",
        ("Name its base model", "--to transformers"),
    ),
    "a LoRA target that there is not": (
        setting("method = lora\nlora_targets = q_proj, qproj"),
        TRAIN,
        3,
        ("lora_targets", "{desk}/model has no layer 'qproj', did you mean 'q_proj'?"),
        ("It has: ", "fc1", "v_proj"),
    ),
    "no language for a multilingual model": (multilingual(), TRAIN, 3, "is told it", ("language", "fr")),
    "an unknown language": (multilingual("language = klingon"), TRAIN, 3, "language 'klingon'", "fr-CA or French"),
    "a GPU that is not there": (setting(f"device = {NO_GPU}"), TRAIN, 3, f"device = {NO_GPU}", "auto or cpu"),
    "a model in the home of nobody": (
        base_model("~nobody-here/model"),
        TRAIN,
        3,
        "no such folder",
        "transformers layout",
    ),
    "evaluate into a file": (
        None,
        "evaluate model --data clips.csv --out clips.csv",
        3,
        "clips.csv/clips/",
        "another folder with --out",
    ),
    "evaluate an adapter that is a list": (
        adapter("[]"),
        "evaluate adapter --data clips.csv",
        4,
        "adapter/adapter_config.json is damaged: not a JSON object",
        "Copy the model again",
    ),
    "evaluate without data": (None, "evaluate model", 3, "nothing to evaluate on", ("--data", "test set")),
    "evaluate a model that is none": (
        None,
        "evaluate ./modle --data clips.csv",
        3,
        "there is no folder ./modle, did you mean 'model'?",
        "openai/whisper-small",
    ),
    "evaluate truncated weights": (
        truncated_weights,
        "evaluate model --data clips.csv",
        4,
        "model does not load as a Whisper model",
        "openai/whisper-small",
    ),
    "transcribe with a language that there is not": (
        None,
        "transcribe audio --model model --language klingon",
        3,
        "language 'klingon'",
        "such as fr, fr-CA or French",
    ),
    "transcribe with a model that is none": (
        None,
        "transcribe audio --model audio",
        3,
        "audio is no model's folder",
        "openai/whisper-small",
    ),
}


@pytest.mark.parametrize(("make", "command", "status", "place", "remedy"), MISTAKES.values(), ids=MISTAKES.keys())
def test_models(desk, make, command, status, place, remedy):
    if make:
        make(desk)
    desk.refuses(command, status, place, remedy)


@pytest.mark.parametrize(
    ("url", "message", "remedy"),
    [
        ("http://127.0.0.1:9", "cannot be fetched from the hub: [Errno", "Check the network"),
        ("http://hub.invalid", "cannot be fetched from the hub: [Errno", "a folder that holds the model"),
        ("", "the hub has no model of this name", "huggingface.co"),
    ],
    ids=["port closed", "name not known", "no such model"],
)
def test_the_hub(desk, url, message, remedy):
    """In a process of its own: this one was told to stay offline."""
    base_model("openai/whisper-tniy")(desk)
    before = desk.snapshot()
    with hub(desk.folder.parent / "hub") as empty:
        environment = {**empty.env, **({"HF_ENDPOINT": url} if url else {})}
        command = [sys.executable, str(CLI), *TRAIN.split()]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 4, done.stderr
    said, advice = done.stderr.splitlines()  # and nothing of the client's own tries
    assert "did you mean 'openai/whisper-tiny'?" in done.stderr
    assert said.startswith(f"error: openai/whisper-tniy: {message}") and remedy in advice
    assert desk.snapshot() == before
