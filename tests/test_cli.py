"""The command line as a user calls it: messages and exit codes."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

import cli_typer

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
        (["finetune", "broken"], "data", "no such manifest"),
        (["distributed-train", "broken", "--hosts", "nobody.json"], "host", "127.0.0.1: port 9"),
        pytest.param(["evaluate", str(MODEL), "--data", "empty.csv"], "data", "empty.csv", marks=pytest.mark.slow),
        (["transcribe", "x.wav", "--model", "./no-model"], "config", "there is no folder ./no-model"),
        (["hosts", "sync", "broken", "--hosts", "away.json"], "config", "192.0.2.123 is not this machine"),
    ],
)
def test_a_mistake_gets_one_message_and_its_exit_code(tmp_path, monkeypatch, arguments, status, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.ini").write_text("[profile:broken]\nbase_model = a/b\ntrain = no.csv\n")
    nobody = {"master": "localhost", "workers": [{"host": "127.0.0.1", "ssh_port": 9}]}
    (tmp_path / "nobody.json").write_text(json.dumps(nobody))
    (tmp_path / "away.json").write_text(json.dumps({**nobody, "master": "192.0.2.123"}))
    (tmp_path / "empty.csv").write_text("")
    done = cli(*arguments)
    assert done.returncode == EXIT[status], done.stdout + done.stderr
    assert words.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr
    first = next(line for line in done.stderr.splitlines() if line.lower().startswith("error: "))
    assert first[-1] in ".:?"
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


def test_version():
    done = cli("--version")
    assert done.returncode == 0 and re.fullmatch(r"multimac \d+\.\d+\.\d+, Python 3\.\d+\.\S+\n", done.stdout)


def commands_below(group, *before: str) -> list[list[str]]:
    found = [[*before]]
    for name, command in getattr(group, "commands", {}).items():
        found += commands_below(command, *before, name)
    return found


@pytest.mark.parametrize("words", commands_below(typer.main.get_command(cli_typer.app)), ids=" ".join)
def test_every_command_knows_both_ways_to_ask_for_help(words, capsys):
    said = set()
    for option in ("-h", "--help"):
        assert cli_typer.main([*words, option]) == 0
        said.add(capsys.readouterr().out)
    [text] = said
    assert text.startswith(" ".join(["Usage: multimac", *words])) and "-h, --help" in text
    assert "..." not in text.partition("Commands:")[2]  # what they are for is not cut


def test_a_run_of_several_machines_is_resumed_on_all_of_them_and_help_says_so(capsys):
    assert cli_typer.main(["finetune", "--help"]) == 0
    assert "on the machines it ran on" in " ".join(capsys.readouterr().out.split())


def options_of(function: Callable) -> list[tuple]:
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return [(p.name, p.default, p.annotation.__origin__, vars(p.annotation.__metadata__[0])) for p in parameters]


def test_what_is_read_of_a_command_is_what_its_file_has():
    """Its name, its signature and its help are known without importing its file."""
    groups = [cli_typer.app, *cli_typer.GROUPS.values()]
    heads = [command.callback.__wrapped__ for group in groups for command in group.registered_commands]
    for head in heads:
        whole = getattr(importlib.import_module(head.__module__), head.__name__)
        assert options_of(head) == options_of(whole) and head.__doc__ == whole.__doc__
    marks = [path.read_text().count("\n@command(") for path in (PROJECT / "multimac").rglob("*.py")]
    assert len(heads) == sum(marks)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_is_installed_for_a_shell_completes_there(shell, tmp_path):
    """Zsh completes only on a terminal: there only what it is given is looked at."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "multimac").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{PROJECT}/cli_typer.py" "$@"\n')
    (folder / "multimac").chmod(0o755)
    env = os.environ | {"HOME": str(tmp_path), "PATH": f"{folder}:{os.environ['PATH']}", "SHELL": shell}
    env |= {"XDG_CONFIG_HOME": str(tmp_path / ".config"), "XDG_DATA_HOME": str(tmp_path / ".local")}

    def asked(command: str, **more: str) -> str:
        line = [shell, "-c", f"{command}; true"]  # so that it does not become the command itself
        done = subprocess.run(line, env=env | more, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return done.stdout + done.stderr

    assert f"{shell} completion installed" in asked("multimac --install-completion")
    complete = {
        "bash": "source .bashrc; COMP_WORDS=(multimac runs s); COMP_CWORD=2; "
        "_multimac_completion multimac; echo ${COMPREPLY[@]}",
        "zsh": "source .zfunc/_multimac 2> .errors; multimac",
        "fish": "complete -C 'multimac runs s'",
    }
    zsh = {"_MULTIMAC_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "multimac runs s"}
    said = asked(complete[shell], **(zsh if shell == "zsh" else {}))
    assert "show" in said and "stop" in said and "compare" not in said


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
