"""Strangers who talk to every port of a run change nothing of its result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from lab import faults

pytestmark = [pytest.mark.lab, pytest.mark.slow]
PROJECT = Path(__file__).parents[2]
CONNECTIONS = 10_000
ATTEMPTS = 6
TEXT = """
[distributed:d]
base_profile = tiny
communication_interval = 4
wire = float32
overlap_steps = 0
shares = fixed
epochs = 8
"""


SHORT = TEXT.replace("epochs = 8", "epochs = 2\nmin_hosts = 2")
LISTENING = "0A"  # in /proc/net/tcp


def digests(runner) -> dict[int, int]:
    """Of the agreed weights after each round."""
    found: dict[int, set[int]] = {}
    for event in runner.events("round"):
        found.setdefault(event["round"], set()).add(event["digest"])
    assert all(len(of_round) == 1 for of_round in found.values())
    return {number: of_round.pop() for number, of_round in found.items()}


def test_garbage_at_every_port_changes_no_bit(runner):
    runner.run("d", "h2", "h3", text=TEXT)
    undisturbed = digests(runner)
    process = runner.start("d", "h2", "h3", text=TEXT)
    begun = max(digests(runner), default=0)
    with ExitStack() as strangers:
        for name, host in runner.lab.hosts.items():
            made = strangers.enter_context(faults.garbage(host, "distributed.", connections=CONNECTIONS))
            print(f"{name}: connections by port {made}, rounds so far: {max(digests(runner), default=0)}")
            assert made and set(made.values()) == {CONNECTIONS}
        assert process.poll() is None, "the run was over before the strangers were"
        assert max(digests(runner)) > begun
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert digests(runner) == undisturbed
    assert runner.events("lost") == [] and len(runner.events("generation")) == 1
    assert runner.left_over() == []


def public_ports(host) -> set[str]:
    """ADDRESS:PORT of what listens there just now, read in a millisecond: gloo waits for its peers no longer."""
    lines = Path(f"/proc/{host.pid}/net/tcp").read_text().splitlines()[1:]
    ports = {int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[3] == LISTENING}
    return {f"{host.address}:{port}" for port in ports - {22}}


class Attack:
    """A stranger on h3 who knows at once of each port that opens on the others, and does `what` there."""

    def __init__(self, runner, what: str):
        self.hosts, self.what, self.over = [runner.lab[name] for name in ("h1", "h2")], what, threading.Event()
        command = [sys.executable, str(faults.STRANGER), "gloo"]
        self.stranger, self.said = runner.lab.popen("h3", command, stderr=subprocess.DEVNULL), []
        assert self.stranger.stdout.readline() == "ready\n"
        self.workers: list[int] = []  # on h2: it connects, since its address is the higher one
        self.release = threading.Timer(0, self.send, [signal.SIGCONT])
        works = (self.look, self.tell, self.hear)
        self.threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self.threads:
            thread.start()

    def look(self) -> None:
        while not self.over.wait(0.5):
            found = self.hosts[1].processes()
            self.workers = [one.pid for one in found if "distributed.worker.main" in " ".join(one.command)]

    def hold_up(self) -> None:
        """As a slow host does: so that the stranger is there first. A port that opens meanwhile makes it longer."""
        self.release.cancel()
        self.send(signal.SIGSTOP)
        self.release = threading.Timer(2.0, self.send, [signal.SIGCONT])
        self.release.start()

    def send(self, number: signal.Signals) -> None:
        for pid in self.workers:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def tell(self) -> None:
        known: set[str] = set()
        while not self.over.wait(0.001):
            now = {port for host in self.hosts for port in public_ports(host)}
            if now - known:
                self.hold_up()
            for port in now - known:
                for what in (self.what, "keys"):
                    self.stranger.stdin.write(f"{what} {port}\n")
                self.stranger.stdin.flush()
            known = now
        self.stranger.stdin.close()

    def hear(self) -> None:
        self.said += [json.loads(line) for line in self.stranger.stdout]

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(10)


@contextmanager
def attack(runner, what: str) -> Iterator[Attack]:
    going_on = Attack(runner, what)
    try:
        yield going_on
    finally:
        going_on.end()
        going_on.stranger.kill()


@pytest.mark.parametrize("what", ["abort", "join"])
def test_one_who_speaks_gloo_while_groups_form_costs_a_worker_and_no_run(runner, what):
    """It takes the place of peers by numbers that it guesses, aborts workers, and finds no store."""
    runner.run("d", "h2", text=SHORT)
    undisturbed, seen = digests(runner), {"abort": aborted, "join": left_out}[what]
    with attack(runner, what) as stranger:
        for _ in range(ATTEMPTS):  # it must be faster than the peers, which it is not always
            runner.run("d", "h2", text=SHORT)
            assert digests(runner) == undisturbed
            assert not any(event["given_up"] for event in runner.events("lost"))
            assert runner.left_over() == []
            if seen(runner):
                break
    assert seen(runner), stranger.said
    assert not any("keys" in said for said in stranger.said)
    assert {said["read"] for said in stranger.said} <= {32}  # nonces, and proofs for nobody else


def aborted(runner) -> int:
    return sum("signal 6" in event["reason"] for event in runner.events("lost"))


def left_out(runner) -> int:
    return sum("somebody on the network" in event["what"] for event in runner.events("warning"))
