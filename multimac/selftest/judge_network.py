"""What the answers about the network and about runs mean. Pure, as judge_machine.py."""

from __future__ import annotations

import re

from distributed.ssh.local_network import WAYS_OUT

from .judge_machine import each
from .rows import Row, failed, passed, unknown

SLOW_NAME_S = 2.0
SLOW_MBIT = 20.0
NOTICED_S = 1.0  # before gloo's time-out: so early only gloo itself notices
EHOSTUNREACH = {65, 113}  # macOS, Linux


def ssh(answers: list[dict]) -> list[Row]:
    return each("ssh", answers, lambda name, said: passed(name, said))


def code(answers: list[dict]) -> list[Row]:
    def judge(name: str, sent: dict) -> Row:
        return passed(name, f"{sent['files']} files sent in {sent['seconds']:.1f} s" if sent["files"] else "up to date")

    return each("code", answers, judge)


def interfaces(answers: list[dict]) -> list[Row]:
    return each("interfaces", answers, _interfaces)


def _interfaces(name: str, about: dict) -> Row:
    """gloo over uv would take an interface's first address: a link-local IPv6 one, on a Mac (pytorch #148440)."""
    ports = dict(re.findall(r"Hardware Port: (.*)\nDevice: (\S+)", _output(about, "ports")))
    hardware = {device: port for port, device in ports.items()}
    used = [one for one in about["interfaces"] if one["up"] and _has_ipv4(one) and not one["name"].startswith("lo")]
    if not used:
        return failed(name, "no interface with an IPv4 address but loopback")
    shown = []
    for one in used:
        kinds = list(dict.fromkeys(kind for _, kind in one["addresses"]))
        port = f" ({hardware[one['name']]})" if one["name"] in hardware else ""
        shown.append(f"{one['name']}{port}: {', '.join(kinds)}")
    behind = [one["name"] for one in used if one["addresses"][0][0] != "IPv4"]
    after = f". In {', '.join(behind)} IPv4 is not first, so gloo is bound by address" if behind else ""
    return passed(name, "; ".join(shown) + after, not_first=behind)


def _output(about: dict, program: str) -> str:
    return about["programs"].get(program, {}).get("output", "")


def _has_ipv4(one: dict) -> bool:
    return any(family == "IPv4" for family, _ in one["addresses"])


def names(answers: list[dict]) -> list[Row]:
    return each("names", answers, _names)


def _names(name: str, found: list[dict]) -> Row:
    wrong = [f"{one['name']}: {one['failed']}" for one in found if "failed" in one]
    wrong += [f"{one['name']} has no IPv4 address" for one in found if not _is_ipv4(one) and "failed" not in one]
    slowest = max((one["seconds"] for one in found), default=0.0)
    if wrong:
        return failed(name, "; ".join(wrong))
    if slowest > SLOW_NAME_S:
        return failed(name, f"a name took {slowest:.1f} s: put addresses into the hosts file")
    return passed(name, f"each host is found, the slowest in {1000 * slowest:.0f} ms")


def _is_ipv4(one: dict) -> bool:
    return any(family == "IPv4" for family, _ in one.get("addresses", ()))


def place(answers: list[dict]) -> list[Row]:
    def judge(name: str, found: dict) -> Row:
        way = f" on {found['interface']}" if found["interface"] else ""
        if "loopback" in found["address"]:
            return unknown(name, "this machine is in no network: only loopback can be tried")
        return passed(name, f"{found['address']}{way}")

    return each("own address", answers, judge)


def hosts_check(report: dict | None) -> list[Row]:
    if report is None:
        return []
    errors = [text for severity, _, text in report["problems"] if severity == "error"]
    if errors:
        return [failed("hosts check", "\n".join(errors))]
    rates = [mbit for _, _, _, mbit, _, _ in report["pairs"] if mbit]
    slowest = f", slowest link {min(rates):.0f} Mbit/s" if rates else ""
    warnings = "".join(f"\nwarning: {text}" for severity, _, text in report["problems"] if severity != "error")
    return [passed("hosts check", f"no errors in {report['seconds']:.1f} s{slowest}{warnings}")]


def connect(answers: list[dict]) -> list[Row]:
    rows = []
    for entry in answers:
        if "failed" in entry:
            rows.append(failed(f"connect, {entry['host']}", entry["failed"]))
            continue
        for link in entry["answer"]:
            rows.append(_connect(f"connect {entry['host']} -> {link['to']}", link))
    return rows


