import errno

from distributed.run_dir.log import EventLog, read_events


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
