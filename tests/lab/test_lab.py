import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from lab import Lab, LabError, cpu, down, network
from lab.hosts import PATH, user_home
from lab.lab import RECORD
from lab.machine import require

ABLE = sys.platform == "linux" and os.geteuid() == 0
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.skipif(not ABLE, reason="the lab needs Linux and root")]
SEND = """
import socket, sys, time
data = bytes(1 << 20)
with socket.create_connection((sys.argv[1], 5001), timeout=5) as s:
    begin = time.monotonic()
    for _ in range(int(sys.argv[2])): s.sendall(data)
    s.shutdown(socket.SHUT_WR)
    s.recv(1)
print(time.monotonic() - begin)
"""
RECEIVE = """
import socket
with socket.create_server(("0.0.0.0", 5001)) as l:
    print("ready", flush=True)
    while True:
        c, _ = l.accept()
        while c.recv(1 << 16): pass
        c.close()
"""


@pytest.fixture(scope="module")
def lab():
    with Lab(hosts=2, cpus=0.5, rate="100mbit") as lab:
        yield lab


def ssh(lab: Lab, host: str, command: str) -> subprocess.CompletedProcess:
    return lab.exec(
        "h1", ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3", lab[host].address, command], timeout=60
    )


def leftovers() -> list:
    return [*network.namespaces(), *network.links(), *cpu.groups()] + ([RECORD] if RECORD.exists() else [])


def test_master_reaches_each_host_which_has_its_own_name_and_home(lab):
    for host in ("h1", "h2"):
        assert ssh(lab, host, "hostname").stdout.strip() == host
    assert ssh(lab, "h2", "touch ~/mark; ls -A ~").stdout.split() == [".ssh", "mark"]
    assert (lab["h2"].home / "mark").exists()
    assert "mark" not in lab.exec("h1", ["ls", "-A"]).stdout


def test_worker_sees_neither_the_repository_nor_a_registry(lab):
    assert lab.exec("h1", ["ls", str(Path.cwd())]).stdout
    assert ssh(lab, "h2", f"ls -A {Path.cwd()}").stdout == ""
    ssh(lab, "h2", "python3 -m venv --without-pip ~/v")
    reach = ssh(lab, "h2", "cat /etc/pip.conf; ls -A ~/.config; env | grep -i pip")
    assert reach.stdout == ""
    assert ssh(lab, "h2", "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 443), 3)'").returncode != 0


def test_workers_do_not_hold_the_owners_key(lab):
    assert not (lab["h2"].home / ".ssh" / "id_ed25519").exists()
    back = lab.exec("h2", ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", lab["h1"].address, "true"])
    assert back.returncode == 255 and "Permission denied" in back.stderr


def test_link_speed_and_cpu_share(lab):
    require(network.LIMITED_LINKS, network.LARGE_PACKETS, cpu.SHARES)
    receiver = lab.popen("h2", ["python3", "-u", "-c", RECEIVE])
    assert receiver.stdout.readline() == "ready\n"
    before = passed_on("h2")
    seconds = float(lab.exec("h1", ["python3", "-c", SEND, lab["h2"].address, "12"], timeout=60).stdout)
    assert 0.9 < seconds < 5
    sent, packets = (after - then for after, then in zip(passed_on("h2"), before, strict=True))
    assert sent > 12e6 and sent / packets > 8_000  # as whole packets, not cut up for the wire
    os.killpg(receiver.pid, signal.SIGKILL)
    wait_until(lambda: not lab.processes("h2", "create_server"))
    burn = "import time; e = time.monotonic() + 2\nwhile time.monotonic() < e: pass\nprint(time.process_time())"
    assert 0.2 < float(lab.exec("h2", ["python3", "-c", burn], timeout=60).stdout) < 1.3


def test_the_first_thread_has_a_share_of_its_own(lab):
    """A process of two threads: what its first one may take says nothing of the other."""
    require(cpu.SHARES)
    if (cpu.root() / "cgroup.controllers").exists():
        with pytest.raises(LabError, match="cgroup v1 only"):
            lab.set_cpus_of_first_threads("h2", [], 0.1)
        return
    burn = "import threading, time, zlib\ndef burn():\n  while True: zlib.crc32(bytes(10**7))\n"
    process = lab.popen("h2", ["python3", "-c", burn + "threading.Thread(target=burn).start()\nburn()"])
    wait_until(lambda: lab.processes("h2", "zlib"))
    [burning] = lab.processes("h2", "zlib")
    lab.set_cpus_of_first_threads("h2", [burning.pid], 0.1)
    wait_until(lambda: len(thread_seconds(burning.pid)) == 2)
    lab.set_cpus_of_first_threads("h2", [burning.pid], 0.1)  # the other one may have inherited the limit
    before, _ = thread_seconds(burning.pid), time.sleep(2)
    first, other = (after - then for after, then in zip(thread_seconds(burning.pid), before, strict=True))
    assert first < 0.45 and other > 1.5 * first
    lab.kill("h2", "zlib")
    assert process.wait(5) != 0 and not lab.processes("h2", "zlib")


def passed_on(host: str) -> tuple[int, int]:
    """Bytes and packets that the bridge has sent to a host."""
    [link] = json.loads(network.sh("ip", "-s", "-j", "link", "show", network.PREFIX + host))
    return link["stats64"]["tx"]["bytes"], link["stats64"]["tx"]["packets"]


def thread_seconds(pid: int) -> list[float]:
    """Of each thread of a process, the first one first."""
    times = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()}
    return [seconds for _, seconds in sorted(times.items())]


