"""The quick checks of `multimac doctor` of what lies around Python: network, SSH, sleep, firewall.

What judges a program of macOS takes its output as text, so it is tested everywhere. None of these programs needs sudo.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from distributed.checkup.findings import Check, Finding, ok, problem, skipped, warning
from distributed.checkup.programs import is_macos, output_of
from distributed.ssh.local_network import FIREWALL, allow_lines, real_python

from .machine import shortened

SSH_PORT = 22
NOT_A_MAC = "checked on a Mac only"
CAFFEINATE = Path("/usr/bin/caffeinate")
KEYS = "id_ed25519 id_ecdsa id_rsa id_ed25519_sk id_ecdsa_sk"


def service_checks() -> list[Check]:
    return [
        Check("network", check_network),
        Check("ssh server", check_ssh_server),
        Check("ssh keys", lambda: check_ssh_keys(Path.home() / ".ssh", os.environ)),
        Check("sleep", check_sleep),
        Check("display", check_display),
        Check("firewall", check_firewall),
    ]


def check_network() -> Finding:
    """Look for addresses that other hosts could reach."""
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
    """Look for an SSH server, which every host needs but the one where commands are typed."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
            connection.settimeout(3)
            banner = connection.recv(64).decode("ascii", "replace").strip()
    except OSError as error:
        how = "`apt-get install openssh-server`, and start it"
        if is_macos():
            how = "System Settings > General > Sharing > Remote Login"
        return warning(f"nothing answers on port {port}: {error.strerror or error}", f"Only a worker needs it: {how}.")
    if not banner.startswith("SSH-"):
        return warning(f"what answers on port {port} is no SSH server: {banner!r}", "Free the port for sshd.")
    return ok(f"{banner} on port {port}")


def check_ssh_keys(folder: Path, variables: Mapping[str, str]) -> Finding:
    """Look for a key: the master needs one that the workers know."""
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
    """Count the keys that the agent holds; None if there is no agent."""
    if not agent_socket:
        return None
    try:
        done = subprocess.run(["ssh-add", "-l"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {0: len(done.stdout.splitlines()), 1: 0}.get(done.returncode)


def check_sleep() -> Finding:
    if not is_macos():
        return skipped(NOT_A_MAC)
    settings, source = output_of(["/usr/bin/pmset", "-g"]), output_of(["/usr/bin/pmset", "-g", "batt"])
    return judge_sleep(settings, source, CAFFEINATE.exists())


def judge_sleep(settings: str, source: str, caffeinate: bool) -> Finding:
    """Judge by the settings of `pmset -g`, those in use for the present power source, and by `pmset -g batt`.

    A Mac that sleeps is lost for a run as long; while the master does, nobody trains.
    """
    sleep = re.search(r"^\s*sleep\s+(\d+)(?:\s+\(sleep prevented by ([^)]*)\))?", settings, re.MULTILINE)
    is_disabled = re.search(r"^\s*SleepDisabled\s+1\s*$", settings, re.MULTILINE)
    if not sleep and not is_disabled:
        return warning("the output of `pmset -g` is not understood", "Send us its output.")
    never = is_disabled or sleep[1] == "0"
    awake = "never sleeps by itself" if never else f"sleeps after {sleep[1]} min"
    if sleep and sleep[2] and not is_disabled:
        awake += f" (kept awake right now by {', '.join(dict.fromkeys(sleep[2].split(', ')))})"
    if "Now drawing from 'Battery Power'" in source:
        charge = re.search(r"\d+%", source)  # a desktop has none
        detail = f"{awake}, on battery{f' at {charge[0]}' if charge else ''}"
        return warning(detail, "Connect the charger: on battery the GPU slows down and a closed lid sleeps.")
    detail = awake + (", on mains power" if "Now drawing from" in source else "")
    if never:
        return ok(detail)
    how = "A run keeps it awake by itself; until it starts" if caffeinate else "No caffeinate; `sudo pmset -c sleep 0`"
    return warning(detail, f"{how}: System Settings > Energy. And leave the lid open.")


def check_display() -> Finding:
    return judge_display(output_of(["/usr/bin/pmset", "-g"])) if is_macos() else skipped(NOT_A_MAC)


def judge_display(settings: str) -> Finding:
    """Judge the display: where it is on, macOS may end a long load of the GPU by restarting the Mac (mlx 3267)."""
    found = re.search(r"^\s*displaysleep\s+(\d+)(?:\s+\(display sleep prevented by ([^)]*)\))?", settings, re.MULTILINE)
    if not found:
        return ok("`pmset -g` names no display")
    if found[1] == "0":
        remedy = "System Settings > Lock Screen: turn it off when inactive. Before a run: `pmset displaysleepnow`."
        return warning("the display never sleeps: with one that is on, some Macs restart in a long run", remedy)
    kept = f" (kept on right now by {found[2]})" if found[2] else ""
    return ok(f"sleeps after {found[1]} min{kept}: a run does not keep it on")


def check_firewall() -> Finding:
    if not is_macos():
        return skipped(NOT_A_MAC)
    said = (output_of([FIREWALL, question]) for question in ("--getglobalstate", "--getblockall"))
    return judge_firewall(*said, real_python())


def judge_firewall(state: str, block_all: str, program: str) -> Finding:
    """Judge what the firewall says. program: the one that is to accept connections."""
    where = "System Settings > Network > Firewall"
    found = re.search(r"State = (\d)", state)
    if not found:
        return warning("the state of the application firewall is unknown", f"Look at {where}.")
    if found[1] == "2" or re.search(r"block all\b.*\benabled|(blocking|set to block) all", block_all, re.IGNORECASE):
        return problem("the application firewall blocks all incoming connections", f"{where} > Options.")
    if found[1] == "1":
        allow = shortened(allow_lines(program))
        remedy = f"On a headless Mac nobody can answer; with an administrator's password: {allow}."
        return warning("the application firewall is on and asks for each program that listens", remedy)
    return ok("the application firewall is off")
