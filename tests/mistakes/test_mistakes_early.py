"""What is wrong with a call is said before anything heavy is loaded, with what was probably meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from mistake_desk import PROJECT, Desk

# Runs each command, and tells its exit status, what it said, and what it loaded.
WATCH = """
import contextlib, io, json, shlex, sys
import cli_typer
for command in sys.stdin.read().splitlines():
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = int(cli_typer.main(shlex.split(command)))
    loaded = sorted({"torch", "transformers"} & sys.modules.keys())
    print(json.dumps({"status": status, "said": said.getvalue(), "loaded": loaded}), flush=True)
"""
NO_RUN = "there is no run 'nothing'"
NO_HOSTS = "nothere.json: there is no such hosts file"
UNKNOWN = ("unknown language 'germn', did you mean 'german'?", "French")
OFFLINE = "openai/whisper-smal is not on this disk, and HF_HUB_OFFLINE is set"
# command: exit status, and what is said
MISTAKES: dict[str, tuple[int, tuple[str, ...]]] = {
    "transcribe nothere.wav --model model": (4, ("no such audio file: nothere.wav.\n",)),
    "transcribe audio clips.cvs --model model": (4, ("no such audio file: clips.cvs, did you mean 'clips.csv'?",)),
    "transcribe audio --model model --format txt": (3, ("--format txt: no such format, did you mean 'text'?",)),
    "transcribe audio --model model --language germn": (3, UNKNOWN),
    "transcribe audio --model modle": (3, ("no run 'modle', did you mean 'model'?", "a hub id such as")),
    "transcribe audio --model whisper-smal": (3, ("did you mean 'openai/whisper-small'?", "a hub id such as")),
    "transcribe audio --model openai/whisper-smal": (4, (OFFLINE, "did you mean 'openai/whisper-small'?")),
    "transcribe audio --model openai/whisper-small": (4, ("whisper-small is not on this disk", "Unset it")),
    "transcribe clips.csv --model model --format srt --out /proc/x": (3, ("/proc/x: No such file", "--out")),
    "evaluate nomodel --data x.csv": (3, ("there is no run 'nomodel'",)),
    "evaluate model --data x.csv": (4, ("no such manifest: x.csv",)),
    "evaluate model --data clips.csv --language germn": (3, UNKNOWN),
    "evaluate model --data clips.csv --audio-context ful": (3, ("did you mean 'full'?",)),
    "evaluate openai/whisper-smal --data clips.csv": (4, (OFFLINE,)),
    "export nothing --to onnx": (3, (NO_RUN,)),
    "export model --to onx": (3, ("--to onx: no such format, did you mean 'onnx'?",)),
    "export model --to onnx --language germn": (3, UNKNOWN),
    "export model --to onnx --verify --data x.csv": (4, ("no such manifest: x.csv",)),
    "finetune nosuch": (3, ("neither a [distributed:nosuch] nor a [profile:nosuch]",)),
    "finetune mien": (3, ("did you mean 'mine'?",)),
    "finetune mine --set nokey=1": (3, ("unknown key 'nokey'",)),
    "finetune mine --set batchsize=1": (3, ("did you mean 'batch_size'?",)),
    "finetune mine --set base_model=whisper-smal": (3, ("did you mean 'openai/whisper-small'?",)),
    "finetune mine --set base_model=openai/whisper-large-v4": (4, ("did you mean 'openai/whisper-large-v3'?",)),
    "finetune --resume nothing": (3, (NO_RUN,)),
    "data check nothere.csv": (4, ("no such manifest: nothere.csv",)),
    "data check clips.csv --language germn": (3, UNKNOWN),
    "data check clips.csv --model whisper-smal": (3, ("did you mean 'openai/whisper-small'?",)),
    "data check clips.csv --model openai/whisper-smal": (4, (OFFLINE,)),
    "data import nothere --out x": (4, ("nothere",)),
    "data import clips.csv --out x --language germn": (3, UNKNOWN),
    "report nothing": (3, (NO_RUN,)),
    "runs show nothing": (3, (NO_RUN,)),
    "runs attach nothing": (3, (NO_RUN,)),
    "runs clean nothing": (3, (NO_RUN,)),
    "distributed-train bothh": (3, ("did you mean 'both'?",)),
    "distributed-train both --hosts nothere.json": (3, (NO_HOSTS,)),
    "hosts check --hosts nothere.json": (3, (NO_HOSTS,)),
    "runs recover --hosts nothere.json": (3, (NO_HOSTS,)),
    "selftest --hosts nothere.json": (3, (NO_HOSTS,)),
    "config show mien": (3, ("did you mean 'mine'?",)),
    "doctor --profile mien": (3, ("did you mean 'mine'?",)),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, SimpleNamespace]:
    folder = tmp_path_factory.mktemp("early")
    desk = Desk(folder / "desk", None)  # type: ignore[arg-type]  # nothing is run in this process
    # Without a network, and with an empty cache: what the cache lacks would have to be fetched.
    env = os.environ | {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PROJECT)}
    command, asked = [sys.executable, "-c", WATCH], "\n".join(MISTAKES)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=desk.folder, env=env, timeout=120)
    answers = [SimpleNamespace(**json.loads(line)) for line in done.stdout.splitlines()]
    assert len(answers) == len(MISTAKES), done.stderr
    return dict(zip(MISTAKES, answers, strict=True))


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_told_before_torch_is_loaded(told, command):
    status, words = MISTAKES[command]
    answer = told[command]
    assert (answer.status, answer.loaded) == (status, []), answer.said
    assert [word for word in words if word not in answer.said] == [], answer.said
    assert answer.said.count("error: ") == 1 and "Traceback" not in answer.said
