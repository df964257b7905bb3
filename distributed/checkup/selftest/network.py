"""What is asked of machines about the network between them, and what the answers mean.

Judging is pure, as in machine.py.
"""

from __future__ import annotations

import itertools
import re
import secrets
import time
from functools import partial

from distributed.checkup.findings import Finding, ok, skipped
from distributed.checkup.preflight import preflight
from distributed.hosts.interfaces import interface_with
from distributed.hosts.keep_awake import hosts_awake
from distributed.plan.hosts_file import address_towards, check_is_this_machine
from distributed.ssh.connection import Remote
from distributed.ssh.host import resolve
from distributed.ssh.local_network import WAYS_OUT
from distributed.ssh.machine import LocalMachine

from .asking import Asked, Asking, Place, told
from .machine import failed

CONNECT_S = 8.0
GLOO_S = 10.0  # gloo's own time-out in the tests
KILLED_S = 8.0
NOTICE_S = 10.0  # after gloo's time-out
GROUP_S, OPERATION_S = 60.0, 5.0  # of a silent peer: a group's time-out, and that of a single operation in it
READY_S, FORMED_S, SPEED_S = 25.0, 15.0, 30.0
MOST_PAIRS = 6  # over slow Wi-Fi one takes 15 s; of many hosts, the master with each comes first
SLOW_NAME_S = 2.0
SLOW_MBIT = 20.0
NOTICED_S = 1.0  # before gloo's time-out: so early only gloo itself notices
EHOSTUNREACH = {65, 113}  # macOS, Linux


def ask_ssh(asks: Asking) -> list[dict]:
    """Connect to all hosts; those that answer take part in all that follows."""
    desk = asks.desk
    check_is_this_machine(desk.hosts.master)
    master = Place(letter="A", host=desk.hosts.master, machine=LocalMachine(desk.hosts.master.address))
    waiting = [Place(letter=desk.letter(host), host=host, machine=master.machine) for host in desk.hosts.workers]

    def connect(each: Place) -> str:
        """Messages name a host as ~/.ssh/config does. Behind a jump its name is looked up there."""
        settings = resolve(each.host)
        each.name = "" if settings.jumps or settings.proxy_command else settings.hostname
        desk.sanitizer.learn([settings.hostname], each.letter)
        desk.sanitizer.learn([settings.user, *(jump.user for jump in settings.jumps if jump.user)], "USER")
        desk.sanitizer.learn([jump.address for jump in settings.jumps], "JUMP")
        each.machine = Remote.connect(each.host, timeout=CONNECT_S)
        return "connected"

    answers = asks.on_all(connect, waiting)
    desk.places = [master, *(each for each in waiting if isinstance(each.machine, Remote))]
    desk.held.enter_context(hosts_awake(asks.remotes))
    return [{"host": "A", "answer": "this machine"}, *answers]


def interfaces(about: dict) -> Finding:
    """Judge the interfaces. gloo over uv would take the first address: on a Mac a link-local one (pytorch #148440)."""
    said = about["programs"].get("ports", {}).get("output", "")
    hardware = {device: port for port, device in re.findall(r"Hardware Port: (.*)\nDevice: (\S+)", said)}
    used = [one for one in about["interfaces"] if one["up"] and _has_ipv4(one) and not one["name"].startswith("lo")]
    if not used:
        return failed("no interface with an IPv4 address but loopback")
    shown = []
    for one in used:
        kinds = list(dict.fromkeys(kind for _, kind in one["addresses"]))
        port = f" ({hardware[one['name']]})" if one["name"] in hardware else ""
        shown.append(f"{one['name']}{port}: {', '.join(kinds)}")
    behind = [one["name"] for one in used if one["addresses"][0][0] != "IPv4"]
    after = f". In {', '.join(behind)} IPv4 is not first, so gloo is bound by address" if behind else ""
    return ok("; ".join(shown) + after, not_first=behind)


def _has_ipv4(one: dict) -> bool:
    return any(family == "IPv4" for family, _ in one.get("addresses", ()))


def ask_names(asks: Asking) -> list[dict]:
    """Resolve names on the master, the only one that looks them up: its own, and those under which ssh knows hosts."""
    wanted = [asks.desk.hosts.master.address, *(each.name for each in asks.places[1:] if each.name)]
    return asks.on_all(lambda each: asks.ask(each, "network.names", names=wanted), asks.places[:1])


