"""Each fault on plain programs: that it happens, and that it is undone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import wait_until

from lab import Lab, LabError, faults, network, remains
from lab.hosts import state

ABLE = sys.platform == "linux" and os.geteuid() == 0
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.skipif(not ABLE, reason="the lab needs Linux and root")]
TALK = """
import contextlib, socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", 5002))
while True:
    said, who = s.recvfrom(99)
    print(said.decode(), flush=True)
    with contextlib.suppress(PermissionError): s.sendto(said, who)
"""
ASK = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(0.5)
s.sendto(sys.argv[2].encode(), (sys.argv[1], 5002))
print(s.recv(99).decode())
"""
LISTEN = """
import selectors, socket, sys
ready, count = selectors.DefaultSelector(), {}
for address in ("0.0.0.0", "127.0.0.1"):
    for _ in range(int(sys.argv[1])):
        ready.register(socket.create_server((address, 0)), selectors.EVENT_READ)
while True:
    for key, _ in ready.select():
        if key.fileobj in count:
            got = key.fileobj.recv(1 << 16)
            count[key.fileobj] += len(got)
            if not got: ready.unregister(key.fileobj)
        else:
            new = key.fileobj.accept()[0]
            count[new] = 0
            ready.register(new, selectors.EVENT_READ)
        print(len(count), sum(count.values()), len(ready.get_map()), flush=True)
"""
TELL_TIME = """
import time, threading
a = time.monotonic()
threading.Event().wait(0.2)
time.sleep(0.2)
print(time.time(), time.monotonic(), time.monotonic() - a)
"""


@pytest.fixture(scope="module")
def lab():
    with Lab(hosts=2, rate="100mbit") as lab:
        yield lab


@pytest.fixture
def h2(lab):
    yield lab["h2"]
    lab.kill("h2", "")
    wait_until(lambda: remains.processes(lab) == [])


def ssh(lab: Lab, command: str, timeout: int = 2) -> subprocess.CompletedProcess:
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={timeout}"]
    return lab.exec("h1", ["ssh", *options, lab["h2"].address, command], timeout=60)


def start(lab: Lab, *command: str) -> int:
    """A process on h2; its PID here."""
    lab.popen("h2", command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: lab.processes("h2", " ".join(command)))
    return lab.processes("h2", " ".join(command))[0].pid


def test_a_process_is_killed_or_frozen_alone(lab, h2):
    one, other = start(lab, "sleep", "501"), start(lab, "sleep", "502")
    with faults.frozen(h2, "sleep 501"):
        wait_until(lambda: state(one) == "T")
        wait_until(lambda: state(other) == "S")  # and not just then running
    wait_until(lambda: state(one) == "S")
    [killed] = faults.kill(h2, "sleep 501")
    wait_until(lambda: state(one) == "")
    assert killed.pid == one
    wait_until(lambda: state(other) == "S")
    with pytest.raises(LabError, match="h2: no process 'sleep 501'"):
        faults.kill(h2, "sleep 501")
    with pytest.raises(LabError, match="h2: no process"), faults.frozen(h2, "sleep 501"):
        pass


def connects(lab: Lab) -> bool:
    code = f"import socket; socket.create_connection(({lab['h2'].address!r}, 22), 1)"
    return lab.exec("h1", ["python3", "-c", code]).returncode == 0


@pytest.mark.parametrize(("fault", "kernel_answers"), [(faults.frozen, True), (faults.asleep, False)])
def test_a_whole_host_stops_and_goes_on(lab, h2, fault, kernel_answers):
    sleeper = start(lab, "sleep", "503")
    with fault(h2):
        assert state(sleeper) == state(h2.pid) == "T"
        assert connects(lab) == kernel_answers
        assert ssh(lab, "true", timeout=1).returncode == 255
    wait_until(lambda: state(sleeper) == "S")
    assert ssh(lab, "true").returncode == 0


def test_packets_are_lost_both_ways_or_one_way(lab, h2):
    talker = lab.popen("h2", ["python3", "-c", TALK])

    def answered(word: str) -> bool:
        return lab.exec("h1", ["python3", "-c", ASK, h2.address, word]).stdout == word + "\n"

    wait_until(lambda: answered("hello"))
    with faults.cut(h2):
        assert not answered("cut")
    wait_until(lambda: answered("back"))  # a link that is up again loses what is sent at once
    with faults.blackhole(h2):
        assert not answered("both")
    with faults.blackhole(h2, lab["h1"], way="in"):
        assert not answered("in")
    with faults.blackhole(h2, way="out"):
        assert not answered("out")
    assert answered("bye")
    talker.kill()
    faults.kill(h2, "SOCK_DGRAM")
    heard = dict.fromkeys(talker.stdout.read().split())
    assert list(heard) == ["hello", "back", "out", "bye"]


