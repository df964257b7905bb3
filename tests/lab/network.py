"""Namespaces, one bridge, veth pairs, link speed and link faults.

Everything is named with PREFIX, so that `remove_all` finds it without any record of what was made.
"""

from __future__ import annotations

import contextlib
import json
import subprocess

from lab.errors import LabError
from lab.machine import needed, wished

PREFIX = "mmlab-"
BRIDGE = PREFIX + "br"
SUBNET = "10.77.0"
GATEWAY = f"{SUBNET}.1"
INTERFACE = "en0"  # the name inside each host
NFT_TABLE = "mmlab"
# Bytes of a packet until it is cut up for the wire. A network card cuts them, and puts them together where they arrive;
# veth passes them on whole. But tbf cuts those that are larger than its burst, and packets of 1,500 bytes took a tenth
# of a core of three hosts that trained.
LARGEST_PACKET = "32768"
LARGE_PACKETS = "large packets (gso_max_size)"
LIMITED_LINKS = "links of limited speed (tc, tbf)"


def sh(*command: str, check: bool = True, input: str | None = None) -> str:
    """Run one system command and return its stdout; LabError carries its stderr."""
    stdin = None if input else subprocess.DEVNULL
    # A program that is not installed fails with a status too, from `env`.
    result = subprocess.run(("env", *command), capture_output=True, text=True, input=input, stdin=stdin)
    if check and result.returncode:
        raise LabError(f"{' '.join(command)}: {(result.stderr or result.stdout).strip()}")
    return result.stdout


def address(index: int) -> str:
    """Address of host number `index`, counted from 1."""
    return f"{SUBNET}.{10 + index}"


def namespace(host: str) -> str:
    return PREFIX + host


def in_namespace(host: str, *command: str, check: bool = True, input: str | None = None) -> str:
    return sh("ip", "netns", "exec", namespace(host), *command, check=check, input=input)


def add_bridge() -> None:
    sh("ip", "link", "add", BRIDGE, "type", "bridge")
    sh("ip", "addr", "add", f"{GATEWAY}/24", "dev", BRIDGE)
    sh("ip", "link", "set", BRIDGE, "up")


def add_host(host: str, index: int) -> None:
    """A namespace with one interface on the bridge, and no route to anywhere else."""
    sh("ip", "netns", "add", namespace(host))
    in_namespace(host, "ip", "link", "set", "lo", "up")
    for name, other in (("cubic", "reno"), ("reno", "the machine's own")):  # macOS has cubic
        with wished(f"TCP's {name}", f"hosts have {other}"):
            in_namespace(host, "sh", "-c", f"echo {name} > /proc/sys/net/ipv4/tcp_congestion_control")
            break
    plug_in(host, INTERFACE, PREFIX + host, BRIDGE, address(index))


def plug_in(host: str, inside: str, outside: str, bridge: str, address: str) -> None:
    """An interface of the host's with an address, and its other end on a bridge."""
    sh("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", namespace(host))
    sh("ip", "link", "set", outside, "master", bridge, "up")
    in_namespace(host, "ip", "addr", "add", f"{address}/24", "dev", inside)
    in_namespace(host, "ip", "link", "set", inside, "up")
    with wished(LARGE_PACKETS, "sending costs more of the processor"):
        sh("ip", "link", "set", outside, "gso_max_size", LARGEST_PACKET)
        in_namespace(host, "ip", "link", "set", inside, "gso_max_size", LARGEST_PACKET)


def set_rate(host: str, rate: str | None) -> None:
    """Limit both directions of the host's link to `rate` (tc's words: '100mbit'); None lifts the limit."""
    if rate is None:
        in_namespace(host, "tc", "qdisc", "del", "dev", INTERFACE, "root", check=False)
        sh("tc", "qdisc", "del", "dev", PREFIX + host, "root", check=False)
        return
    limit = limit_to(rate)
    with needed(LIMITED_LINKS):
        in_namespace(host, "tc", "qdisc", "replace", "dev", INTERFACE, *limit)
        sh("tc", "qdisc", "replace", "dev", PREFIX + host, *limit)


def limit_to(rate: str) -> tuple[str, ...]:
    """What `tc qdisc` is told of an interface that sends at `rate`."""
    return ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms")


def rate(host: str) -> str | None:
    """The limit that `set_rate` set."""
    with needed(LIMITED_LINKS):
        found = json.loads(in_namespace(host, "tc", "-j", "qdisc", "show", "dev", INTERFACE, "root"))
    return next((f"{each['options']['rate'] * 8}bit" for each in found if each["kind"] == "tbf"), None)


def set_link(host: str, up: bool) -> None:
    """The cable in or out: without it nothing is sent, not even a FIN."""
    in_namespace(host, "ip", "link", "set", INTERFACE, "up" if up else "down")


def set_address(host: str, address: str) -> None:
    """Instead of the one that it has."""
    in_namespace(host, "ip", "-4", "addr", "flush", "dev", INTERFACE)
    in_namespace(host, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)


def drop(host: str, peer: str | None = None, way: str = "both") -> None:
    """Drop all packets from and to `peer` (an address; None: everybody) although the link stays up.

    way: "in" drops only what comes to the host, "out" only what it sends.
    """
    arriving = f"ip saddr {peer}" if peer else f'iifname "{INTERFACE}"'
    leaving = f"ip daddr {peer}" if peer else f'oifname "{INTERFACE}"'
    chains = {
        "in": f"chain input {{ type filter hook input priority 0; policy accept; {arriving} drop; }}",
        "out": f"chain output {{ type filter hook output priority 0; policy accept; {leaving} drop; }}",
    }
    chosen = chains.values() if way == "both" else [chains[way]]
    add_rules(host, "\n".join([f"table inet {NFT_TABLE} {{", *chosen, "}\n"]))


def add_rules(host: str, table: str) -> None:
    """A table of rules, in the words of `nft`."""
    with needed("rules that drop packets (nftables)"):
        in_namespace(host, "nft", "-f", "-", input=table)


def pass_all(host: str) -> None:
    """Undo `drop`."""
    in_namespace(host, "nft", "delete", "table", "inet", NFT_TABLE, check=False)


def namespaces() -> list[str]:
    lines = sh("ip", "netns", "list", check=False).splitlines()
    return [line.split()[0] for line in lines if line.startswith(PREFIX)]


def links() -> list[str]:
    lines = sh("ip", "-o", "link", "show", check=False).splitlines()
    names = [line.split(": ")[1].split("@")[0] for line in lines]
    return [name for name in names if name.startswith(PREFIX)]


def namespace_pids(name: str) -> list[int]:
    return [int(pid) for pid in sh("ip", "netns", "pids", name, check=False).split()]


def remove_all() -> None:
    """Delete every namespace and link of any lab; the processes must be gone already."""
    for name in namespaces():
        sh("ip", "netns", "del", name, check=False)
    for name in links():
        with contextlib.suppress(LabError):  # a veth goes with its peer
            sh("ip", "link", "del", name)
