"""The lab on machines that lack something: it comes up, says once what is lacking, and refuses only what needs that.

Each case takes something away from this machine, by shell lines in a mount and a network namespace of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lab import Lab, LabLacks, cpu, network
from lab.hosts import user_home

PROJECT = Path(__file__).parents[2]
ABLE = sys.platform == "linux" and os.geteuid() == 0
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.skipif(not ABLE, reason="the lab needs Linux and root")]
SHELL = r"""set -e
hide() { # PROGRAM, if there is one
    real=$(command -v "$1") || return 0
    mount --bind /dev/null "$real"
}
refuse() { # PROGRAM WORD: it does not know this one
    real=$(command -v "$1") || return 0
    cp "$real" "$d/$1.real"
    printf '#!/bin/sh\ncase " $* " in *" %s "*) echo "what is %s?" >&2; exit 1;; esac\nexec "%s" "$@"\n' \
        "$2" "$2" "$d/$1.real" >"$d/$1"
    chmod +x "$d/$1"
    mount --bind "$d/$1" "$real"
}
ip link set lo up
"""
HELD = """
import socket, time
held = [socket.create_server(("", port)) for port in (22, 5002)]
mdns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
mdns.bind(("", 5353))
time.sleep(20)
"""
V2_LISTS = [Path("/sys/fs/cgroup", name, "cgroup.controllers") for name in ("", "unified")]
V2 = any("cpu" in path.read_text().split() for path in V2_LISTS if path.exists())
SPEED, SHARE, LARGE = network.LIMITED_LINKS, cpu.SHARES, network.LARGE_PACKETS
# What is taken away; what the lab then goes on without; what it refuses.
CASES = {
    "read-only sysctls": ("mount --bind -o ro /proc/sys /proc/sys", {"TCP's cubic", "TCP's reno"}, set()),
    "no cgroups": ("mount -t tmpfs none /sys/fs/cgroup", {SHARE}, {"share"}),
    "read-only cgroups": (
        "for m in /sys/fs/cgroup /sys/fs/cgroup/cpu*/; do mount --bind -o ro $m $m; done",
        {SHARE},
        {"share"},
    ),
    "cgroup v2": ("mount -t cgroup2 none /sys/fs/cgroup", *((set(), set()) if V2 else ({SHARE}, {"share"}))),
    "no nftables, an old ip": ("hide nft; refuse ip gso_max_size", {LARGE}, {"rules"}),
    "no tc, no tun": ("hide tc; mount -t tmpfs none /dev/net", {SPEED}, {"speed", "tunnel"}),
    "a kernel without nftables and tbf": ("refuse nft -f; refuse tc tbf", {SPEED}, {"speed", "rules"}),
    "no IPv6, one core, ports in use": (
        f"""sysctl -qw net.ipv6.conf.all.disable_ipv6=1
        taskset -pc {min(os.sched_getaffinity(0)) if ABLE else 0} $$
        python3 -c '{HELD}' >/dev/null 2>&1 & sleep 0.5""",
        set(),
        set(),
    ),
    "/tmp in memory": (  # the project may lie below it
        'mount --bind "$PWD" /mnt; mount -t tmpfs none /tmp; mkdir -p "$PWD"; mount --bind /mnt "$PWD"; cd "$PWD"',
        set(),
        set(),
    ),
}


@pytest.fixture
def without(tmp_path):
    """Runs this interpreter where something is taken away."""

    def run(take_away: str, *words: str) -> subprocess.CompletedProcess:
        script = f'{SHELL}{take_away}\nexec "$0" "$@"'
        env = os.environ | {"d": str(tmp_path), "PYTHONPATH": f"{PROJECT}:{PROJECT}/tests"}
        command = ["unshare", "--mount", "--net", "sh", "-c", script, sys.executable, *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, env=env, timeout=180)

    return run


def told(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert done.stderr.count("LabWarning") == bool(said["lacking"]), done.stderr
    assert all(f"{what}: " in done.stderr for what in said["lacking"]) and not said["left"]
    return said


@pytest.fixture(scope="module")
def as_it_is() -> dict:
    """What the lab says of this machine with nothing taken away."""
    command = [sys.executable, "-m", "lab.try_machine"]
    env = os.environ | {"PYTHONPATH": f"{PROJECT}:{PROJECT}/tests"}
    return told(subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, env=env, timeout=180))


@pytest.mark.parametrize("case", CASES)
def test_a_lab_comes_up_without(without, as_it_is, case):
    take_away, lacking, refused = CASES[case]
    said = told(without(take_away, "-m", "lab.try_machine", "", "tunnel" if "tun" in case else ""))
    assert set(said["lacking"]) == lacking | set(as_it_is["lacking"])
    assert set(said["refused"]) == refused | set(as_it_is["refused"])
    assert all(reason.startswith("this machine lacks ") for reason in said["refused"].values())


def test_a_lab_below_a_mount_in_a_home_that_is_one(without):
    with tempfile.TemporaryDirectory(dir=user_home()) as folder:
        told(without(f"mount --bind ~ ~; mount -t tmpfs none {folder}", "-m", "lab.try_machine", folder))


def test_a_lab_that_cannot_be_is_refused_by_name(without):
    bare = without("set -- -m lab up; exec setpriv --bounding-set=-all $0 $@")
    assert bare.returncode == 1 and bare.stderr.startswith("lab: this machine lacks namespaces")
    assert without("hide unshare", "-m", "lab", "up").stderr.startswith("lab: not installed: unshare (apt-get")
    try:
        os.seteuid(65534)
        with pytest.raises(LabLacks, match="needs Linux and root"):
            Lab(hosts=1).up()
    finally:
        os.seteuid(0)


def test_what_needs_it_is_skipped_by_name(without):
    words = ["-m", "pytest", "-p", "no:cacheprovider", "tests/lab/test_lab.py", "-k", "a_cut_host and drop"]
    done = without("unset CI; hide nft", *words)
    assert "1 skipped" in done.stdout, done.stdout
    assert "SKIPPED" in done.stdout and "this machine lacks rules that drop packets (nftables)" in done.stdout
