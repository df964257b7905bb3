"""A bare host is found by real avahi and paired with by its password, in a terminal."""

import json
import os
import pty
import re
import select
import shutil
import sys
import time
from pathlib import Path

import pytest

from distributed.hosts import environment, wheelhouse
from distributed.hosts.agent.facts import facts
from distributed.run_dir.log import scan
from lab import Lab

PROJECT = Path(__file__).parents[2]
ABLE = sys.platform == "linux" and os.geteuid() == 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.lab,
    pytest.mark.skipif(not ABLE, reason="the lab needs Linux and root"),
    pytest.mark.skipif(not shutil.which("avahi-daemon", path="/usr/sbin"), reason="avahi-daemon is not installed"),
]
# As a host that nobody has set up: no key of anybody, a password, an SSH server of its own that avahi announces.
BARE = r"""
set -e
mkdir -p /tmp/bare/services /run/avahi-daemon
rm -rf ~/.ssh
sed "s#^root:[^:]*:#root:$(openssl passwd -6 secret):#" /etc/shadow > /tmp/bare/shadow
mount --bind /tmp/bare/shadow /etc/shadow
cat > /tmp/bare/services/ssh.service <<X
<service-group><name>Anna’s Büro</name><service><type>_ssh._tcp</type><port>2222</port></service></service-group>
X
mount --bind /tmp/bare/services /etc/avahi/services
mount -t tmpfs none /run/avahi-daemon
printf '[server]\nhost-name=annas-buro\nenable-dbus=no\n[publish]\npublish-addresses=yes\n' > /tmp/bare/avahi.conf
ssh-keygen -q -t ed25519 -N '' -f /tmp/bare/host_key
printf 'ListenAddress 0.0.0.0:2222\nHostKey /tmp/bare/host_key\nPidFile none\nPermitRootLogin yes\nUsePAM no\n' \
    > /tmp/bare/sshd.conf
printf 'PasswordAuthentication yes\nAuthorizedKeysFile .ssh/authorized_keys\n' >> /tmp/bare/sshd.conf
/usr/sbin/sshd -f /tmp/bare/sshd.conf
/usr/sbin/avahi-daemon -f /tmp/bare/avahi.conf --no-drop-root --no-chroot --no-rlimits -D >/dev/null 2>&1
ssh-keygen -lf /tmp/bare/host_key.pub
"""


def test_two_machines_under_one_name_and_one_whose_address_changes():
    """avahi names the second one anew; both are found, and the one that moves is known by its key."""
    with Lab(hosts=3, rate="100mbit") as lab:
        for name in ("h2", "h3"):
            bare = lab.exec(name, ["bash", "-c", BARE], timeout=60)
            assert bare.returncode == 0, bare.stderr
        lab.exec("h1", ["sh", "-c", "rm -f ~/.ssh/known_hosts; mkdir -p ~/here"])
        command = [sys.executable, str(PROJECT / "cli_typer.py"), "hosts"]

        def found() -> dict[str, str]:
            seen = lab.exec("h1", [*command, "find", "--json"], cwd="/root/here", timeout=60)
            return {one["addresses"][0]: one["name"] for one in json.loads(seen.stdout)}

        deadline = time.monotonic() + 20  # in which the two agree on names
        while len(now := found()) < 2:
            assert time.monotonic() < deadline, now
        assert len({*now.values()}) == 2 and {*now} == {lab["h2"].address, lab["h3"].address}
        moved = lab["h2"].address.rpartition(".")[0] + ".99"
        change = f"ip addr del {lab['h2'].address}/24 dev en0 && ip addr add {moved}/24 dev en0"
        done = lab.exec("h2", ["sh", "-c", change], timeout=30)
        assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + 30
        while {*(now := found())} != {moved, lab["h3"].address}:
            assert time.monotonic() < deadline, now