def test_a_link_is_slow_and_has_its_own_rate_again(lab, h2):
    def seconds() -> float:
        begin = time.monotonic()
        assert len(ssh(lab, "head -c 250000 /dev/zero").stdout) == 250000
        return time.monotonic() - begin

    before = network.rate("h2")
    with faults.slow(h2, "1mbit"):
        assert seconds() > 1.4  # 2 Mbit, less what a burst lets through
    assert network.rate("h2") == before == "100000000bit"
    assert seconds() < 1.3
    network.set_rate("h2", None)
    with faults.slow(h2, "1mbit"):
        pass
    assert network.rate("h2") is None
    network.set_rate("h2", before)


def test_a_small_disk_is_filled_and_freed(lab, h2):
    write = "mkdir -p ~/runs/a && head -c 100000 /dev/zero > ~/runs/a/file"
    with faults.small_disk(h2, "runs", "2m") as folder:
        assert ssh(lab, write).returncode == 0
        assert (folder / "a" / "file").stat().st_size == 100000
        with faults.full_disk(h2, "runs") as free:
            assert 1_500_000 < free < 2_097_152
            assert "No space left on device" in ssh(lab, "echo x > ~/runs/new").stderr
        assert ssh(lab, write).returncode == 0
    assert ssh(lab, "ls ~/runs").stdout == ""
    with pytest.raises(LabError, match="h2: runs is on the disk of this machine"), faults.full_disk(h2, "runs"):
        pass


@pytest.mark.skipif(not list(Path("/usr/lib").glob("*/faketime")), reason="libfaketime is not installed")
def test_a_clock_is_wrong_but_monotonic_time_is_not(lab, h2):
    def shift(said: str) -> float:
        wall, monotonic, waited = map(float, said.split())
        assert abs(monotonic - time.monotonic()) < 2 and 0.39 < waited < 2
        return wall - time.time()

    command = f"python3 -c '{TELL_TIME}'"
    for seconds in (-90, 400 * 86400):
        with faults.skewed(h2, seconds):
            assert shift(ssh(lab, command).stdout) == pytest.approx(seconds, abs=2)
    assert shift(ssh(lab, command).stdout) == pytest.approx(0, abs=2)
    own = lab.exec("h1", ["python3", "-c", TELL_TIME], env=faults.clock(lab["h1"], 3600))
    assert shift(own.stdout) == pytest.approx(3600, abs=2)


def test_garbage_reaches_each_port_and_some_connections_stay_open(lab, h2):
    listener = lab.popen("h2", ["python3", "-c", LISTEN, "2"])

    def read_until(true):
        assert any(true(*map(int, line.split())) for line in listener.stdout)

    wait_until(lambda: len(h2.listeners()) == 4)
    assert [each.loopback for each in h2.listeners()].count(True) == 2
    assert len(remains.ports(lab)) == 4 and remains.ports(lab)[0].startswith("h2: port ")
    with faults.garbage(h2, "create_server", connections=6) as made:
        assert made == {each.port: 6 for each in h2.listeners()}
        assert remains.processes(lab) == [f"h2: process {h2.listeners()[0].process}"]
        read_until(lambda accepted, received, still: accepted == 24 and received > 1000 and still == 4 + 16)
    read_until(lambda accepted, received, still: still == 4)  # the listening sockets alone
    faults.kill(h2, "create_server")
    with pytest.raises(LabError, match="h2: no process '' listens"), faults.garbage(h2):
        pass


@pytest.mark.parametrize("cut", [False, True])
def test_a_file_is_damaged_and_repaired(tmp_path, cut):
    path = tmp_path / "weights"
    right = bytes(range(256)) * 40
    path.write_bytes(right)
    with faults.damaged(path, seed=1, cut=cut) as words:
        wrong = path.read_bytes()
    assert words.startswith("weights: ")
    assert path.read_bytes() == right
    if cut:
        assert len(wrong) < len(right) and right.startswith(wrong)
    else:
        assert len(wrong) == len(right) and sum(a != b for a, b in zip(wrong, right, strict=True)) == 8
    with faults.damaged(path, seed=1, cut=cut):
        assert path.read_bytes() == wrong
        (tmp_path / "new").write_bytes(b"new")
        (tmp_path / "new").rename(path)
    assert path.read_bytes() == b"new"


def test_what_is_left_on_hosts_is_named(lab, h2):
    (h2.home / "project" / ".sync").mkdir(parents=True)
    names = ["a.part", "a.pt", ".run.json.ab12_xyz", ".sync/index.json", ".sync/f.copy", ".gitignore"]
    for name in names:
        (h2.home / "project" / name).touch()
    sleeper = start(lab, "sleep", "504")
    left = remains.everything(lab, "project")
    assert left == [
        f"h2: process {sleeper} sleep 504",
        "h2: file project/.run.json.ab12_xyz",
        "h2: file project/.sync/f.copy",
        "h2: file project/a.part",
    ]
