"""Machines that SSH may reach: those that announce it in this network, and those that ssh has been told of."""

from __future__ import annotations

import contextlib
import ipaddress
import platform
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from distributed.ssh.authentication import known_keys
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host, resolve
from whisper_tuner.errors import AccessError, HostError, HostKeyError
from whisper_tuner.text import harmless, size

from .agent_call import agent_call
from .interfaces import kinds_of_links, own_interfaces, route_to

SERVICE = "_ssh._tcp"  # which macOS announces where Remote Login is on, and avahi where it is told to
LISTEN_S, ASK_S, CONNECT_S = 1.2, 1.0, 5.0
MOST_AT_ONCE = 32
MOST_ANNOUNCED = 64  # a stranger could announce any number, and each is asked for its address
ANNOUNCED, IN_FILE = "announced", "the hosts file"
CONFIG, KNOWN_HOSTS = Path("~/.ssh/config"), Path("~/.ssh/known_hosts")
# Lines of `dns-sd -B` and `dns-sd -L`, as Apple's dns-sd.c prints them; its man page says that they may change.
BROWSED = re.compile(r"^\s*\S+\s+(Add|Rmv)\s+\S+\s+\S+\s+\S+\s+_ssh\._tcp\.\s+(.+?)\s*$", re.MULTILINE)
LOCAL = re.compile(r"[\w-]+(\.local)?|[\d.]+|[\da-fA-F:]+")  # others are asked of the internet, which may not answer
NAME = re.compile(r"[\w:][\w.:%-]*", re.ASCII)
LOOKED_UP = re.compile(r"can be reached at (\S+?)\.?:(\d+) ")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A machine that may be reached. name: for a hosts file. label: what it calls itself. told_by: who knows of it.

    link: Wi-Fi, Ethernet or Thunderbolt, by which this machine reaches it; "" where that is not known.
    """

    name: str
    addresses: tuple[str, ...]
    port: int = 22
    label: str = ""
    told_by: str = ANNOUNCED
    link: str = ""

    @property
    def host(self) -> Host:
        return Host(address=self.name, port=None if self.port == 22 else self.port)


class State(Enum):
    READY = "ready"
    PAIRED = "paired"  # but without an environment of ours
    LOCKED = "no key opens it"
    NEW = "not paired"
    CHANGED = "its key has changed"
    SILENT = "does not answer"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A candidate that was looked at. about: what it is, or why it cannot be used."""

    candidate: Candidate
    state: State
    about: str = ""


def find(told: Sequence[Host] = (), listen_s: float = LISTEN_S) -> list[Candidate]:
    """List what announces itself, and of the names in `told`, ~/.ssh/config and known_hosts those in this network.

    Each machine once, by the name that it has there, without this one.
    """
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        listening = pool.submit(announced, listen_s)
        named = dict.fromkeys(known_hosts(KNOWN_HOSTS), "known_hosts")
        named |= dict.fromkeys(aliases(CONFIG), str(CONFIG)) | {host.address: IN_FILE for host in told}
        ports = {host.address: host.port for host in told}
        found = [*pool.map(lambda name: _resolved(name, ports.get(name), named[name]), reversed(named))]
        found += listening.result()
    own = {address for addresses in own_interfaces().values() for address in addresses}
    usable = (one for one in found if one.addresses and NAME.fullmatch(one.name))  # anybody may announce anything
    others = _apart(_each_once(replace(one, label=harmless(one.label)) for one in usable if not own & {*one.addresses}))
    kinds = kinds_of_links()
    return [replace(one, link=kinds.get(_interface_to(one), "")) for one in others]


def _apart(found: Sequence[Candidate]) -> list[Candidate]:
    """Name machines by their addresses that bear one name: by that only one of them would be reached."""
    count = Counter((one.name, one.port) for one in found)
    return [replace(one, name=one.addresses[0]) if count[one.name, one.port] > 1 else one for one in found]


def _interface_to(candidate: Candidate) -> str:
    with contextlib.suppress(HostError, StopIteration):
        return route_to(next(address for address in candidate.addresses if ":" not in address)).interface
    return ""


def _each_once(found: Iterable[Candidate]) -> list[Candidate]:
    """Leave out a machine that came before under another name: at one of the same addresses, with the same port."""
    kept: list[Candidate] = []
    for one in found:
        twin = next((k for k in kept if k.port == one.port and {*k.addresses} & {*one.addresses}), None)
        if twin is None:
            kept.append(one)
        elif one.label and not twin.label:
            kept[kept.index(twin)] = replace(twin, label=one.label)
    return kept


def announced(listen_s: float) -> list[Candidate]:
    """Listen to mDNS for so many seconds. Empty where this machine has no network for it."""
    if platform.system() == "Darwin" and shutil.which("dns-sd"):  # Apple's own may always use the local network
        return _by_dns_sd(listen_s) or _by_zeroconf(listen_s)
    return _by_zeroconf(listen_s)


def _by_dns_sd(listen_s: float) -> list[Candidate]:
    said = _said_within(["dns-sd", "-B", SERVICE, "local."], listen_s)
    gone = {label for change, label in BROWSED.findall(said) if change == "Rmv"}
    labels = dict.fromkeys(label for change, label in BROWSED.findall(said) if label not in gone)

    def look_up(label: str) -> Candidate | None:
        found = LOOKED_UP.search(_said_within(["dns-sd", "-L", label, SERVICE, "local."], ASK_S))
        if found is None:
            return None
        name, port = found[1], int(found[2])
        return Candidate(name=name, addresses=_addresses(name), port=port, label=label)

    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        return [one for one in pool.map(look_up, [*labels][:MOST_ANNOUNCED]) if one]


