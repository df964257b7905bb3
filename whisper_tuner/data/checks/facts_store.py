"""Facts of decoded clips, kept by path, size and modification time: what has not changed is never decoded twice."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import astuple, fields
from itertools import islice
from pathlib import Path

from whisper_tuner.data.checks.facts import Facts, measure
from whisper_tuner.files import private
from whisper_tuner.json_text import parse_json

FILE = "audio-facts.jsonl"  # below the project's cache
FORMAT = 1  # raise it when Facts change: lines of older versions are then ignored
AHEAD = 4  # clips for each thread that may be decoded at once: what waits holds memory
KEPT_EVERY = 500  # clips, so that a check that is stopped goes on where it was
_KINDS = tuple({"int": int, "float": (int, float), "str": str}[str(each.type)] for each in fields(Facts))

Told = Callable[[int, int], None]
"""Called with (clips done, clips in all)."""
_Key = tuple[int, int]  # size and ns of the last change


class FactsStore:
    """A line of JSON for each clip; of a clip with several lines, the last one counts. Damaged lines are skipped."""

    def __init__(self, file: Path):
        self._file = file

    def facts_of(self, paths: Iterable[Path], told: Told = lambda done, total: None) -> dict[Path, Facts]:
        """Of each file that is there, by all cores. On Ctrl-C what was measured by then is kept."""
        keys = {path: key for path in dict.fromkeys(paths) if (key := _key(path))}
        known = self._known({str(path) for path in keys})
        found = {path: known[str(path)][1] for path, key in keys.items() if known.get(str(path), (None,))[0] == key}
        todo = [path for path in keys if path not in found]
        fresh: dict[Path, Facts] = {}
        try:
            for path, facts in _measured(todo):
                fresh[path] = found[path] = facts
                told(len(found), len(keys))
                if len(fresh) == KEPT_EVERY:
                    self._keep(keys, fresh)
                    fresh = {}
        finally:
            self._keep(keys, fresh)
        told(len(found), len(keys))
        return found

    def _known(self, names: set[str]) -> dict[str, tuple[_Key, Facts]]:
        found = {}
        try:
            with self._file.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if (entry := _parsed(line)) and entry[0] in names:
                        found[entry[0]] = entry[1:]
        except OSError:
            return {}
        return found

    def _keep(self, keys: dict[Path, _Key], fresh: dict[Path, Facts]) -> None:
        """What could not be decoded is tried again next time: a program may be all that lacks."""
        sound = ((path, facts) for path, facts in fresh.items() if not facts.problem)
        text = "".join(json.dumps([FORMAT, str(path), *keys[path], *astuple(facts)]) + "\n" for path, facts in sound)
        with contextlib.suppress(OSError, UnicodeError):  # no permission, disk full: it is measured again next time
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._file, "a", encoding="utf-8", opener=private) as file:
                file.write(text)


def _key(path: Path) -> _Key | None:
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return None
    return stat.st_size, stat.st_mtime_ns


def _parsed(line: str) -> tuple[str, _Key, Facts] | None:
    try:
        version, name, size, changed, *values = parse_json(line)
    except (ValueError, TypeError):
        return None
    sound = len(values) == len(_KINDS) and all(map(isinstance, values, _KINDS))
    return (str(name), (size, changed), Facts(*values)) if version == FORMAT and sound else None


def _measured(paths: list[Path]) -> Iterator[tuple[Path, Facts]]:
    """In the order in which they are done, and never many more in memory than there are threads."""
    threads = os.cpu_count() or 1
    left, running = iter(paths), dict[Future[Facts], Path]()
    with ThreadPoolExecutor(threads, "facts") as pool:
        try:
            while True:
                for path in islice(left, AHEAD * threads - len(running)):
                    running[pool.submit(measure, path)] = path
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        finally:
            pool.shutdown(cancel_futures=True)