def names(found: list[dict]) -> Finding:
    wrong = [f"{one['name']}: {one['failed']}" for one in found if "failed" in one]
    wrong += [f"{one['name']} has no IPv4 address" for one in found if not _has_ipv4(one) and "failed" not in one]
    slowest = max((one["seconds"] for one in found), default=0.0)
    if wrong:
        return failed("; ".join(wrong))
    if slowest > SLOW_NAME_S:
        return failed(f"a name took {slowest:.1f} s: put addresses into the hosts file")
    return ok(f"each host is found, the slowest in {1000 * slowest:.0f} ms")


def ask_place(asks: Asking) -> list[dict]:
    """Find every host's own address, as a run would have it; on one machine alone, that on its own network."""
    remotes = asks.remotes
    peer = address_towards(asks.hosts, remotes) if remotes else ""

    def find(each: Place) -> dict:
        if peer and each is asks.places[0]:
            found = {"address": peer, "interface": interface_with(peer)}
        else:
            found = asks.ask(each, "network.place", peer=peer, interface=each.host.interface or "")
        each.address = found["address"]
        return found

    return asks.on_all(find)


def place(found: dict) -> Finding:
    if "loopback" in found["address"]:
        return skipped("this machine is in no network: only loopback can be tried")
    return ok(f"{found['address']} on {found['interface']}" if found["interface"] else found["address"])


def ask_preflight(asks: Asking) -> dict | None:
    """Look at all hosts as before a run. None on one machine alone."""
    if len(asks.places) < 2:
        return None
    with preflight(None, asks.hosts) as report:
        asks.desk.machine_workers = report.machine_workers
        for each, facts in zip(asks.places, report.hosts, strict=True):
            each.address = facts.address or each.address
        letters = {each.host.address: each.letter for each in asks.places}
        pairs = [[letters[p.source], letters[p.target], p.latency_s, p.mbit, p.failed, p.errno] for p in report.pairs]
        problems = [[found.severity, found.check, str(found)] for found in report.problems]
        return {"seconds": report.seconds, "pairs": pairs, "problems": problems}


def hosts_check(report: dict | None) -> list[Finding]:
    if report is None:
        return []
    errors = [text for severity, _, text in report["problems"] if severity == "error"]
    if errors:
        return [failed("\n".join(errors))]
    rates = [mbit for _, _, _, mbit, _, _ in report["pairs"] if mbit]
    slowest = f", slowest link {min(rates):.0f} Mbit/s" if rates else ""
    warnings = "".join(f"\nwarning: {text}" for _, _, text in report["problems"])
    return [ok(f"no errors in {report['seconds']:.1f} s{slowest}{warnings}")]


def ask_connect(asks: Asking) -> list[dict]:
    """Connect from every host to each other; alone, to this machine's own address."""
    ports: dict[str, int] = {}

    def listen(each: Place) -> None:
        asked = asks.start(each, "network.listen", address=each.own_address())
        ports[each.letter] = asked.next("listening", timeout=15.0)["port"]

    silent = [answer for answer in asks.on_all(listen) if "failed" in answer]

    def connect_to_others(each: Place) -> list[dict]:
        others = [other for other in asks.places if other is not each or len(asks.places) == 1]
        targets = [[other.letter, other.address, ports[other.letter]] for other in others if other.letter in ports]
        return asks.ask(each, "network.connect", targets=targets)

    return silent + asks.on_all(connect_to_others)


def connect(answers: list[dict]) -> list[Finding]:
    rows = []
    for entry in answers:
        if "failed" in entry:
            rows.append(failed(entry["failed"]).named(f"connect, {entry['host']}"))
            continue
        for link in entry["answer"]:
            rows.append(_connection(link).named(f"connect {entry['host']} -> {link['to']}"))
    return rows


def _connection(link: dict) -> Finding:
    """Judge a connection from a process of the terminal and from one detached from it; by Python, and by nc."""
    here, detached, nc = link["python"], link["detached"], link["nc"]
    if not here["ok"]:
        text = f"Python: {here['said']} ({here['errno']})"
        if nc and nc["ok"] and here["errno"] in EHOSTUNREACH:
            return failed(f"{text}, but nc connects: Local Network privacy of macOS. {WAYS_OUT}")
        if nc and nc["ok"]:
            return failed(f"{text}, but nc connects: something blocks this Python (firewall, privacy)")
        return failed(f"{text}{'' if nc is None else '; nc too'}: a firewall, or no way to that host")
    if not detached["python"]["ok"]:
        error = detached["python"]
        what = f"not once its parent is gone: {error['said']} ({error['errno']})"
        how = "A run would lose the network with its terminal: start it within `ssh localhost`"
        return failed(f"Python connects, but {what}. {how}")
    if not detached["alone"]:
        return skipped("Python connects; the detached process kept its parent")
    by_nc = "no nc here" if nc is None else "so does nc" if nc["ok"] else "nc does not"
    return ok(f"Python connects, also once its parent is gone ({by_nc})")


