"""Manifests, audio, and the folder that a run is written to: nothing is trained, and no run folder stays."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mistake_desk import Desk

HEADER = "id,audio_path,transcription,duration_s\n"
GOOD = "a,audio/000.ogg,Remove the butter.,2.073\n"
FIRST = "audio/000.ogg"
REFUSE = "bad_rows = refuse"
TRAIN = "finetune mine"


def manifest(text: str | bytes, setting: str = ""):
    def make(desk: Desk) -> None:
        desk.write("clips.csv", text)
        desk.change("config.ini", "max_steps = 2\n", f"max_steps = 2\n{setting}\n")

    return make


def without_manifest(desk: Desk) -> None:
    (desk.folder / "clips.csv").unlink()


def folder_for_manifest(desk: Desk) -> None:
    without_manifest(desk)
    (desk.folder / "clips.csv").mkdir()


def all_audio_missing(desk: Desk) -> None:
    shutil.rmtree(desk.folder / "audio")


def all_audio_damaged(desk: Desk) -> None:
    for path in (desk.folder / "audio").iterdir():
        path.write_bytes(b"no sound at all" * 100)


def audio_cut_short(desk: Desk) -> None:
    manifest(HEADER + GOOD, REFUSE)(desk)
    desk.write(FIRST, (desk.folder / FIRST).read_bytes()[:2000])


def audio_is_a_folder(desk: Desk) -> None:
    manifest(HEADER + GOOD, REFUSE)(desk)
    (desk.folder / FIRST).unlink()
    (desk.folder / FIRST).mkdir()


def bad_validation(desk: Desk) -> None:
    desk.change("config.ini", "train = clips.csv\n", "train = clips.csv\nvalidation = valid.csv\n")


def runs_dir_is_a_file(desk: Desk) -> None:
    desk.change("config.ini", "max_steps = 2\n", "max_steps = 2\nruns_dir = clips.csv\n")


def names_too_long(key: str):
    def make(desk: Desk) -> None:
        desk.change("config.ini", "max_steps = 2\n", f"max_steps = 2\n{key} = {300 * 'x'}\n")

    return make


# name: (what is wrong; command; exit status; the message names; the remedy says)
MISTAKES = {
    "the manifest is missing": (without_manifest, TRAIN, 4, "no such manifest: {desk}/clips.csv", "config.ini"),
    "the validation set is missing": (bad_validation, TRAIN, 4, "no such manifest: {desk}/valid.csv", "config.ini"),
    "a folder for a manifest": (folder_for_manifest, TRAIN, 4, "{desk}/clips.csv is a folder", "another folder"),
    "a header alone": (manifest(HEADER), TRAIN, 4, "clips.csv: no usable row", "It has no rows"),
    "no audio column": (manifest("id,file,text\n"), TRAIN, 4, "no audio column; found: id, file, text", "audio_path"),
    "one line that is not UTF-8": (
        manifest(f"{HEADER}a,x.wav,d\xe9j\xe0,1\n".encode() + b"b,y.wav,caf\xe9,1\n"),
        TRAIN,
        4,
        "line 3), though other lines are",
        "encoding = NAME",
    ),
    "no row can be used": (all_audio_missing, TRAIN, 4, "clips.csv: no usable row", ("4 rows left out", "line 2")),
    "one bad row, and bad_rows = refuse": (
        manifest(HEADER + GOOD + "b,audio/none.ogg,Nothing.,1\n", REFUSE),
        TRAIN,
        4,
        ("1 row cannot be used", "clips.csv line 3", "audio/none.ogg"),
        ("Fix or remove", "bad_rows = skip"),
    ),
    "audio that is no audio": (all_audio_damaged, TRAIN, 4, "clips.csv: no usable row", ("line 2", "000.ogg")),
    "audio cut short": (audio_cut_short, TRAIN, 4, ("clips.csv line 2", "000.ogg"), "bad_rows = skip"),
    "a folder for audio": (audio_is_a_folder, TRAIN, 4, ("clips.csv line 2", "000.ogg"), "bad_rows = skip"),
    "an empty text": (
        manifest(HEADER + GOOD + "b,audio/001.ogg,,2.4\n", REFUSE),
        TRAIN,
        4,
        "clips.csv line 3: empty text",
        "bad_rows = skip",
    ),
    "timestamps of a model that has none": (
        manifest(HEADER + GOOD, "timestamps_share = 0.5"),
        TRAIN,
        3,
        ("timestamps_share = 0.5", "has no timestamp tokens"),
        "Set timestamps_share = 0",
    ),
    "runs_dir is a file": (runs_dir_is_a_file, TRAIN, 6, ("{desk}/clips.csv", "Not a directory"), "runs_dir"),
    "a name of runs_dir that no disk takes": (names_too_long("runs_dir"), TRAIN, 6, "File name too long", "runs_dir"),
    "a name of a manifest that no disk takes": (names_too_long("test"), TRAIN, 4, "File name too long", "config.ini"),
    "a test set that is none": (
        lambda desk: desk.write("words.csv", "words\n"),
        "evaluate model --data words.csv",
        4,
        "words.csv has no audio column",
        "audio_path",
    ),
    "a recording that is not there": (
        None,
        "transcribe none.wav --model model",
        4,
        "no such audio file: none.wav",
        "Check its path",
    ),
    "a folder without recordings": (
        lambda desk: (desk.folder / "empty").mkdir(),
        "transcribe empty --model model",
        4,
        "no audio below empty",
        "Name a file",
    ),
    "a form of text that there is not": (
        None,
        "transcribe audio --model model --format str",
        3,
        "--format str: no such format, did you mean 'srt'?",
        "Known: text",
    ),
    "an --out that is a file": (
        None,
        "transcribe audio --model model --out clips.csv --format srt",
        3,
        "clips.csv: Not a directory",
        "Choose another folder with --out",
    ),
}


@pytest.mark.parametrize(("make", "command", "status", "place", "remedy"), MISTAKES.values(), ids=MISTAKES.keys())
def test_data(desk, make, command, status, place, remedy):
    if make:
        make(desk)
    desk.refuses(command, status, place, remedy)


def closed(name: str):
    def make(desk: Desk) -> None:
        (desk.folder / name).chmod(0)

    return make


def closed_audio(desk: Desk) -> None:
    manifest(HEADER + GOOD, REFUSE)(desk)
    (desk.folder / FIRST).chmod(0)


def closed_runs(desk: Desk) -> None:
    (desk.folder / "runs").mkdir(mode=0o555)


# name: (what may not be done; exit status; the message names; the remedy says)
PERMISSIONS = {
    "config.ini may not be read": (closed("config.ini"), 3, "config.ini: Permission denied", "that you may read"),
    "the manifest may not be read": (closed("clips.csv"), 4, "clips.csv cannot be read", "permissions"),
    "audio may not be read": (closed_audio, 4, ("clips.csv line 2", "000.ogg", "ermission denied"), "bad_rows = skip"),
    "the model may not be read": (closed("model/config.json"), 4, ("model/config.json", "Permission"), "permissions"),
    "the model's weights may not be read": (
        closed("model/model.safetensors"),
        4,
        ("model/model.safetensors", "Permission"),
        "permissions",
    ),
    "the model's folder may not be entered": (closed("model"), 4, ("{desk}/model", "Permission"), "permissions"),
    "nothing may be written into runs": (closed_runs, 6, ("{desk}/runs", "Permission denied"), "runs_dir"),
}


@pytest.mark.parametrize(("make", "status", "place", "remedy"), PERMISSIONS.values(), ids=PERMISSIONS.keys())
def test_permissions(desk, make, status, place, remedy):
    desk.permissions = True
    make(desk)
    desk.refuses(TRAIN, status, place, remedy)


@pytest.fixture
def full_disk(desk) -> Iterator[Path]:
    """`runs` is a disk of its own that is full."""
    folder = desk.folder / "runs"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small disk is mounted by root on Linux")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    try:
        with contextlib.suppress(OSError):
            (folder / "full").write_bytes(bytes(1 << 20))
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_the_disk_is_full(desk, full_disk):
    desk.refuses(TRAIN, 6, (str(full_disk), "No space left on device"), ("Free some space", "runs_dir"))
