"""The quick checks of `multimac doctor` of what lies around Python: network, SSH, sleep, firewall."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from . import macos
from .checks import Check, Finding, ok, problem, skipped, warning

SSH_PORT = 22
NOT_A_MAC = "asked on a Mac only"
KEYS = "id_ed25519 id_ecdsa id_rsa id_ed25519_sk id_ecdsa_sk"


def service_checks() -> list[Check]:
    return [
        Check("network", check_network),
        Check("ssh server", check_ssh_server),
        Check("ssh keys", lambda: check_ssh_keys(Path.home() / ".ssh", os.environ)),
        Check("sleep", check_sleep),
        Check("firewall", check_firewall),
    ]


def check_network() -> Finding:
    """The addresses that other hosts could reach."""
    import psutil

    from distributed.hosts.interfaces import UNFIT, own_interfaces

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {name: of[0] for name, of in own_interfaces().items() if of and name in up and not of[0].startswith("127.")}
    fit = {name: address for name, address in found.items() if not UNFIT.fullmatch(name)}
    unfit = found.keys() - fit.keys()
    shown = ", ".join(f"{name} {address}" for name, address in fit.items())
    if not fit:
        aside = f" (not used: {', '.join(sorted(unfit))})" if unfit else ""
        return warning(f"no interface that another host could reach{aside}", "Join a network, or train alone.")
    if all(address.startswith("169.254.") for address in fit.values()):
        return warning(f"{shown}: self-assigned addresses only", "Without a router, give both Macs fixed addresses.")
    return ok(shown, **fit)


def check_ssh_server(port: int = SSH_PORT) -> Finding:
    """Needed on every host but the one where commands are typed."""
    switched = macos.remote_login() if macos.is_macos() else None
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
            connection.settimeout(3)
            banner = connection.recv(64).decode("ascii", "replace").strip()
    except OSError as error:
        said = "Remote Login is on, yet " if switched else ""
        remedy = "Only a worker needs it: System Settings > General > Sharing > Remote Login."
        if not macos.is_macos():
            remedy = "Only a worker needs it: `apt-get install openssh-server`, and start it."
        return warning(f"{said}nothing answers on port {port}: {error.strerror or error}", remedy)
    if not banner.startswith("SSH-"):
        return warning(f"what answers on port {port} is no SSH server: {banner!r}", "Free the port for sshd.")
    return ok(f"{banner} on port {port}")


def check_ssh_keys(folder: Path, variables: Mapping[str, str]) -> Finding:
    """The master needs a key that the workers know."""
    keys = [folder / name for name in KEYS.split() if (folder / name).is_file()]
    agent = _agent_keys(variables.get("SSH_AUTH_SOCK", ""))
    open_to_others = [key.name for key in keys if key.stat().st_mode & 0o077]
    if open_to_others:
        names = " ".join(f"~/.ssh/{name}" for name in open_to_others)
        return warning(f"{', '.join(open_to_others)} can be read by others: ssh refuses it", f"chmod 600 {names}")
    shown = ", ".join(key.name for key in keys) or "no key file"
    detail = f"{shown}; agent: {'none' if agent is None else f'{agent} keys'}"
    if not keys and not agent:
        return warning(detail, "On the Mac where you type: `ssh-keygen -t ed25519`, then `ssh-copy-id USER@HOST`.")
    return ok(detail)


def _agent_keys(agent_socket: str) -> int | None:
    """How many keys the agent holds; None if there is no agent."""
    if not agent_socket:
        return None
    try:
        done = subprocess.run(["ssh-add", "-l"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {0: len(done.stdout.splitlines()), 1: 0}.get(done.returncode)


def check_sleep() -> Finding:
    if not macos.is_macos():
        return skipped(NOT_A_MAC)
    return judge_sleep(macos.sleep(), macos.power(), macos.CAFFEINATE.exists())


def judge_sleep(sleep: macos.Sleep | None, power: macos.Power | None, caffeinate: bool) -> Finding:
    """A Mac that sleeps is lost for a run as long; while the master does, nobody trains."""
    if sleep is None:
        return warning("`pmset -g` says nothing that is understood", "Send us its output.")
    awake = "never sleeps by itself" if not sleep.minutes else f"sleeps after {sleep.minutes} min"
    held = f" (held awake just now by {', '.join(sleep.held_by)})" if sleep.held_by else ""
    charge = "" if power is None or power.percent is None else f" at {power.percent}%"
    source = "" if power is None else ", on battery" + charge if power.on_battery else ", on mains power"
    detail = f"{awake}{held}{source}"
    if power and power.on_battery:
        return warning(detail, "Connect the charger: on battery the GPU slows down and a closed lid sleeps.")
    if sleep.minutes:
        held = (
            "A run keeps it awake by itself; until it starts"
            if caffeinate
            else "No caffeinate here; `sudo pmset -c sleep 0`"
        )
        return warning(detail, f"{held}: System Settings > Energy. And leave the lid open.")
    return ok(detail)


def check_firewall() -> Finding:
    if not macos.is_macos():
        return skipped(NOT_A_MAC)
    return judge_firewall(macos.firewall())


def judge_firewall(state: str | None) -> Finding:
    settings = "System Settings > Network > Firewall"
    if state is None:
        return warning("the application firewall does not say its state", f"Look at {settings}.")
    if state == "blocks all":
        return problem("the application firewall blocks all incoming connections", f"{settings} > Options.")
    if state == "on":
        remedy = f"{settings} > Options: allow .venv's python, or nobody can answer its question on a headless Mac."
        return warning("the application firewall is on and asks for each program that listens", remedy)
    return ok("the application firewall is off")