def ask_gloo(asks: Asking) -> list[dict]:
    """Measure pairs of hosts, one after the other; alone, two processes on this machine's own address."""

    def speed(a: Place, b: Place) -> dict:
        first, second = _joined(asks, "gloo.speed", a, b, GLOO_S)
        try:
            return first.next("answer", timeout=SPEED_S)["answer"]
        finally:
            for asked in (first, second):
                asked.process.kill()

    return [{"pair": [a.letter, b.letter], **told(partial(speed, a, b))} for a, b in _pairs(asks)]


def _pairs(asks: Asking) -> list[tuple[Place, Place]]:
    return list(itertools.combinations(asks.places, 2))[:MOST_PAIRS] or [(asks.places[0], asks.places[0])]


def _joined(asks: Asking, probe: str, a: Place, b: Place, timeout_s: float, **more: float) -> tuple[Asked, Asked]:
    """Start a probe on two machines, and tell each what the other sets in the store of their group."""
    first, second = (
        asks.start(place, probe, rank=rank, address=place.own_address(), timeout_s=timeout_s, **more)
        for rank, place in enumerate((a, b))
    )
    for asked in (first, second):
        asked.next("ready", timeout=READY_S)
    key = secrets.token_hex(32)
    for asked in (first, second):
        asked.tell({"key": key})
    for asked, other in ((first, second), (second, first)):
        other.tell(asked.next("set", timeout=FORMED_S))
    return first, second


def gloo(answers: list[dict]) -> list[Finding]:
    def judge(entry: dict) -> Finding:
        if "failed" in entry:
            return failed(f"{entry['failed']}: ranks would not find each other")
        about = entry["answer"]
        rates, sent = about["mbit"], f"{about['bytes'] >> 20} MB"
        text = f"{rates['there']:.0f} Mbit/s there, {rates['back']:.0f} back, {rates['both']:.0f} all_reduce ({sent})"
        if not about["is_right"]:
            return failed(f"{text}: the sum is wrong", **about)
        if min(rates.values()) < SLOW_MBIT:
            return failed(f"{text}: use a cable, or move closer to the access point", **about)
        return ok(f"{text}, formed in {about['formed_s']:.1f} s", **about)

    rows = []
    for entry in answers:
        a, b = entry["pair"]
        rows.append(judge(entry).named(f"gloo {a} <-> {b}" if a != b else "gloo"))
    return rows


def ask_killed_peer(asks: Asking) -> dict:
    """Measure the seconds from the kill of one of a pair until the other says that it has noticed."""
    first, second = _joined(asks, "gloo.survivor", *_pairs(asks)[0], KILLED_S)
    first.next("formed", timeout=FORMED_S)
    time.sleep(0.5)
    began = time.monotonic()
    second.process.kill()
    noticed = first.next("answer", timeout=KILLED_S + NOTICE_S)["answer"]["noticed"]
    return {"seconds": time.monotonic() - began, "timeout_s": KILLED_S, "noticed": noticed}


def killed_peer(about: dict) -> list[Finding]:
    seconds, limit = about["seconds"], about["timeout_s"]
    text = f"noticed after {seconds:.1f} s"
    if seconds < limit - NOTICED_S:
        return [ok(f"{text}, by gloo itself", **about)]
    return [ok(f"{text}, only at gloo's time-out: in a run, the launcher is quicker", **about)]


def ask_silent_peer(asks: Asking) -> dict:
    """Measure the seconds until gloo itself gives an operation up in which the other one of a pair takes no part."""
    first, _ = _joined(asks, "gloo.silent", *_pairs(asks)[0], GROUP_S, operation_s=OPERATION_S)
    return first.next("answer", timeout=FORMED_S + OPERATION_S + NOTICE_S)["answer"]


def silent_peer(about: dict) -> list[Finding]:
    asked, text = about["operation_s"], f"gloo gave an operation up after {about['seconds']:.1f} s"
    if about["has_ended"]:
        return [ok(f"{text}; {asked:g} s were asked for", **about)]
    what = f"gloo does not keep to a single operation's time-out ({asked:g} s): it keeps buffers for longer"
    return [failed(what, **about)]
