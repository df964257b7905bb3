"""Every command that writes, where nothing can be written: one message, no traceback, nothing left.

All is said before torch is loaded, so that none of these takes longer than the check of its data.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mistake_desk import MESSAGE
from test_mistakes_runs import a_run

import cli_typer

WRITES = [
    "data import audiofolder --out {out}/new",
    "data check clips.csv --fix {out}/new",
    "data check clips.csv --out {out}/new",
    "export model --to transformers --out {out}/new",
    "transcribe audio/{clip} --model model --language en --out {out}/new",
    "transcribe audio/{clip} --model model --language en --format srt --out {out}/new",
    "evaluate model --data clips.csv --language en --out {out}/new",
    "selftest --out {out}/new.json",
    "finetune mine --set runs_dir={out}/new",
    "distributed-train both --hosts hosts.json --set runs_dir={out}/new",
    "report last --out {out}/new/report.html",
    "train clips.csv --model model --language en --config {out}/config.ini",
    "wizard --answers answers.json --config {out}/config.ini",
    "wizard --answers answers.json --save-answers {out}/new.json",
]
# Commands that write to no place that is named to them.
OTHERS = {
    "config show": "reads",
    "doctor": "reads",
    "runs attach": "reads",
    "runs compare": "reads",
    "runs list": "reads",
    "runs show": "reads",
    "runs stop": "reads",
    "runs clean": "removes: tests/multimac/commands/test_runs_command.py",
    "demo": "is finetune, in the project's folder",
    "runs recover": "writes into the project's folder: tests/multimac/commands/test_recover_command.py",
    "hosts check": "reads",
    "hosts find": "reads",
    "hosts pair": "asks in a terminal: tests/multimac/commands/test_pair_command.py",
    "hosts remove": "removes from hosts",
    "hosts setup": "writes on hosts: tests/distributed/hosts",
    "hosts yield": "writes into the run's folder: tests/multimac/commands",
    "submit": "writes a job's script where Slurm is: tests/integration/test_engines.py",
    "train-rank": "is finetune, started by another program",
    "watch": "reads; a button writes into the run's folder",
    "hosts sync": "writes on hosts: tests/distributed/hosts",
    "plan": "measures, as finetune prepares a run",
}
PLACES = {
    "full": "No space left on device",
    "read-only": "Read-only file system",
    "not mine": "Permission denied",
    "no disk": "No such file or directory",
}


@pytest.fixture
def place(request, desk) -> Iterator[Path]:
    """A folder in which nothing can be written, for the reason that the parameter names."""
    if request.param == "no disk":
        yield Path("/proc")  # macOS has none, and no folder can be made in / either
        return
    folder = desk.folder / "place"
    folder.mkdir()
    if request.param == "not mine":
        desk.permissions = True
        folder.chmod(0o500)
        yield folder
        return
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small disk is mounted by root on Linux")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    try:
        if request.param == "full":
            with contextlib.suppress(OSError):
                (folder / "fill").write_bytes(bytes(1 << 20))
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


CASES = [(command, place) for command in WRITES for place in PLACES]


@pytest.mark.parametrize(("command", "place"), CASES, ids=map(", ".join, CASES), indirect=["place"])
def test_a_command_that_cannot_write_says_where_and_why(desk, place, command, request):
    [clip, *_] = sorted((desk.folder / "audio").iterdir())
    (desk.folder / "audiofolder").mkdir()
    (desk.folder / "audiofolder" / "a.wav").write_bytes(clip.read_bytes())
    desk.write("audiofolder/a.txt", "one two three\n")
    desk.write("hosts.json", json.dumps({"master": "127.0.0.1", "workers": []}))
    answers = {"model": f"{desk.folder}/model", "data": "clips.csv", "split": "no", "start": "later"}
    desk.write("answers.json", json.dumps(answers))
    if command.startswith("report"):
        a_run(desk)
    why = PLACES[request.node.callspec.params["place"]]
    code, out, err = desk.run(command.format(out=place, clip=clip.name))
    assert code in (3, 4, 5, 6), out + err
    assert "Traceback" not in out + err
    assert len(re.findall(MESSAGE, err)) == 1 and str(place) in err and why in err, err
    assert len(err.rstrip().splitlines()) > 1, f"no remedy: {err}"
    assert place.name != "place" or not [path for path in place.rglob("*") if path.is_file() and path.name != "fill"]


def test_every_command_is_in_one_of_the_tables():
    groups = {"": cli_typer.app} | cli_typer.GROUPS
    known = {f"{group} {command.name}".strip() for group, app in groups.items() for command in app.registered_commands}
    written = {name for name in known for command in WRITES if command.startswith(f"{name} ")}
    assert written.isdisjoint(OTHERS) and written | OTHERS.keys() == known
