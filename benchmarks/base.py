"""What benchmarks share: a config.ini, a list of what is done, runs on this machine, a meter, and RESULTS.md."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from lab.machine import lacking

PROJECT = Path(__file__).resolve().parent.parent
BUNDLED_MODEL, BUNDLED_DATA = PROJECT / "bundled" / "model", PROJECT / "bundled" / "data"
RESULTS = Path(__file__).with_name("RESULTS.md")
HEAD = """# Results

Written by the scripts in this folder; misses stand here too. For each claim the newest table; older ones, and those of
scripts that are gone, are in commit 861c5ad.
"""
START = """
import sys
from pathlib import Path
sys.path[:0] = [".", "gym", "tests"]
from distributed.hosts.keep_awake import awake
from multimac.commands.train import train_here
with awake():
    sys.exit(train_here(Path(sys.argv[1]), sys.argv[2], ranks=int(sys.argv[3])))
"""


class RunFailed(Exception):
    """A run ended with an error; the message says what it said last."""


def parser_of(doc: str, name: str, quick: str, *, more: bool = True) -> argparse.ArgumentParser:
    """Make a parser with the options that all benchmarks have; `quick` says what --quick does. more: can do a part."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    kept = Path.home() / ".cache" / "multimac" / f"bench-{name}"
    parser.add_argument("--out", type=Path, default=kept, metavar="DIR", help="where what is done is kept")
    if more:
        parser.add_argument("--more", type=int, metavar="N", help="do no more than N runs now")
    parser.add_argument("--quick", action="store_true", help=f"{quick}; leaves RESULTS.md alone")
    return parser


def names(text: str) -> list[str]:
    """Read an option that is a list: names with commas between them."""
    return text.split(",")


def a_way(text: str) -> tuple[str, dict[str, str]]:
    """Read 'NAME KEY=VALUE ...': other settings to compare with the defaults."""
    name, *settings = text.split()
    if not all("=" in each for each in settings):
        raise argparse.ArgumentTypeError(f"{text!r}: a name, and KEY=VALUE for each setting")
    return name, dict(each.split("=", 1) for each in settings)


# What is done.


class Done:
    """Keep the result of each task in a file as soon as it is there, so that an interrupted benchmark goes on.

    Tasks are texts or frozen dataclasses: `repr(task)` holds all that its result depends on, `str(task)` is for people.
    Results are what JSON can hold. A task that failed is told of, and done again by the next call.
    """

    def __init__(self, folder: Path, name: str = "results.jsonl"):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / name
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        self.results: dict[str, dict] = {record["task"]: record for record in map(json.loads, lines)}
        self.failed: dict[str, str] = {}

    def __contains__(self, task: object) -> bool:
        return repr(task) in self.results

    def __getitem__(self, task: object) -> dict:
        return self.results[repr(task)]

    def left(self, tasks: Iterable) -> list:
        return [task for task in tasks if task not in self]

    def found(self, tasks: Iterable) -> list[tuple]:
        """Return (task, result) of those that are done."""
        return [(task, self[task]) for task in tasks if task in self]

    def commits(self, tasks: Iterable) -> list[str]:
        return [result["commit"] for _, result in self.found(tasks)]

    def keep(self, task: object, result: dict, commit: str) -> None:
        self.results[repr(task)] = record = {"task": repr(task), "commit": commit, **result}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def run(self, tasks: Sequence, work: Callable[[object], dict], most: int | None = None) -> None:
        """Do what is left of the tasks, `most` of them at most. Where `work` raises an error, go on with the next."""
        for task in self.left(tasks)[:most]:
            print(f"{task}: begun", flush=True)
            commit, began = current_commit(), time.monotonic()
            try:
                result = work(task)
            except Exception as error:  # hours of other tasks may be left
                told = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
                self.failed[str(task)] = told.strip().rpartition("\n")[2]
                print(f"{task}: failed: {told}", flush=True)
                continue
            self.keep(task, result, commit)
            left = len(self.left(tasks))
            print(f"{task}: {result.get('told', 'done')}, {time.monotonic() - began:.0f} s; {left} left", flush=True)

    def listed(self, tasks: Iterable, misses: Iterable[str]) -> list[str]:
        """List the misses, with the tasks that failed now; or say that there are none, and how many are left to do."""
        misses = [*(f"{task}: the run failed: {why}" for task, why in self.failed.items()), *misses]
        return listed(misses, len(self.left(tasks)))


