import json
import os
import sys
from pathlib import Path

import pytest

from distributed.hosts import environment, wheelhouse
from distributed.hosts.agent.facts import facts
from lab import Lab

PROJECT = Path(__file__).parents[2]
ABLE = sys.platform == "linux" and os.geteuid() == 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.lab,
    pytest.mark.skipif(not ABLE, reason="the lab needs Linux and root"),
]
CONFIG = f"""
[profile:tiny]
base_model = {PROJECT}/bundled/model
train = {PROJECT}/bundled/data/train.csv
validation =
test =
batch_size = 4
device = cpu
[distributed:tiny-hosts]
base_profile = tiny
max_steps = 2
communication_interval = 1
"""
OUTSIDE = ("/tmp/torchinductor_",)  # all that docs/removing.md names of what a host without a registry has outside


def test_after_setup_a_run_and_remove_a_host_is_as_it_was_but_for_what_the_page_names(tmp_path):
    """Two hosts with homes of their own; the second one gets its environment from a wheelhouse."""
    target = wheelhouse.target_of(facts([], str(PROJECT)))
    wheelhouse.fill("lab", target, *environment.write_lists(environment.own_pins()))
    (tmp_path / "config.ini").write_text(CONFIG)
    hosts = tmp_path / "hosts.json"
    with Lab(hosts=2, rate=None) as lab:
        hosts.write_text(json.dumps({"master": lab["h1"].address, "workers": [lab["h2"].address]}))

        def multimac(*command: str) -> str:
            line = [sys.executable, "cli_typer.py", *command, "--hosts", str(hosts)]
            done = lab.exec("h1", line, cwd=str(PROJECT), timeout=500)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        def listing() -> set[str]:
            find = f"find {' '.join(['~', '/tmp', '/dev/shm'])} -print0"
            return {*lab.exec("h1", ["ssh", lab["h2"].address, find], timeout=60).stdout.split("\0")}

        before = listing()
        multimac("hosts", "setup")
        multimac("distributed-train", "tiny-hosts", "--config", str(tmp_path / "config.ini"))
        held = {row["kind"] for row in json.loads(multimac("hosts", "remove", "--json"))[0]["held"]}
        assert held - {"runs"} == {"audio", "models", "environment", "packages", "code", "records"}
        multimac("hosts", "remove", "--yes")
        after = listing()
        assert [name for name in after - before if not name.startswith(OUTSIDE)] == [] and before <= after
        assert "nothing is left" in multimac("hosts", "remove")
