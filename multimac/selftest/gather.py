"""What each check asks the machines. The answers are JSON; multimac/selftest/judge_*.py says what they mean."""

from __future__ import annotations

import itertools
import json
import secrets
import sys
import time
from functools import partial

from distributed.hosts.interfaces import interface_with
from distributed.hosts.keep_awake import hosts_awake
from distributed.hosts.paths import PROJECT
from distributed.plan.rendezvous import address_towards, check_is_this_machine
from distributed.preflight.run import preflight
from distributed.ssh.connection import Remote
from distributed.ssh.host import Hosts
from distributed.ssh.machine import LocalMachine
from distributed.ssh.settings import resolve

from .asking import Asked, Asking, Place, ProbeLost, told

CONNECT_S = 8.0
GLOO_S = 10.0  # gloo's own time-out in the tests
KILLED_S = 8.0
NOTICE_S = 10.0  # after gloo's time-out
GROUP_S, OPERATION_S = 60.0, 5.0  # of a silent peer: a group's time-out, and that of a single operation in it
READY_S, FORMED_S, SPEED_S = 25.0, 15.0, 30.0
MOST_PAIRS = 6  # over slow Wi-Fi one takes 15 s; of many hosts, the master with each comes first


def ssh(asks: Asking) -> list[dict]:
    """Connect to all hosts; those that answer take part in all that follows."""
    desk = asks.desk
    check_is_this_machine(desk.hosts.master)
    master = Place(letter="A", host=desk.hosts.master, machine=LocalMachine(desk.hosts.master.address))
    waiting = [Place(letter=desk.letter(host), host=host, machine=None) for host in desk.hosts.workers]

    def connect(place: Place) -> str:
        _learn(asks, place)
        place.machine = Remote.connect(place.host, timeout=CONNECT_S)
        return "connected"

    answers = asks.on_all(connect, waiting)
    desk.places = [master, *(place for place in waiting if place.machine)]
    desk.held.enter_context(hosts_awake([each.machine for each in desk.places[1:]]))
    return [{"host": "A", "answer": "this machine"}, *answers]


def _learn(asks: Asking, place: Place) -> None:
    """What ~/.ssh/config makes of a host: messages name it so. Behind a jump its name is looked up there."""
    settings = resolve(place.host)
    place.name = "" if settings.jumps or settings.proxy_command else settings.hostname
    asks.desk.sanitizer.learn([settings.hostname], place.letter)
    asks.desk.sanitizer.learn([settings.user], "USER")
    for jump in settings.jumps:
        asks.desk.sanitizer.learn([jump.address], "JUMP")
        asks.desk.sanitizer.learn([jump.user] if jump.user else [], "USER")


def place(asks: Asking) -> list[dict]:
    """Every host's own address, as a run would have it; on one machine alone, that on its own network."""
    hosts, remotes = asks.desk.hosts, [each.machine for each in asks.places[1:]]
    peer = address_towards(Hosts(master=hosts.master, workers=reached(asks)), remotes) if remotes else ""

    def find(each: Place) -> dict:
        if peer and each is asks.places[0]:
            found = {"address": peer, "interface": interface_with(peer)}
        else:
            found = asks.ask(each, "place", peer=peer, interface=each.host.interface or "")
        each.address = found["address"]
        return found

    return asks.on_all(find)


def reached(asks: Asking) -> tuple:
    return tuple(each.host for each in asks.places[1:])


def names(asks: Asking) -> list[dict]:
    """On the master, the only one that looks names up, and of hosts those under which ssh does."""
    wanted = [asks.desk.hosts.master.address, *(each.name for each in asks.places[1:] if each.name)]
    return asks.on_all(lambda each: asks.ask(each, "names", names=wanted), asks.places[:1])


def hosts_check(asks: Asking) -> dict | None:
    """The preflight as it is. None on one machine alone."""
    if len(asks.places) < 2:
        return None
    hosts = Hosts(master=asks.desk.hosts.master, workers=reached(asks))
    with preflight(None, hosts) as report:
        asks.desk.machine_workers = report.machine_workers
        for each, facts in zip(asks.places, report.hosts, strict=True):
            each.address = facts.address or each.address
        letters = {each.host.address: each.letter for each in asks.places}
        pairs = [[letters[p.source], letters[p.target], p.latency_s, p.mbit, p.failed, p.errno] for p in report.pairs]
        problems = [[problem.severity, problem.check, str(problem)] for problem in report.problems]
        return {"seconds": report.seconds, "pairs": pairs, "problems": problems}


