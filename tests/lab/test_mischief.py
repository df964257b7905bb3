import os
import socket
import sys
import time
from pathlib import Path

import pytest
from waiting import wait_until

from lab import Lab, LabError, faults
from lab.mischief import Aim, Fault, Mischief

ABLE = sys.platform == "linux" and os.geteuid() == 0


def test_a_fault_of_an_unknown_kind_is_refused():
    with pytest.raises(LabError, match="no kind of fault 'flood': kill"):
        Fault(at=0, host="h1", kind="flood", seconds=1)


@pytest.fixture
def lab():
    with Lab(hosts=2) as lab:
        yield lab


def answers(lab: Lab, host: str) -> bool:
    try:
        socket.create_connection((lab[host].address, 22), 0.5).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.skipif(not ABLE, reason="the lab needs Linux and root")
@pytest.mark.skipif(not list(Path("/usr/lib").glob("*/faketime")), reason="libfaketime is not installed")
def test_mischief_does_what_is_planned_and_undoes_it(lab):
    lab.set_rate("h2", lab.rate)  # or skipped: what a machine cannot do is no deed
    lab.drop("h2")
    lab.pass_all("h2")
    h2 = lab["h2"]
    lab.popen("h2", ["sleep", "505"])
    wait_until(lambda: lab.processes("h2", "sleep 505"))
    [sleeper] = lab.processes("h2", "sleep 505")
    (h2.home / "weights").write_bytes(bytes(1000))
    kinds = ["garbage", "cut", "blackhole", "slow", "freeze", "sleep", "disk", "clock", "damage"]
    planned = [Fault(at=index * 0.2, host="h2", kind=kind, seconds=0.15) for index, kind in enumerate(kinds)]
    planned += [
        Fault(at=2.5, host="h2", kind="kill", seconds=0),
        Fault(at=2.5, host="h1", kind="cut", seconds=99),
        Fault(at=98, host="h1", kind="slow", seconds=1),
    ]
    with pytest.raises(LabError, match="no host 'h9'"):
        Mischief(lab, [Fault(at=0, host="h9", kind="cut", seconds=1)], Aim(process="sleep"))
    with faults.small_disk(h2, "disk-h2", "1m"):
        begin = time.monotonic()
        with Mischief(lab, planned, Aim(process="sleep 505", disk="disk-{host}", files="weigh*")) as mischief:
            wait_until(lambda: len(mischief.deeds) == 19, 10, tell=lambda: mischief.deeds)
            assert not answers(lab, "h1")
    done = [(deed.fault.host, deed.fault.kind, deed.done) for deed in mischief.deeds]
    assert done[0] == ("h2", "garbage", "missed")  # no port
    assert done[1:17] == [("h2", kind, word) for kind in kinds[1:] for word in ("begun", "undone")]
    assert done[17:] == [("h2", "kill", "begun"), ("h1", "cut", "begun"), ("h1", "cut", "undone")]
    assert [deed.monotonic - begin >= deed.fault.at for deed in mischief.deeds] == [True] * 20
    assert abs(mischief.deeds[0].wall - time.time()) < 20
    assert sleeper.command[-1] == mischief.deeds[17].words
    wait_until(lambda: answers(lab, "h1"))  # a link that is up again loses what is sent at once
    assert (h2.home / "weights").read_bytes() == bytes(1000)