def test_processes_are_listed_frozen_and_killed(lab):
    sleeper = lab.popen("h2", ["sleep", "1234"])
    wait_until(lambda: lab.processes("h2", "sleep 1234"))
    assert not lab.processes("h1", "sleep 1234")
    lab.freeze("h2", "sleep 1234")
    [process] = lab.processes("h2", "sleep 1234")
    wait_until(lambda: "T (stopped)" in Path(f"/proc/{process.pid}/status").read_text())
    lab.thaw("h2", "sleep 1234")
    lab.kill("h2", "sleep 1234")
    wait_until(lambda: not lab.processes("h2", "sleep 1234"))
    assert sleeper.wait(5) != 0


@pytest.mark.parametrize("fault", ["link", "drop"])
def test_a_cut_host_is_silent_and_comes_back(lab, fault):
    if fault == "link":
        lab.link("h2", up=False)
    else:
        lab.drop("h2", "h1")
    assert ssh(lab, "h2", "true").returncode == 255
    if fault == "link":
        lab.link("h2", up=True)
    else:
        lab.pass_all("h2")
    assert ssh(lab, "h2", "true").returncode == 0


def test_another_process_finds_the_lab_and_a_second_one_is_refused(lab):
    assert Lab.current()["h2"] == lab["h2"]
    with pytest.raises(LabError, match="up already"):
        Lab(hosts=1).up()
    with pytest.raises(LabError, match="no host 'h9'"):
        lab.exec("h9", ["true"])


def test_down_leaves_nothing_even_of_frozen_processes(lab):
    lab.popen("h2", ["setsid", "sleep", "4321"])
    wait_until(lambda: lab.processes("h2", "sleep 4321"))
    [process] = lab.processes("h2", "sleep 4321")[-1:]
    lab.freeze("h2")
    home = lab["h2"].home
    down()
    assert leftovers() == []
    assert not home.exists()
    wait_until(lambda: not running(process.pid))
    down()


def test_a_lab_whose_owner_died_is_cleared_away(tmp_path):
    up = "Lab(hosts=1).up(owner=os.getpid())"
    script = f"import os, signal; from lab import Lab; {up}; os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert leftovers()
    with Lab(hosts=1, folder=tmp_path / "kept") as lab:
        assert lab.exec("h1", ["hostname"]).stdout == "h1\n"
    assert leftovers() == []
    assert (tmp_path / "kept" / "homes" / "h1").is_dir()


def test_a_lab_below_the_users_home():
    """As in a clone there: hosts have homes of their own in its place, and their /tmp lies there too."""
    with tempfile.TemporaryDirectory(dir=user_home()) as folder, Lab(hosts=2, folder=Path(folder)) as lab:
        said = lab.exec("h2", ["sh", "-c", f"ls -a ~ && touch /tmp/here && ls -d {folder}"]).stdout
        assert ".ssh" in said and folder not in said
        assert [path.name for path in Path(folder, "tmp", "h2").iterdir()] == ["here"]


def test_command_line(tmp_path):
    def call(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "lab", *words], capture_output=True, text=True, timeout=60)

    try:
        assert call("up", "--hosts", "1", "--folder", str(tmp_path / "f")).stdout == "h1  10.77.0.11\n"
        assert "up already" in call("up").stderr
        assert call("exec", "h1", "--", "printenv", "PATH").stdout.strip() == PATH
        assert "h1  10.77.0.11" in call("status").stdout
        assert call("link", "h1", "--rate", "50mbit").returncode == 0
        assert call("cpu", "h1", "0.25").returncode == 0
        assert call("exec", "h1", "--", "sh", "-c", "exit 7").returncode == 7
    finally:
        assert call("down").returncode == 0
    assert leftovers() == []
    assert call("status").stdout == "no lab is up\n"
    assert call("exec", "h1", "--", "true").returncode == 1


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return False