def test_found_by_avahi_and_paired_with_by_one_password():
    with Lab(hosts=2, rate="100mbit") as lab:
        bare = lab.exec("h2", ["bash", "-c", BARE], timeout=60)
        assert bare.returncode == 0, bare.stderr
        fingerprint = bare.stdout.split()[1]
        lab.exec("h1", ["sh", "-c", "rm -f ~/.ssh/known_hosts ~/.ssh/id_*; mkdir -p ~/here"])
        command = [sys.executable, str(PROJECT / "cli_typer.py"), "hosts"]
        home = lab["h1"].path("here")

        found = lab.exec("h1", [*command, "find", "--json"], cwd="/root/here", timeout=60)
        [seen] = json.loads(found.stdout)
        assert (seen["addresses"][0], seen["port"], seen["label"]) == (lab["h2"].address, 2222, "Anna’s Büro")
        assert seen["state"] == "not paired"

        words = lab["h1"].command(
            [*command, "pair", "--no-setup"], env={"TERM": "xterm", "COLUMNS": "100"}, cwd="/root/here"
        )
        answers = {
            "Which one is to train": "\r",
            fingerprint: "",
            "Are the two alike?": "y\r",
            "Enter passphrase": "\r",
            "same passphrase again": "\r",
            "'s password:": "secret\r",
            "a key of yours opens it": "",
        }
        assert in_terminal(words, answers) == 0
        hosts = json.loads((home / "distributed_hosts.json").read_text())
        assert hosts == {"master": lab["h1"].address, "workers": [{"host": lab["h2"].address, "ssh_port": 2222}]}
        [seen] = json.loads(lab.exec("h1", [*command, "find", "--json"], cwd="/root/here", timeout=60).stdout)
        assert seen["state"] == "paired" and seen["told_by"] == "the hosts file"


@pytest.mark.timeout(900)
def test_the_wizard_leads_from_a_bare_host_to_the_first_step_with_one_password():
    """The host has no key, environment or internet. Enter takes each suggestion, and no file is edited."""
    target = wheelhouse.target_of(facts([], str(PROJECT)))
    wheelhouse.fill("lab", target, *environment.write_lists(environment.own_pins()))
    with Lab(hosts=2, rate="100mbit") as lab:
        bare = lab.exec("h2", ["bash", "-c", BARE], timeout=60)
        assert bare.returncode == 0, bare.stderr
        fingerprint = bare.stdout.split()[1]
        lab.exec("h1", ["sh", "-c", "rm -f ~/.ssh/known_hosts ~/.ssh/id_*"])
        folder = f"wizard-{os.getpid()}"  # the wizard remembers the answers of a folder
        here = lab["h1"].path(folder)
        for part in ("data", "model"):
            shutil.copytree(PROJECT / "bundled" / part, here / part)
        command = lab["h1"].command(
            [sys.executable, str(PROJECT / "wizard.py")],
            env={"TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
            cwd=f"/root/{folder}",
        )
        enter, next_choice = "\r", "\x1b[B\r"
        answers = {
            "Which recordings": enter,
            "Language": f"en{enter}",
            "Ready?": next_choice,
            "Pair with": enter,
            "Your user name on": enter,
            fingerprint: "",
            "Are the two alike?": "y\r",
            "Enter passphrase": enter,
            "same passphrase again": enter,
            "'s password:": "secret" + enter,
            "Addresses of the other machines": enter,
            "Set up": enter,
            "Measure their speed": enter,
            "Train on these": enter,
            "agree on their weights": enter,
            "Name for this profile": enter,
            "Everything else has its default": "",
            "? Ready?": enter,
            "clips/s": "\x03",
        }
        in_terminal(command, answers, 700, whenever={"Steps between two agreements": enter})
        [run] = here.glob("runs/*")
        steps = scan(run / "events.jsonl").attempts[0].steps
        assert {step.host for step in steps} == {lab["h1"].address, lab["h2"].address}


def in_terminal(
    command: list[str], answers: dict[str, str], seconds: float = 120, whenever: dict[str, str] | None = None
) -> int:
    """Give each answer once its words have come, in this order; return the exit status.

    whenever: answers to what may be asked in between.
    """
    pid, fd = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    seen, deadline = "", time.monotonic() + seconds
    for words, keys in answers.items():
        while words not in seen:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([fd], [], [], left)[0], f"no {words!r} within {seconds} s: {seen}"
            seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(fd, 65536).decode(errors="replace"))
            for others in [asked for asked in whenever or {} if asked in seen.partition(words)[0]]:
                seen = seen.partition(others)[2]
                answer(fd, whenever.pop(others))
        seen = seen.partition(words)[2]
        answer(fd, keys)
    while True:
        try:
            os.read(fd, 65536)
        except OSError:
            break
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def answer(fd: int, keys: str) -> None:
    time.sleep(0.3)  # the prompt draws first, then reads keys
    os.write(fd, keys.encode())
