"""A host's address changes in the middle of a run, or the master's: all go on together, and no worker starts anew."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lab import faults
from lab.keys import PRIVATE
from test_lost_hosts import started
from waiting import wait_until
from watched import Watched

pytestmark = pytest.mark.lab
ELSEWHERE = "10.77.0.77"


class NamedHosts:
    """h1.local and so on, as Macs announce them; a host key is known by its name."""

    def __init__(self, runner):
        self.runner, self.file = runner, runner.folder / "hosts"
        self.where = {f"{name}.local": host.address for name, host in runner.lab.hosts.items()}
        runner.names = {name: f"{name}.local" for name in runner.lab.hosts}
        self.write()
        with (runner.lab["h1"].home / ".ssh" / "known_hosts").open("a") as known:
            for name, host in runner.lab.hosts.items():
                known.write(f"{name}.local {host.path(PRIVATE / 'host_key.pub').read_text()}")

    def write(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.where.items())]
        self.file.write_text("\n".join(lines) + "\n")  # the same file: it is mounted

    @contextmanager
    def moved(self, name: str, announced_s: float = 0.0) -> Iterator[None]:
        """With another address, which its name leads to some seconds later."""
        with faults.moved(self.runner.lab[name], ELSEWHERE):
            time.sleep(announced_s)
            self.where[f"{name}.local"] = ELSEWHERE
            self.write()
            yield


@pytest.fixture
def named(runner):
    hosts = NamedHosts(runner)
    with faults.names(runner.lab["h1"], hosts.file):
        yield hosts


def all_are_in_again(run: Watched, after: float) -> float:
    """Seconds until all hosts have agreed on a round together."""

    def rounds() -> list[dict]:
        return [event for event in run.of("commit") if event["time"] > after and len(event["samples"]) == 2]

    def alone() -> list[dict]:
        return [event for event in run.of("lost") if event["time"] > after]

    wait_until(alone, 30, run.log)
    lost = alone()[0]["time"]
    wait_until(lambda: any(event["time"] > lost for event in rounds()), 45, run.log)
    return min(event["time"] for event in rounds() if event["time"] > lost) - after


@pytest.mark.slow
def test_a_host_with_another_address_is_found_by_its_name(runner, named):
    run = started(runner, "h2", epochs=14)
    run.wait_for("commit", 2)
    begun = time.time()
    with named.moved("h2", announced_s=3.0):
        seconds = all_are_in_again(run, begun)
        print(f"{seconds:.1f} s until the next round of all")
        run.end()
    assert run.of("lost")[0]["host"] == "h2.local" and seconds < 25
    assert len(run.of("hello", host="h2.local")) == 1


@pytest.mark.slow
def test_a_master_with_another_address_calls_its_hosts_together_there(runner, named):
    run = started(runner, "h2", epochs=14)
    run.wait_for("commit", 2)
    begun = time.time()
    with named.moved("h1"):
        seconds = all_are_in_again(run, begun)
        print(f"{seconds:.1f} s until the next round of all")
        out = run.end()
    told = f"the address of this machine was {runner.lab['h1'].address}, and is now {ELSEWHERE}: the hosts meet there"
    assert told in out and seconds < 30
    assert len(run.of("hello", host="h2.local")) == len(run.of("hello", host="h1.local")) == 1
