"""docs/engines.md: its commands train the same profile by torchrun and Slurm, and go on after a rank was killed."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from benchmarks.verdicts import inexact, ledger
from distributed.run_dir.log import read_events
from distributed.run_dir.summary import read_run

PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs" / "engines.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
SLURM = ("slurmctld", "slurmd", "munged")
EPOCHS = 2
TEXT = f"""
[profile:mine-alone]
base_model = {PROJECT}/bundled/model
train = {PROJECT}/bundled/data/train.csv
validation =
test =
epochs = {EPOCHS}
batch_size = 4
learning_rate = 3e-4
num_threads = 1
device = cpu
seed = 3
checkpoint_interval = 2
[distributed:mine]
base_profile = mine-alone
strategy = diloco
communication_interval = 5
shares = fixed
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "config.ini").write_text(TEXT)
    return tmp_path


def command(name: str) -> list[str]:
    """Return the command of the page that begins with these words."""
    [found] = re.findall(rf"^    ({re.escape(name)}.*)$", PAGE, re.MULTILINE)
    return found.split()


def environment(**more: str) -> dict[str, str]:
    return (
        os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}:/usr/sbin", "PYTHONPATH": f"{PROJECT}/gym:{PROJECT}"} | more
    )


def the_run(folder: Path) -> Path:
    [events] = folder.glob("runs/*/events.jsonl")
    return events.parent


def has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("runs/*/checkpoints/*/rank1.json"))


def ranks(*words: str) -> dict[str, psutil.Process]:
    """Return the processes of `train-rank` by their rank."""
    found = {}
    for process in psutil.process_iter():
        try:
            if "train-rank" in (line := process.cmdline()) and "torchrun" not in " ".join(line) and {*words} <= {*line}:
                environment = process.environ()
                found[environment.get("RANK") or environment.get("SLURM_PROCID", "")] = process
        except psutil.Error:
            continue
    return found


def check(folder: Path) -> None:
    """The run has ended well, and has trained each clip once in each epoch, whatever was lost."""
    run = the_run(folder)
    with (run / "train.csv").open(encoding="utf-8", newline="") as file:
        ids = [row["id"] for row in csv.DictReader(file)]
    kept, _ = ledger(read_events(run / "events.jsonl")[0])
    assert not inexact(kept, ids, EPOCHS)
    assert read_run(run).state == "finished" and (run / "final").is_dir()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_torchrun_ends_at_the_same_weights_as_local_ranks(folder):
    words = [word.replace("demo-diloco", "mine") for word in command("torchrun --standalone")]
    words += ["--set", "epochs=1", "--set", "max_steps=12"]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    launched = the_run(folder)
    here = folder / "here"
    code = "from multimac.commands.train import *; train_here(Path('config.ini'), 'mine', ranks=2, settings=[{}])"
    settings = f"'epochs=1', 'max_steps=12', 'runs_dir={here}'"
    subprocess.run(
        [sys.executable, "-c", code.format(settings)], cwd=folder, env=environment(), timeout=300, check=True
    )
    [other] = here.glob("*/events.jsonl")
    digests = [
        {event["digest"] for event in read_events(events)[0] if event["type"] == "done"}
        for events in (launched / "events.jsonl", other)
    ]
    assert digests[0] == digests[1] and len(digests[0]) == 1


@pytest.mark.slow
def test_torchrun_goes_on_after_a_machine_was_killed_and_came_again(folder):
    words = [word.replace("first.local:29500", f"127.0.0.1:{free_port()}") for word in command("torchrun --nnodes")]
    env = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def machine(name: str) -> subprocess.Popen:
        with (folder / f"{name}.txt").open("w") as out:
            return subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out)

    address = words[[word.startswith("--rdzv-endpoint") for word in words].index(True)].partition("=")[2]
    first = machine("first")
    wait_until(lambda: any(one.laddr.port == int(address.split(":")[1]) for one in psutil.net_connections()), 60)
    second = machine("second")
    try:
        wait_until(lambda: has_checkpoint(folder), 120)
        for process in [*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)]:
            process.kill()
        second.wait()
        third = machine("third")
        assert first.wait(300) == 0 == third.wait(60), (folder / "first.txt").read_text()
    finally:
        for one in (first, second):
            one.kill()
    check(folder)


