"""The command line as a user calls it: messages and exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
MODEL = PROJECT / "bundled" / "model"
EXIT = {"usage": 2, "config": 3, "data": 4, "host": 5}


def cli(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROJECT / "cli_typer.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["finetun"], "usage", "finetun"),
        (["finetune"], "usage", "name a profile"),
        (["finetune", "mine"], "config", "neither a [distributed:mine] nor a [profile:mine]"),
        (["finetune", "mine", "--config", "no.ini"], "config", "--config"),
        (["finetune", "broken"], "data", "no such manifest"),
        (["distributed-train", "broken"], "config", "--hosts"),
        (["distributed-train", "broken", "--hosts", "no.json"], "config", "there is no such hosts file"),
        (["distributed-train", "broken", "--hosts", "bad.json"], "config", "did you mean"),
        (["distributed-train", "broken", "--hosts", "nobody.json"], "host", "127.0.0.1: port 9"),
        (["evaluate", "x"], "config", "there is no run 'x'"),
        (["evaluate", str(MODEL)], "config", "--data"),
        (["evaluate", str(MODEL), "--data", "empty.csv"], "data", "empty.csv"),
        (["evaluate", "./no-model"], "config", "there is no folder ./no-model"),
        (["transcribe", "x.wav", "--model", "./no-model"], "config", "there is no folder ./no-model"),
        (["export", "./no-model", "--to", "mlx"], "config", "there is no folder ./no-model"),
        (["hosts", "check", "--hosts", "no.json"], "config", "there is no such hosts file"),
        (["hosts", "sync", "broken", "--hosts", "away.json"], "config", "192.0.2.123 is not this machine"),
    ],
)
def test_a_mistake_gets_one_message_and_its_exit_code(tmp_path, monkeypatch, arguments, status, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.ini").write_text("[profile:broken]\nbase_model = a/b\ntrain = no.csv\n")
    (tmp_path / "bad.json").write_text('{"master": "127.0.0.1", "workers": [], "ssh_usr": "me"}')
    nobody = {"master": "localhost", "workers": [{"host": "127.0.0.1", "ssh_port": 9}]}
    (tmp_path / "nobody.json").write_text(json.dumps(nobody))
    (tmp_path / "away.json").write_text(json.dumps({**nobody, "master": "192.0.2.123"}))
    (tmp_path / "empty.csv").write_text("")
    done = cli(*arguments)
    assert done.returncode == EXIT[status], done.stdout + done.stderr
    assert words.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


def test_the_hosts_file_beside_config_ini_is_used_where_none_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "config.ini").write_text("[profile:mine]\nbase_model = a/b\ntrain = no.csv\n")
    hosts = {"master": "localhost", "workers": [{"host": "127.0.0.1", "ssh_port": 9}]}
    (folder / "distributed_hosts.json").write_text(json.dumps(hosts))
    done = cli("distributed-train", "mine", "--config", "elsewhere/config.ini")
    assert done.returncode == EXIT["host"] and "127.0.0.1: port 9" in done.stderr
    assert done.stdout.startswith("hosts file: elsewhere/distributed_hosts.json\nlooking at localhost, 127.0.0.1\n")


def test_version_and_short_help():
    done = cli("--version")
    assert done.returncode == 0 and re.fullmatch(r"multimac \d+\.\d+\.\d+, Python 3\.\d+\.\S+\n", done.stdout)
    for arguments in (["-h"], ["runs", "-h"], ["export", "-h"], ["runs", "show", "-h"]):
        done = cli(*arguments)
        assert done.returncode == 0 and "-h, --help" in done.stdout, arguments


def test_a_shell_completes_commands():
    env = {**os.environ, "_MULTIMAC_COMPLETE": "complete_bash", "COMP_WORDS": "multimac ev", "COMP_CWORD": "1"}
    done = subprocess.run(
        [Path(sys.executable).parent / "multimac"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["evaluate"]


@pytest.mark.parametrize("script", ["cli_typer.py", "wizard.py"])
def test_without_its_environment_it_says_what_to_do(script):
    """-S: without site-packages, as a Python that `make setup` has not prepared."""
    done = subprocess.run([sys.executable, "-S", str(PROJECT / script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "make setup" in done.stderr and "Traceback" not in done.stderr
