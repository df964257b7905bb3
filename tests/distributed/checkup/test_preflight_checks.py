import re
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from distributed.checkup.doctor.machine import look_at_this_machine
from distributed.checkup.findings import Finding, Severity
from distributed.checkup.judge import Judge, Needs
from distributed.checkup.links import Pair
from distributed.checkup.look import HostFacts
from distributed.checkup.preflight import Report
from distributed.hosts.environment import Pins
from distributed.ssh.host import Host
from whisper_tuner.errors import ConfigError, ExitStatus, HostError
from whisper_tuner.model.memory import Way

ERROR, WARNING = Severity.ERROR, Severity.WARNING
GB = 10**9
PINS = Pins(direct=("torch",), all={"torch": "2.13.0", "psutil": "7.0.0"}, python=SpecifierSet(">=3.11"))
TORCH = {"version": "2.13.0", "cuda": 0, "cuda_memory": 0, "mps": False}
BYTES = {"cpu": (4 * GB, 2 * GB), "mps": (18 * GB, 9 * GB), "cuda": (3 * GB, GB // 2)}
WAYS = {
    device: [Way(frozen_precision="float32", again=True, whole=whole, one=one)]
    for device, (whole, one) in BYTES.items()
}
NEEDS = Needs(memory=WAYS, sent=2 * GB, kept=GB)
MPS = TORCH | {"mps": True, "mps_memory": 8 * GB}
MAC = {"torch": MPS}


def facts(**changes) -> dict:
    return {
        "system": "Linux",
        "training": True,
        "fitting": False,
        "passed": [],
        "python": [3, 12, 1],
        "executable": "/env/bin/python",
        "venv": True,
        "versions": {"torch": "2.13.0+cpu", "psutil": "7.0.0"},
        "rivals": [],
        "memory": {"total": 16 * GB, "available": 8 * GB},
    } | changes


def host(address: str = "b", *, device: str | None = None, free: int = 100 * GB, held: int = 0, **changes) -> HostFacts:
    space = {"root": "/root/project", "free": free, "held": held}
    torch = changes.pop("torch", TORCH)
    ahead = changes.pop("clock_ahead_s", 0.0)
    known = facts(**changes)
    return HostFacts(
        host=Host(address=address, device=device), facts=known, spaces=[space], torch=torch, clock_ahead_s=ahead
    )


def problems(worker: HostFacts, master: HostFacts | None = None, **more) -> list[Finding]:
    return list(Judge(worker, master or host("a"), PINS, NEEDS, "Run: multimac hosts setup", **more).all())


def test_a_mac_is_told_how_to_get_space_that_finder_shows_already():
    (problem,) = (found for found in problems(host(system="Darwin", free=GB)) if found.check == "disk")
    assert problem.severity == ERROR and problem.remedy.endswith(f"tmutil thinlocalsnapshots / {2 * GB} 4")
    (problem,) = problems(host(free=GB))
    assert "tmutil" not in problem.remedy


@pytest.mark.parametrize("good", [host(), host(free=2 * GB, held=2 * GB), HostFacts(host=Host(address="b"))])
def test_nothing_is_wrong_with_a_good_host_or_unknown_facts_and_what_is_held_needs_no_room(good):
    assert problems(good) == []


@pytest.mark.parametrize(
    ("changes", "severity", "said"),
    [
        ({"python": [3, 10, 9]}, ERROR, "Python 3.10.9 at /env/bin/python; needs >=3.11"),
        ({"versions": {"torch": "2.12.1", "psutil": "7.0.0"}}, ERROR, "torch 2.12.1 (here 2.13.0)"),
        ({"system": "Darwin"}, ERROR, "runs macOS, the master Linux"),
        ({"rivals": [["exogym", "/site", True]]}, ERROR, "another exogym would be loaded: /site"),
        ({"rivals": [["exogym", "/site", False]]}, WARNING, "another exogym is installed in /site"),
        ({"clock_ahead_s": -3.25}, WARNING, "its clock is 3.2 s behind the master's"),
        ({"free": GB}, ERROR, "1.0 GB free for /root/project, but 3.0 GB needed (2.0 GB to send, 1.0 GB for checkpoi"),
        ({"memory": {"total": GB, "available": GB}}, ERROR, "needs about 2.0 GB of memory, it has 1.0 GB"),
        ({"memory": {"total": 3 * GB, "available": GB}}, WARNING, "would take about 4.0 GB of memory, it has 3.0 GB"),
        ({"memory": {"total": 8 * GB, "available": GB}}, WARNING, "of 8.0 GB only 1.0 GB are free now"),
        ({"device": "mps"}, ERROR, "device mps is set"),
        ({"device": "cuda"}, ERROR, "device cuda is set, but its torch sees no CUDA cards"),
        ({"device": "cuda:2", "torch": TORCH | {"cuda": 2}}, ERROR, "device cuda:2 is set, but its torch sees 2"),
        ({"device": "cuda", "torch": TORCH | {"cuda": 1, "cuda_memory": GB // 4}}, ERROR, "its GPU has 250.0 MB"),
        ({"device": "cuda", "torch": TORCH | {"cuda": 1, "cuda_memory": GB}}, WARNING, "3.0 GB of memory, its GPU"),
        (MAC | {"memory": {"total": 12 * GB, "available": 12 * GB}}, ERROR, "9.0 GB of memory, its GPU has 8.0 GB"),
        (MAC | {"torch": MPS | {"mps_memory": 16 * GB}}, WARNING, "about 18.0 GB of memory, its GPU has 16.0 GB"),
        ({"torch": {"failed": "ImportError: no libgomp"}}, ERROR, "torch does not load: ImportError: no libgomp"),
        ({"torch": {"late": True}}, WARNING, "not checked in time"),
    ],
)
def test_one_thing_is_wrong(changes, severity, said):
    (problem,) = problems(host(**changes))
    assert problem.severity == severity and said in str(problem) and str(problem).startswith("b: ")
    assert problem.remedy


@pytest.mark.parametrize(
    ("passed", "fitting", "said", "remedy"),
    [
        (["/e/bin/python: does not run"], True, "at b:/e/bin/python", "Run: multimac hosts setup"),
        (["/e/bin/python: 3.15, needs 3.11 to 3.14", "/b/python3: built for Intel"], True, "3.15, needs", "Run: "),
        (["/e/bin/python: does not run", "/b/python3: built for Intel"], False, "python3: built for Intel", "brew"),
    ],
)
def test_a_host_without_a_python_that_can_train_says_which_it_has(passed, fitting, said, remedy):
    (problem,) = problems(host(training=False, passed=passed, fitting=fitting, versions={}))
    assert said in str(problem) and remedy in problem.remedy
    assert ("Intel" in str(problem)) == (not fitting)


@pytest.mark.parametrize(
    ("sharing", "severity", "said"),
    [
        (2, WARNING, "training needs about 8.0 GB of memory; of 16.0 GB only 7.0 GB are free now"),
        (5, WARNING, "whole batches would take about 20.0 GB of memory, it has 16.0 GB for 5 workers"),
        (9, ERROR, "training needs about 18.0 GB of memory, it has 16.0 GB for 9 workers"),
    ],
)
def test_hosts_that_are_one_machine_share_its_memory(sharing, severity, said):
    (problem,) = problems(host(memory={"total": 16 * GB, "available": 7 * GB}), sharing=sharing)
    assert (problem.severity, problem.what) == (severity, said) and problem.remedy


def test_what_strategies_may_take_is_in_the_machines_memory_also_where_a_card_trains():
    card = host(device="cuda", torch=TORCH | {"cuda": 1, "cuda_memory": 80 * GB})
    plain = host(device="cpu")
    assert not problems(card) and not problems(plain)
    assert card.spare_memory == plain.spare_memory > 0


@pytest.mark.parametrize("torch", [MPS, TORCH | {"cuda": 1, "cuda_memory": 8 * GB}, TORCH])
def test_the_doctor_has_needs_for_each_device(torch, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "distributed.checkup.look.look_here", lambda *_: SimpleNamespace(facts=host(torch=torch), problems=[])
    )
    _, problems = look_at_this_machine(None, tmp_path)
    assert not [problem for problem in problems if problem.check == "memory"]


def test_workers_spread_over_the_cards_of_a_machine():
    cards = host(device="cuda", torch=TORCH | {"cuda": 4, "cuda_memory": 4 * GB})
    assert not problems(cards, sharing=4)
    (problem,) = problems(cards, sharing=5)
    assert "whole batches would take about 6.0 GB of memory, its GPU has 4.0 GB for 2 workers" in problem.what


def test_a_python_of_the_system_is_not_touched():
    (problem,) = problems(host(venv=False, versions={"torch": "2.13.0"}))
    assert "psutil is missing" in problem.what and 'Leave "python_env" out' in problem.remedy


def test_hosts_setup_is_for_workers_only():
    """Of the master's own environment only `make setup` takes care."""
    changes = {"python": [3, 10, 9], "torch": {"failed": "ImportError: no libgomp"}}
    assert all("hosts setup" in problem.remedy for problem in problems(host(**changes)))
    master = host("a", **changes)
    own = problems(master, master)
    assert len(own) == 2 and all(problem.remedy.endswith("un: make setup") for problem in own)


@pytest.mark.parametrize(("sync", "count"), [(True, 0), (False, 1)])
def test_old_code_is_sent_anew_unless_that_is_ruled_out(sync, count):
    old = host()
    old.differ = ["a.py", "b.py", "c.py", "d.py"]
    assert [problem.what.rpartition(": ")[2] for problem in problems(old, sync=sync)] == [
        "a.py, b.py, c.py, ..."
    ] * count


def test_hosts_with_the_same_boot_are_one_machine():
    machines = {"a": "boot 1", "b": "boot 2", "c": "boot 1", "d": "", "e": ""}
    hosts = [host(name, memory={"total": GB, "machine": machine}) for name, machine in machines.items()]
    unreached = HostFacts(host=Host(address="f"))
    assert Report(hosts=[*hosts, unreached]).machine_workers == (2, 1, 2, 1, 1, 1)


LINK = Finding(hosts=("b", "c"), what="b -> c: no answer", remedy="Firewall.")
FULL = Finding(hosts=("a",), what="disk", remedy="Free it.")
SLOW = Finding(hosts=("a",), what="slow", severity=WARNING)
MINE = Finding(hosts=("a",), what="not this", status=ExitStatus.CONFIG)


@pytest.mark.parametrize(
    ("found", "kind", "said"),
    [
        ([SLOW, FULL], HostError, "a: disk\n  Free it."),
        ([FULL, LINK], HostError, "a, b, c: 2 problems:\na: disk\n  Free it.\nb -> c: no answer\n  Firewall."),
        ([MINE], ConfigError, "a: not this"),
    ],
)
def test_errors_become_one(found, kind, said):
    Report(hosts=[], problems=[SLOW]).raise_if_errors()
    with pytest.raises(kind, match=f"^{re.escape(said)}$"):
        Report(hosts=[], problems=found).raise_if_errors()


def test_the_slowest_link_is_named():
    pairs = [
        Pair(source="a", target="b", latency_s=0.001, mbit=90.0),
        Pair(source="b", target="a", mbit=30.0, latency_s=0.002),
    ]
    report = Report(hosts=[HostFacts(host=Host(address=name)) for name in "ab"], pairs=pairs, seconds=3.0)
    assert report.summary() == "2 hosts checked in 3.0 s; slowest link b -> a: 30 Mbit/s, 2.0 ms"
