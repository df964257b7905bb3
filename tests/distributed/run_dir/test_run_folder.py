import errno
import shutil
from pathlib import Path

from distributed.run_dir.folder import disk_use
from distributed.run_dir.log import EventLog, read_events


def test_a_folder_that_vanishes_while_a_run_is_measured_counts_no_more(tmp_path, monkeypatch):
    """As checkpoints do while the run goes on."""
    (tmp_path / "checkpoints" / "0000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "0000002" / "state").write_bytes(bytes(50))
    (tmp_path / "run.json").write_bytes(bytes(7))
    assert disk_use(tmp_path)[0] == 57
    lstat = Path.lstat

    def removing(path: Path):
        if path.name == "0000002":
            shutil.rmtree(path.parent)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", removing)
    assert disk_use(tmp_path)[0] == 7


def test_events_wait_while_the_disk_is_full(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log({"type": "a"})
    whole, log._file = log._file, FullDisk(log._file, room=10)
    log({"type": "b"})
    log({"type": "c"})
    log._file = whole
    log({"type": "d"})
    assert [event["type"] for event in read_events(tmp_path / "events.jsonl")[0]] == ["a", "b", "c", "d"]


class FullDisk:
    """Takes a few bytes, and then no more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken, self.room = self.file.write(data[: self.room]), 0
        return taken