@pytest.fixture
def slurm(tmp_path) -> Iterator[dict[str, str]]:
    """Slurm with two nodes, which are processes of this machine."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if os.geteuid() or not all(shutil.which(name, path=path) for name in SLURM):
        pytest.skip("needs root, and Slurm: sh tools/system_packages.sh")
    folder, host, nodes = tmp_path / "slurm", socket.gethostname().split(".")[0], ("n1", "n2")
    (folder / "state").mkdir(parents=True)
    (folder / "key").write_bytes(os.urandom(64))
    (folder / "key").chmod(0o600)
    lines = [
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={free_port()}",
        f"SlurmUser=root\nAuthType=auth/munge\nAuthInfo=socket={folder}/munge.sock\nCredType=cred/munge",
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/%n",
        f"SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/%n.pid",
        f"SlurmctldLogFile={folder}/ctld.log\nSlurmdLogFile={folder}/%n.log",
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/linear\nReturnToService=2",
        *(
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={host} Port={free_port()} CPUs=1 State=UNKNOWN"
            for node in nodes
        ),
        "PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP",
    ]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    env = environment(SLURM_CONF=str(folder / "slurm.conf"))
    files = [f"--{name}={folder}/{file}" for name, file in {"key-file": "key", "socket": "munge.sock"}.items()]
    files += [f"--{name}={folder}/munge.{end}" for name, end in {"pid-file": "pid", "log-file": "log"}.items()]
    daemons = [["munged", "--foreground", "--force", *files, f"--seed-file={folder}/seed"], ["slurmctld", "-D", "-c"]]
    daemons += [["slurmd", "-D", "-N", node] for node in nodes]
    running = []
    try:
        for words in daemons:
            if words[0] == "slurmctld":
                wait_until((folder / "munge.sock").exists, 20)
            for node in nodes:
                (folder / node).mkdir(exist_ok=True)
            running.append(subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        wait_until(
            lambda: (
                subprocess.run(
                    ["sinfo", "-h", "-t", "idle", "-o", "%D"], env=env, capture_output=True, text=True
                ).stdout.strip()
                == "2"
            ),
            60,
        )
        yield env
    finally:
        subprocess.run(["scancel", "--user=root"], env=env, check=False)
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(30)


@pytest.mark.slow
def test_slurm_requeues_a_job_whose_rank_was_killed(folder, slurm):
    words = command("multimac submit mine --slurm")
    subprocess.run(words, cwd=folder, env=slurm, check=True, timeout=60)
    wait_until(lambda: has_checkpoint(folder), 120)
    ranks("mine")["1"].send_signal(signal.SIGKILL)
    wait_until(lambda: not subprocess.run(["squeue", "-h"], env=slurm, capture_output=True).stdout, 300)
    check(folder)
    [said] = folder.glob("runs/mine-*.txt")
    assert "DUE TO JOB REQUEUE" in said.read_text()


@pytest.mark.slow
def test_slurm_stops_before_the_time_limit_and_goes_on(folder, slurm):
    """Slurm counts a limit in minutes: the signal is sent by hand in its place."""
    subprocess.run(command("multimac submit mine --slurm"), cwd=folder, env=slurm, check=True, timeout=60)
    wait_until(lambda: has_checkpoint(folder), 120)
    subprocess.run(["scancel", "--signal=TERM", "--state=running", "--user=root"], env=slurm, check=True)
    time.sleep(1)
    wait_until(lambda: not subprocess.run(["squeue", "-h"], env=slurm, capture_output=True).stdout, 300)
    check(folder)
    ended = [event["status"] for event in read_events(the_run(folder) / "events.jsonl")[0] if event["type"] == "end"]
    assert ended == [130, 0]


@pytest.mark.slow
def test_ray_replaces_a_killed_worker(folder):
    """Two nodes of Ray's, which are processes of this machine."""
    pytest.importorskip("ray")
    temporary = tempfile.mkdtemp(prefix="ray")  # the paths of its sockets must be short
    env = environment(RAY_TMPDIR=temporary, RAY_memory_monitor_refresh_ms="0")
    ray, port = [sys.executable, "-m", "ray.scripts.scripts"], free_port()
    node = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    words = [word.replace("auto", f"127.0.0.1:{port}") for word in command("multimac submit mine --ray")]
    try:
        for place in ("--head", f"--port={port}"), (f"--address=127.0.0.1:{port}",):
            subprocess.run([*ray, "start", *place, *node], env=env, check=True, timeout=90, stdout=subprocess.DEVNULL)
        words[:1] = [sys.executable, str(PROJECT / "cli_typer.py")]
        with (folder / "said.txt").open("w") as out:
            submitted = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out)
        wait_until(lambda: has_checkpoint(folder), 240, tell=(folder / "said.txt").read_text)
        workers = [one for one in psutil.process_iter(["cmdline"]) if "RayTrainWorker" in str(one.info["cmdline"])]
        assert len(workers) == 2
        workers[-1].kill()
        assert submitted.wait(400) == 0, (folder / "said.txt").read_text()
    finally:
        subprocess.run([*ray, "stop", "--force"], env=env, stdout=subprocess.DEVNULL)
        shutil.rmtree(temporary, ignore_errors=True)
    check(folder)