def _said_within(command: Sequence[str], seconds: float) -> str:
    """Return what a program that never ends prints in so many seconds."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        said = done.stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
    return said.decode("utf-8", "replace")


def _by_zeroconf(listen_s: float) -> list[Candidate]:
    from zeroconf import Error as ZeroconfError
    from zeroconf import ServiceBrowser, ServiceInfo, Zeroconf

    heard: dict[str, None] = {}
    service = f"{SERVICE}.local."
    try:
        listener = Zeroconf()
    except OSError:
        return []
    with listener:
        browser = ServiceBrowser(listener, service, handlers=[lambda name, **_: heard.setdefault(name)])
        time.sleep(listen_s)
        browser.cancel()

        def look_up(name: str) -> Candidate | None:
            try:
                info = ServiceInfo(service, name)
                if not info.load_from_cache(listener) and not info.request(listener, 1000 * ASK_S):
                    return None
            except ZeroconfError:  # anybody may announce anything
                return None
            if not info.server or not info.port:
                return None
            addresses = tuple(sorted(info.parsed_scoped_addresses(), key=lambda address: ":" in address))
            server, label = info.server.rstrip("."), name.removesuffix(f".{service}")
            if not _addresses(server) and addresses:  # a Linux without nss-mdns does not know names that end in .local
                server = addresses[0]
            return Candidate(name=server, addresses=addresses, port=info.port, label=label)

        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            return [one for one in pool.map(look_up, [*heard][:MOST_ANNOUNCED]) if one]


def aliases(config: Path) -> list[str]:
    """List the names of `Host` lines, without patterns. A file that cannot be read has none."""
    lines = (line.replace("=", " ", 1).split() for line in _lines(config))
    named = (name for key, *names in filter(None, lines) if key.lower() == "host" for name in names)
    return [name for name in named if not re.search(r"[*?!]", name)]


def known_hosts(file: Path) -> list[str]:
    """List the addresses and local names in a known_hosts file that are not hashed, on SSH's own port."""
    first = (line.split()[0] for line in _lines(file) if line.strip() and line[0] not in "#@|")
    return [name for names in first for name in names.split(",") if LOCAL.fullmatch(name)]


def _lines(path: Path) -> list[str]:
    try:
        return path.expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _resolved(name: str, port: int | None, told_by: str) -> Candidate:
    """Return where ssh would find a name; without addresses if that is not in a network at home, or behind a jump."""
    try:
        settings = resolve(Host(address=name, port=port))
    except HostError:
        return Candidate(name=name, addresses=(), told_by=told_by)
    is_direct = not (settings.jumps or settings.proxy_command)
    near = [address for address in _addresses(settings.hostname) if is_direct and _is_near(address)]
    return Candidate(name=name, addresses=tuple(near), port=settings.port, told_by=told_by)


def _is_near(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return not (found.is_global or found.is_loopback)


def _addresses(name: str) -> tuple[str, ...]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def look(candidates: Sequence[Candidate], told: Sequence[Host] = ()) -> list[Seen]:
    """Try each of them with the user's keys, all at once. One whose host key is not known is not spoken to.

    told: hosts of a hosts file, with the users and keys that stand there.
    """
    known = {host.address: host for host in told}
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        return [*pool.map(lambda one: _look(one, known.get(one.name, one.host)), candidates)]


def _look(candidate: Candidate, host: Host) -> Seen:
    try:
        settings = resolve(host)
        if not known_keys(settings.known_as, settings.known_hosts):
            return Seen(candidate=candidate, state=State.NEW, about=_only_ipv6(candidate))
        with Remote.connect(host, timeout=CONNECT_S) as remote:
            facts = agent_call(remote, "facts", python=remote.python, names=["torch"], project=host.project_path)
            chip = facts["machine"]
            if facts["system"] == "Darwin":
                chip = remote.run(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]).stdout.strip() or chip
    except HostKeyError as error:
        return Seen(candidate=candidate, state=State.CHANGED, about=_why(error))
    except AccessError as error:
        return Seen(candidate=candidate, state=State.LOCKED, about=_why(error))
    except HostError as error:
        return Seen(candidate=candidate, state=State.SILENT, about=_why(error))
    system = "macOS" if facts["system"] == "Darwin" else facts["system"]
    about = f"{system} {facts['release'].partition('-')[0]}, {chip}, {size(facts['memory']['total'])}"
    state = State.READY if facts["training"] and facts["versions"] else State.PAIRED
    return Seen(candidate=candidate, state=state, about=_only_ipv6(candidate) or about)


def _only_ipv6(candidate: Candidate) -> str:
    has_ipv4 = any(":" not in address for address in candidate.addresses)
    return "" if has_ipv4 else "has no IPv4 address, which training needs"


def _why(error: HostError) -> str:
    return str(error).partition("\n")[0].partition(": ")[2]


def why_none() -> str:
    """Say what to look at where no machine was found."""
    here = ", ".join(f"{name} {of[0]}" for name, of in own_interfaces().items() if of and not of[0].startswith("127."))
    is_mac = platform.system() == "Darwin"  # Macs and Linux machines do not train together
    lines = [
        "On the other Mac: System Settings > General > Sharing > Remote Login."
        if is_mac
        else "On the other machine: install openssh-server; it announces itself only with avahi-daemon and a service"
        " file for SSH.",
        f"Both must be in one network, not one of guests, which keeps machines apart. This one has: {here or 'none'}.",
    ]
    if is_mac:
        lines.append("Start from Terminal.app: macOS may not let other terminals reach the local network.")
    return "\n".join([*lines, "Or name its address: multimac hosts pair ADDRESS"])
