"""`python -m lab up|down|status|exec|shell|link|cpu`: a lab of hosts on this machine (Linux, root)."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import warnings
from pathlib import Path

from lab.errors import LabError
from lab.lab import PROJECT, Lab, down, load


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="build the lab; it stays until `down`")
    up.add_argument("--hosts", type=int, default=3)
    up.add_argument("--cpus", type=float, default=None, help="cores per host, e.g. 0.5")
    up.add_argument("--rate", default="100mbit", help="link speed each way; 'none' for no limit")
    up.add_argument("--shared-home", action="store_true", help="one home, the repository visible everywhere")
    up.add_argument("--folder", type=Path, default=PROJECT / ".lab", help="where the hosts' homes live, and stay")
    commands.add_parser("down", help="remove everything but the hosts' homes")
    commands.add_parser("status", help="hosts, addresses, processes")
    run = commands.add_parser("exec", help="run a command in a host")
    run.add_argument("host")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- CMD")
    shell = commands.add_parser("shell", help="a shell in a host")
    shell.add_argument("host")
    link = commands.add_parser("link", help="link speed and faults")
    link.add_argument("host")
    link.add_argument("--rate", help="e.g. 100mbit, or 'none'")
    fault = link.add_mutually_exclusive_group()
    fault.add_argument("--down", dest="up", action="store_false", default=None)
    fault.add_argument("--up", dest="up", action="store_true", default=None)
    fault.add_argument("--drop", action="store_true", help="drop all packets, the link stays up")
    fault.add_argument("--pass", dest="pass_all", action="store_true", help="undo --drop")
    share = commands.add_parser("cpu", help="cores per host")
    share.add_argument("host")
    share.add_argument("cpus", help="e.g. 0.5, or 'none'")
    return root


def status() -> None:
    record = load()
    if not record.get("hosts"):
        print("no lab is up")
        return
    print(f"folder {record['folder']}")
    lab = Lab.current()
    for host in lab.hosts.values():
        print(f"{host.name}  {host.address}  {len(host.processes())} processes")
        for process in host.processes():
            print(f"    {process}")


def set_link(options: argparse.Namespace) -> None:
    lab = Lab.current()
    if options.rate:
        lab.set_rate(options.host, none_or(options.rate))
    if options.up is not None:
        lab.link(options.host, up=options.up)
    if options.drop:
        lab.drop(options.host)
    if options.pass_all:
        lab.pass_all(options.host)


def none_or(text: str) -> str | None:
    return None if text == "none" else text


def run(options: argparse.Namespace) -> int:
    if options.command == "up":
        lab = Lab(
            hosts=options.hosts,
            cpus=options.cpus,
            rate=none_or(options.rate),
            shared_home=options.shared_home,
            folder=options.folder,
        ).up()
        print("\n".join(f"{host.name}  {host.address}" for host in lab.hosts.values()))
    elif options.command == "down":
        down()
    elif options.command == "status":
        status()
    elif options.command == "link":
        set_link(options)
    elif options.command == "cpu":
        cpus = none_or(options.cpus)
        Lab.current().set_cpus(options.host, None if cpus is None else float(cpus))
    else:
        argv = ["bash", "-i"] if options.command == "shell" else options.argv[options.argv[:1] == ["--"] :]
        return subprocess.run(Lab.current()[options.host].command(argv)).returncode
    return 0


def main() -> int:
    warnings.showwarning = lambda message, *place: print(f"lab: {message}", file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a lab that is half built is taken down
    try:
        return run(parser().parse_args())
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