def connect(asks: Asking) -> list[dict]:
    """From every host to each other; alone, to this machine's own address."""
    ports: dict[str, int] = {}

    def listen(each: Place) -> None:
        asked = asks.start(each, "listen", address=each.own_address())
        ports[each.letter] = asked.next("listening", timeout=15.0)["port"]

    silent = [answer for answer in asks.on_all(listen) if "failed" in answer]

    def targets(each: Place) -> list[list]:
        others = [other for other in asks.places if other is not each or len(asks.places) == 1]
        return [[other.letter, other.address, ports[other.letter]] for other in others if other.letter in ports]

    return silent + asks.on_all(lambda each: asks.ask(each, "connect", targets=targets(each)))


def gloo(asks: Asking) -> list[dict]:
    """Pairs of hosts, one after the other; alone, two processes on this machine's own address."""
    return [{"pair": [a.letter, b.letter], **told(partial(_speed, asks, a, b))} for a, b in pairs(asks)]


def pairs(asks: Asking) -> list[tuple[Place, Place]]:
    return list(itertools.combinations(asks.places, 2))[:MOST_PAIRS] or [(asks.places[0], asks.places[0])]


def _speed(asks: Asking, a: Place, b: Place) -> dict:
    first, second = _pair(asks, "speed", a, b, GLOO_S)
    try:
        return first.next("answer", timeout=SPEED_S)["answer"]
    finally:
        for asked in (first, second):
            asked.process.kill()


def _pair(asks: Asking, probe: str, a: Place, b: Place, timeout_s: float, **more: float) -> tuple[Asked, Asked]:
    first, second = (
        asks.start(place, probe, rank=rank, address=place.own_address(), timeout_s=timeout_s, **more)
        for rank, place in enumerate((a, b))
    )
    for asked in (first, second):
        asked.next("ready", timeout=READY_S)
    key = secrets.token_hex(32)
    for asked in (first, second):
        asked.write({"key": key})
    for asked, other in ((first, second), (second, first)):
        other.write(asked.next("set", timeout=FORMED_S))
    return first, second


def killed_peer(asks: Asking) -> dict:
    """Seconds from the kill of one of a pair until the other says that it has noticed."""
    a, b = pairs(asks)[0]
    first, second = _pair(asks, "survivor", a, b, KILLED_S)
    first.next("formed", timeout=FORMED_S)
    time.sleep(0.5)
    began = time.monotonic()
    second.process.kill()
    noticed = first.next("answer", timeout=KILLED_S + NOTICE_S)["answer"]["noticed"]
    return {"seconds": time.monotonic() - began, "timeout_s": KILLED_S, "noticed": noticed}


def silent_peer(asks: Asking) -> dict:
    """Of a pair, one takes no part: seconds until gloo itself gives the operation up."""
    first, _ = _pair(asks, "silent", *pairs(asks)[0], GROUP_S, operation_s=OPERATION_S)
    return first.next("answer", timeout=FORMED_S + OPERATION_S + NOTICE_S)["answer"]


def process_group(asks: Asking) -> list[dict]:
    """Start a process with a child in its group as a worker is started, kill it, and look who is left."""

    def one(each: Place) -> dict:
        asked = asks.start(each, "sit")
        event = asked.next("sits", timeout=20.0)
        asked.process.kill()
        left = asks.ask(each, "alive", pids=[event["pid"], event["child"]])
        sits = {"announced": asked.process.pid, "pid": event["pid"], "group": event["group"]}
        return {**sits, "shells": event["shells"], "left": len(left)}

    return asks.on_all(one)


def shapes(asks: Asking) -> list[dict]:
    return _with_model(asks, "shapes")


def memory(asks: Asking) -> list[dict]:
    return _with_model(asks, "memory")


def _with_model(asks: Asking, probe: str) -> list[dict]:
    return asks.on_all(lambda each: asks.ask(each, probe, model=each.model, device=each.host.device))


def doctor(asks: Asking) -> dict:
    """`multimac doctor --deep` on this machine, in a process of its own."""
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "doctor", "--deep", "--json"]
    device = asks.desk.hosts.master.device
    process = LocalMachine().start(command, cwd=str(PROJECT), env={"EXOGYM_DEVICE": device} if device else None)
    asks.at_end(process.kill)
    said = "\n".join(process.lines())
    try:
        return json.loads(said[said.index("{\n") :])
    except ValueError:
        raise ProbeLost(f"doctor ended with status {process.wait()}: {said[-300:]}") from None
