"""A run that is going on in the lab, as its events tell, and what must be true of any run at its end."""

from __future__ import annotations

import signal
import time
from collections import Counter

from saved_model import saved_digest
from waiting import wait_until

CLIPS = 240  # in bundled/data/train.csv


class Watched:
    """has_rounds: its strategy tells of rounds, after which ranks may be compared."""

    def __init__(self, runner, *workers: str, text: str, epochs: int, has_rounds: bool = True):
        self.runner, self.epochs, self.has_rounds = runner, epochs, has_rounds
        self.process = runner.start("d", *workers, text=text)
        self.address = {name: runner.lab[name].address for name in ("h1", "h2", "h3")}

    def of(self, kind: str, **wanted) -> list[dict]:
        return [e for e in self.runner.events(kind) if all(e.get(key) == value for key, value in wanted.items())]

    def wait_for(self, kind: str, count: int, seconds: float = 60, **wanted) -> dict:
        wait_until(lambda: len(self.of(kind, **wanted)) >= count or self.process.poll() is not None, seconds)
        assert len(self.of(kind, **wanted)) >= count, (kind, self.process.poll(), self.log())
        return self.of(kind, **wanted)[count - 1]

    def wait_for_hosts(self, count: int, seconds: float = 120) -> None:
        """Until so many train together."""
        self.wait_for("generation", 1)
        wait_until(lambda: len(self.of("generation")[-1]["hosts"]) == count, seconds, self.log)
        assert self.process.poll() is None, self.log()

    def log(self) -> str:
        return (self.runner.run_dir / "launcher.log").read_text()[-3000:]

    def kill(self, name: str) -> float:
        self.runner.lab.kill(name, "distributed.worker.main")
        return time.time()

    def end(self, seconds: float = 180) -> str:
        out, err = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, out + err + self.log()
        self.check()
        return out

    def stop(self) -> str:
        """By Ctrl-C."""
        self.runner.lab["h1"].signal(signal.SIGINT, "cli_typer.py")
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 130, out + err + self.log()
        return out

    def check(self) -> None:
        """Live ranks agreed bit for bit after each round and at the end, every clip counted once an epoch, and the
        model that was saved is what they agreed on.
        """
        digests: dict[tuple, set] = {}
        commits: list[dict] = []
        hosts: tuple = ()  # a round that is made again may be that of others
        for event in self.runner.events():
            if event["type"] == "generation":
                hosts = tuple(event["hosts"])
            elif event["type"] == "round":
                digests.setdefault((hosts, event["round"]), set()).add(event["digest"])
            elif event["type"] == "commit":
                commits.append(event)
            elif event["type"] == "resume":  # what no checkpoint had yet is trained again
                commits = [commit for commit in commits if commit["round"] <= event["agreements"]]
        assert bool(digests) == self.has_rounds and all(len(of_round) == 1 for of_round in digests.values())
        counted = Counter(
            (epoch, clip)
            for commit in commits
            for epochs in commit["samples"].values()
            for epoch, clips in epochs.items()
            for clip in clips
        )
        assert set(counted.values()) == {1} and len(counted) == self.epochs * CLIPS
        assert {event["digest"] for event in self.of("done", stopped=False)} == {saved_digest(self.runner.run_dir)}
        assert self.runner.left_over() == []
