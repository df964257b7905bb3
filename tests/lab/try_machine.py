"""`python try_machine.py [FOLDER] [tunnel]`: what the lab is for, on a host whose home lies in FOLDER; prints JSON.

`lacking` is what the lab goes on without, `refused` what cannot be done then, `left` what is there after its end.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from waiting import wait_until

from lab import Lab, LabLacks, cpu, machine, network, wireguard
from lab.hosts import state


def use(lab: Lab) -> None:
    there = lab.exec("h1", ["ssh", lab["h1"].address, "hostname; ls -A ~/.ssh"])
    assert there.stdout.split()[:2] == ["h1", "authorized_keys"], there
    sleeper = lab.popen("h1", ["sleep", "606"])
    wait_until(lambda: lab.processes("h1", "sleep 606"), tell=lambda: lab["h1"].processes())
    lab["h1"].freeze()
    assert {state(pid) for pid in lab["h1"].pids()} == {"T"}
    lab["h1"].thaw()
    lab.kill("h1", "sleep 606")
    assert sleeper.wait(5)


def refusals(lab: Lab, tunnel: bool) -> dict[str, str]:
    """What needs more than hosts, each with the reason if it is refused."""
    asked = {
        "speed": lambda: network.rate("h1") is None and lab.set_rate("h1", "1mbit"),
        "share": lambda: lab.set_cpus("h1", 0.25),
        "rules": lambda: lab.drop("h1"),
    } | ({"tunnel": lambda: wireguard.private_network(lab).__enter__()} if tunnel else {})
    return {name: reason for name, ask in asked.items() if (reason := refusal(ask))}


def refusal(ask: Callable[[], object]) -> str:
    try:
        ask()
    except LabLacks as error:
        return str(error)
    return ""


def main(folder: str = "", tunnel: str = "") -> None:
    homes = Path(tempfile.mkdtemp(dir=folder or None), "homes")
    with Lab(hosts=1, cpus=0.5, rate="100mbit", folder=homes) as lab:
        use(lab)
        other = ("tc", "qdisc", "replace", "dev", network.INTERFACE, "root", "pfifo")  # as a machine's default
        subprocess.run(["ip", "netns", "exec", network.namespace("h1"), *other], check=False)
        refused = refusals(lab, bool(tunnel))
    left = [*network.namespaces(), *network.links(), *map(str, cpu.groups())]
    print(json.dumps({"lacking": sorted(machine.lacking), "refused": refused, "left": left}))


if __name__ == "__main__":
    main(*sys.argv[1:])