def _connect(name: str, link: dict) -> Row:
    """Attached to the terminal, and detached from it as a launcher is; by Python, and by Apple's own program."""
    here, there = _by_python(link), _by_python(link["detached"])
    if not here:
        error = link["python"]
        text = f"Python: {error['said']} ({error['errno']})"
        if error["errno"] in EHOSTUNREACH and _by_nc(link):
            return failed(name, f"{text}, but nc connects: Local Network privacy of macOS. {WAYS_OUT}")
        if _by_nc(link):
            return failed(name, f"{text}, but nc connects: something blocks this Python (firewall, privacy)")
        return failed(name, f"{text}{'' if link['nc'] is None else '; nc too'}: a firewall, or no way to that host")
    if not there:
        error = link["detached"]["python"]
        what = f"not once its parent is gone: {error['said']} ({error['errno']})"
        how = "A run would lose the network with its terminal: start it within `ssh localhost`"
        return failed(name, f"Python connects, but {what}. {how}")
    if not link["detached"]["alone"]:
        return unknown(name, "Python connects; the detached process kept its parent")
    by_nc = {None: "no nc here", True: "so does nc", False: "nc does not"}[_by_nc(link)]
    return passed(name, f"Python connects, also once its parent is gone ({by_nc})")


def _by_python(tried: dict) -> bool:
    return tried["python"]["ok"]


def _by_nc(tried: dict) -> bool | None:
    return None if tried["nc"] is None else tried["nc"]["ok"]


def gloo(answers: list[dict]) -> list[Row]:
    return [_gloo(entry) for entry in answers]


def _gloo(entry: dict) -> Row:
    a, b = entry["pair"]
    name = f"gloo {a} <-> {b}" if a != b else "gloo"
    if "failed" in entry:
        return failed(name, f"{entry['failed']}: ranks would not find each other")
    about = entry["answer"]
    rates = about["mbit"]
    sent = f"{about['bytes'] >> 20} MB"
    text = f"{rates['there']:.0f} Mbit/s there, {rates['back']:.0f} back, {rates['both']:.0f} all_reduce ({sent})"
    if not about["is_right"]:
        return failed(name, f"{text}: the sum is wrong", **about)
    if min(rates.values()) < SLOW_MBIT:
        return failed(name, f"{text}: use a cable, or move closer to the access point", **about)
    return passed(name, f"{text}, formed in {about['formed_s']:.1f} s", **about)


def killed_peer(about: dict) -> list[Row]:
    seconds, limit = about["seconds"], about["timeout_s"]
    text = f"noticed after {seconds:.1f} s"
    if seconds < limit - NOTICED_S:
        return [passed("killed peer", f"{text}, by gloo itself", **about)]
    return [passed("killed peer", f"{text}, only at gloo's time-out: in a run, the launcher is quicker", **about)]


def silent_peer(about: dict) -> list[Row]:
    asked, text = about["operation_s"], f"gloo gave an operation up after {about['seconds']:.1f} s"
    if about["has_ended"]:
        return [passed("silent peer", f"{text}; {asked:g} s were asked for", **about)]
    what = f"gloo does not keep to a single operation's time-out ({asked:g} s): it keeps buffers for longer"
    return [failed("silent peer", what, **about)]


def demo(about: dict) -> list[Row]:
    text = f"{about['rounds']} rounds in {about['seconds']:.0f} s"
    if about["status"] != 0:
        return [failed("demo", f"it ended with status {about['status']}: {about['message']}", **about)]
    if about["lost"]:
        lost = "; ".join(f"{host}: {reason}" for host, reason in about["lost"])
        return [failed("demo", f"{text}, but a host was lost: {lost}", **about)]
    if about["rounds"] < 2 or any(not host["steps"] for host in about["hosts"]):
        return [failed("demo", f"{text}: two were asked for, with steps of every host", **about)]
    hosts = ", ".join(f"{host['host']} {_step_s(host):.2f} s a step" for host in about["hosts"])
    return [passed("demo", f"{text}, nobody lost; {hosts}", **about)]


def _step_s(host: dict) -> float:
    return host["seconds"] / host["steps"]


def lid(answers: list[dict]) -> list[Row]:
    return each("lid", answers, _lid)


def _lid(name: str, about: dict) -> Row:
    own = about["own"]
    if own is None:
        return failed(name, f"it has not come back: silent for {about['silent_at_end_s']:.0f} s", **about)
    slept = own["wall_gap_s"]
    if not about["silences"] and slept < 3.0:
        return passed(name, f"it did not sleep; longest gap {slept:.1f} s", **about)
    when = ", ".join(f"from {begin:.0f} to {end:.0f} s" for begin, end in about["silences"])
    clock = f"its clocks jumped by {slept:.0f} s (wall) and {own['steady_gap_s']:.0f} s (monotonic)"
    way = "the connection survived" if about["connections"] == 1 else f"connections made: {about['connections']}"
    return passed(name, f"silent {when or 'nowhere'}; {clock}; {way}", **about)