# Runs on this machine.


def config_text(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Write a config.ini of these sections; a setting that is None is left out."""
    lines = []
    for name, settings in sections.items():
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in settings.items() if value is not None)]
    return "\n".join([*lines, ""])


def profile_of(model: Path, data: Path, **settings: object) -> dict[str, object]:
    """Make a profile that trains `model` on a folder of lists, without a test set; `settings` may say otherwise."""
    lists = {"train": data / "train.csv", "validation": data / "validation.csv", "test": ""}
    return {"base_model": model, **lists, **settings}


def start_finetune(
    folder: Path, sections: Mapping[str, Mapping[str, object]], name: str, ranks: int = 1
) -> subprocess.Popen:
    """Start `finetune` of profile or distribution `name` in a new `folder`, whose console.txt gets what it prints."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.ini").write_text(config_text(sections), encoding="utf-8")
    command = [sys.executable, "-c", START, str(folder / "config.ini"), name, str(ranks)]
    with (folder / "console.txt").open("wb") as console:
        return subprocess.Popen(command, cwd=PROJECT, stdout=console, stderr=subprocess.STDOUT)


def finetuned(folder: Path, sections: Mapping[str, Mapping[str, object]], name: str, ranks: int = 1) -> Path:
    """Fine-tune as start_finetune does, and return the folder of the run. Raises RunFailed, and leaves `folder`."""
    process = start_finetune(folder, sections, name, ranks)
    try:
        status = process.wait()
    except KeyboardInterrupt:  # it has come to the run as well, which stops at the end of a step
        process.wait()
        raise
    return ended(folder, status)


def ended(folder: Path, status: int) -> Path:
    """Return the folder of a run that start_finetune started and that ended with `status`. Raises RunFailed."""
    if status:
        said = (folder / "console.txt").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RunFailed(f"{said}\nstatus {status}: see {folder / 'console.txt'}")
    [run] = (path.parent for path in folder.glob("runs/*/events.jsonl"))
    return run


@contextlib.contextmanager
def watching(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `look` again and again, in a thread, while this is open; at once and at the end too."""
    over = threading.Event()

    def watch() -> None:
        look()
        while not over.wait(every_s):
            look()
        look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Peak:
    """The most bytes that any one process of a tree has held so far."""

    def __init__(self, pid: int):
        self.bytes, self._root = 0, psutil.Process(pid)

    def look(self) -> None:
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in tree:
            try:
                self.bytes = max(self.bytes, self.held(process))
            except psutil.NoSuchProcess:
                continue

    def held(self, process: psutil.Process) -> int:
        return process.memory_info().rss


# RESULTS.md: one section for each benchmark, with date, commits and machine.


def current_commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()


def table(head: Sequence, rows: Iterable[Sequence]) -> list[str]:
    first, *others = (f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows))
    return [first, "|---" * len(head) + "|", *others]


def listed(misses: Iterable[str], left: int = 0) -> list[str]:
    """List the misses; or say that there are none, and how many runs are left to do."""
    lines = [f"- {miss}" for miss in misses]
    if lines:
        return ["", "Misses:", "", *lines]
    return ["", f"No misses{f' so far; runs left to do: {left}' if left else ''}."]


def write_section(name: str, body: Sequence[str], commits: Iterable[str] = ()) -> None:
    """Replace or add the section of benchmark `name`; `commits` are what was measured, if not what is checked out."""
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    machine += "".join(f", without {what}" for what in lacking)
    when = f"{datetime.date.today()}, commit {', '.join(dict.fromkeys(commits)) or current_commit()}, {machine}"
    section = "\n".join([f"## {name}", "", when, "", *body, ""])
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEAD
    sections = [part for part in re.split(r"(?m)^(?=## )", text) if not part.startswith(f"## {name}\n")]
    RESULTS.write_text("\n".join(part.rstrip() + "\n" for part in [*sections, section]), encoding="utf-8")


def publish(name: str, body: Sequence[str], commits: Iterable[str] = (), *, write: bool) -> None:
    """Print the section of benchmark `name`, and if it is to be kept write it into RESULTS.md."""
    print("\n".join(body))
    if write:
        write_section(name, body, commits)
