"""Every command that writes, where nothing can be written: one message, no traceback, nothing left."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mistake_desk import MESSAGE

WRITES = {
    "import": "data import audiofolder --out {out}/new",
    "check": "data check clips.csv --fix {out}/new",
    "export": "export model --to transformers --out {out}/new",
    "transcribe": "transcribe audio/{clip} --model model --language en --out {out}/new",
    "evaluate": "evaluate model --data clips.csv --language en --out {out}/new",
    "selftest": "selftest --out {out}/new.json",
    "finetune": "finetune mine --set runs_dir={out}/new",
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


# A full disk lets the self-test open its file, and it takes five minutes to write into it.
CASES = [(name, place) for name in WRITES for place in PLACES if (name, place) != ("selftest", "full")]


@pytest.mark.parametrize(("command", "place"), CASES, ids=map(", ".join, CASES), indirect=["place"])
def test_a_command_that_cannot_write_says_where_and_why(desk, place, command, request):
    [clip, *_] = sorted((desk.folder / "audio").iterdir())
    (desk.folder / "audiofolder").mkdir()
    (desk.folder / "audiofolder" / "a.wav").write_bytes(clip.read_bytes())
    desk.write("audiofolder/a.txt", "one two three\n")
    why = PLACES[request.node.callspec.params["place"]]
    code, out, err = desk.run(WRITES[command].format(out=place, clip=clip.name))
    assert code in (3, 4, 6), out + err
    assert "Traceback" not in out + err
    assert len(re.findall(MESSAGE, err)) == 1 and str(place) in err and why in err, err
    assert len(err.rstrip().splitlines()) > 1, f"no remedy: {err}"
    assert place.name != "place" or not [path for path in place.rglob("*") if path.is_file() and path.name != "fill"]
