"""A private network over the lab's, as owners of Macs have it with WireGuard or Tailscale; needs wireguard-go.

wireguard-go is WireGuard in user space, so the kernel needs nothing but /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lab import network
from lab.errors import LabError, LabLacks
from lab.keys import PRIVATE
from lab.lab import Lab
from lab.machine import needed

PORT = 51820
SUBNET = "10.78.0"
NFT_TABLE = "mmlab-wg"
START_TIMEOUT_S = 5.0
ONLY_ENCRYPTED = f"""\
table inet {NFT_TABLE} {{
  chain input {{
    type filter hook input priority 0; policy accept;
    iifname "{network.INTERFACE}" udp dport {PORT} accept
    iifname "{network.INTERFACE}" drop
  }}
}}
"""


def address(lab: Lab, host: str) -> str:
    return f"{SUBNET}.{lab[host].address.rpartition('.')[2]}"


def interface(host: str) -> str:
    return f"wg-{host}"  # their control sockets lie in one folder


@contextlib.contextmanager
def private_network(lab: Lab) -> Iterator[None]:
    """Each host of a lab also as `address`, on `interface`, its sshd too; nothing else passes between hosts."""
    if shutil.which("wireguard-go") is None or shutil.which("wg") is None:
        raise LabLacks("not installed: WireGuard (apt-get install wireguard-go wireguard-tools)")
    with needed("network devices of programs (/dev/net/tun)"):
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    keys = {name: network.sh("wg", "genkey").strip() for name in lab.hosts}
    with contextlib.ExitStack() as undo:
        for name in lab.hosts:
            undo.enter_context(_tunnel(lab, name, keys))
            undo.enter_context(_sshd(lab, name))
        for name in lab.hosts:  # so that known_hosts has it under its new address
            met = lab.exec("h1", ["ssh", "-o", "StrictHostKeyChecking=accept-new", address(lab, name), "true"])
            if met.returncode:
                raise LabError(f"h1 cannot reach {name} over {interface('h1')}: {met.stderr.strip()}")
        yield


@contextlib.contextmanager
def _tunnel(lab: Lab, name: str, keys: dict[str, str]) -> Iterator[None]:
    device = interface(name)
    settings = f"[Interface]\nPrivateKey = {keys[name]}\nListenPort = {PORT}\n"
    for peer in set(keys) - {name}:
        public = network.sh("wg", "pubkey", input=keys[peer]).strip()
        settings += f"[Peer]\nPublicKey = {public}\nEndpoint = {lab[peer].address}:{PORT}\n"
        settings += f"AllowedIPs = {address(lab, peer)}/32\n"
    command = ["ip", "netns", "exec", network.namespace(name), "wireguard-go", "--foreground", device]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as tunnel:
        try:
            _wait(lambda: Path(f"/var/run/wireguard/{device}.sock").exists(), f"{device} did not come up")
            network.in_namespace(name, "wg", "setconf", device, "/dev/stdin", input=settings)
            network.in_namespace(name, "ip", "addr", "add", f"{address(lab, name)}/24", "dev", device)
            network.in_namespace(name, "ip", "link", "set", device, "up", "mtu", "1420")
            network.add_rules(name, ONLY_ENCRYPTED)
            yield
        finally:
            network.in_namespace(name, "nft", "delete", "table", "inet", NFT_TABLE, check=False)
            tunnel.terminate()


@contextlib.contextmanager
def _sshd(lab: Lab, name: str) -> Iterator[None]:
    """One more, for the new address."""
    listen = ["-o", f"ListenAddress={address(lab, name)}:22"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with lab.popen(name, ["/usr/sbin/sshd", "-D", "-f", f"{PRIVATE}/sshd_config", *listen], **quiet) as sshd:
        try:
            heard = f"{address(lab, name)}:22"
            _wait(lambda: heard in network.in_namespace(name, "ss", "-Hltn"), f"{name}: no sshd on {heard}")
            yield
        finally:
            lab.kill(name, f"ListenAddress={heard}")
            sshd.wait()


def _wait(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while not true():
        if time.monotonic() > end:
            raise LabError(what)
        time.sleep(0.05)
