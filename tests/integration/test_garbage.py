"""Strangers who talk to every port of a run change nothing of its result."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from lab import faults

pytestmark = [pytest.mark.lab, pytest.mark.slow]
CONNECTIONS = 10_000
TEXT = """
[distributed:d]
base_profile = tiny
communication_interval = 4
wire = float32
overlap_steps = 0
shares = fixed
epochs = 8
"""


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
