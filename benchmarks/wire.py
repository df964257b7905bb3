"""Our counter of bytes against what the interfaces of four lab hosts have sent: `strategies.py --wire`."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen

from benchmarks.digits import LARGE, NODES, new_net
from benchmarks.results import current_commit, listed, table, write_section
from benchmarks.strategy_settings import Entry
from benchmarks.wire_rank import WAIT_S, WireSpec
from exogym.comm.process_group import local_store
from exogym.membership.coordinator import Coordinator
from lab import Lab, LabError, LabHost
from lab.network import GATEWAY, INTERFACE, in_namespace

PROJECT = Path(__file__).resolve().parent.parent
STEPS, QUICK_STEPS = 100, 10
RUN_S = 300.0  # for a run to end
WITHIN = 0.10
HEADER = 66  # bytes of a packet: Ethernet 14, IPv4 20, TCP 20 and its time stamps 12
HEAD = ("strategy", "counter, MB", "interface, MB", "more, %", "packets", "headers, kB", "votes, kB")
NAMES = tuple(f"h{number}" for number in range(1, NODES + 1))


@dataclass(frozen=True, kw_only=True)
class Host:
    """What one host has sent. counted: by our counter; votes: lines to the coordinator; both without headers."""

    counted: int
    votes: int
    sent: int
    packets: int

    @property
    def more(self) -> float:
        return self.sent / self.counted - 1 if self.counted else float("inf")


class Meeting:
    """The coordinator, as a launcher has it, and a thread for each rank that listens to it."""

    def __init__(self, names: Sequence[str], address: str):
        self.store = local_store(WAIT_S, address)
        self.results: dict[str, dict] = {}
        self._listener = socket.create_server((address, 0))
        self._coordinator = Coordinator(names, self._send, lambda event: None, clock=time.monotonic)
        self._connections: dict[str, socket.socket] = {}
        self._lock = threading.RLock()  # the coordinator is not made for threads
        for _ in names:
            threading.Thread(target=self._listen, daemon=True).start()

    @property
    def control_port(self) -> int:
        return self._listener.getsockname()[1]

    def close(self) -> None:
        for connection in (self._listener, *self._connections.values()):
            connection.close()

    def _send(self, name: str, message: dict) -> None:
        self._connections[name].sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        connection, _ = self._listener.accept()
        name = ""
        for line in connection.makefile("rb"):
            message = json.loads(line)
            with self._lock:
                if message["type"] == "ready":
                    name = message["name"]
                    self._connections[name] = connection
                    self._coordinator.ready(name)
                elif message["type"] == "result":
                    self.results[name] = message
                elif message["type"] in ("vote", "round_end", "trouble"):
                    getattr(self._coordinator, message["type"])(name, message)


def measure(lab: Lab, entry: Entry, steps: int, log: Path) -> list[Host]:
    """One run on all hosts; what each of them has sent from before its rank starts until after it has ended."""
    meeting = Meeting(NAMES, GATEWAY)
    ranks: list[Popen] = []
    try:
        before = {name: sent_by(name) for name in NAMES}
        with log.open("w") as console:
            ranks += [start(lab[name], lab, meeting, entry, steps, console) for name in NAMES]
        wait_for(meeting, ranks, log)
        after = {name: sent_by(name) for name in NAMES}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for name in NAMES:
            lab.kill(name, "benchmarks.wire_rank")
        meeting.close()
    results = [meeting.results[name] for name in NAMES]
    grown = [[b - a for a, b in zip(before[name], after[name], strict=True)] for name in NAMES]
    return [
        Host(counted=result["sent"], votes=result["said"], sent=sent, packets=packets)
        for result, (sent, packets) in zip(results, grown, strict=True)
    ]


def start(host: LabHost, lab: Lab, meeting: Meeting, entry: Entry, steps: int, console) -> Popen:
    spec = WireSpec(
        name=host.name,
        hosts=NAMES,
        address=host.address,
        meeting=GATEWAY,
        store_port=meeting.store.port,
        control_port=meeting.control_port,
        key=entry.key,
        net="large",
        steps=steps,
    )
    command = [sys.executable, "-m", "benchmarks.wire_rank", json.dumps(asdict(spec))]
    env = {"PYTHONPATH": f"{PROJECT / 'gym'}:{PROJECT}", "OMP_NUM_THREADS": "1"}
    return lab.popen(host.name, command, env=env, cwd=str(PROJECT), stdout=console, stderr=console)


def wait_for(meeting: Meeting, ranks: Sequence[Popen], log: Path) -> None:
    deadline = time.monotonic() + RUN_S
    while len(meeting.results) < len(ranks):
        if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
            raise SystemExit(f"the run did not end:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)
    time.sleep(0.5)  # acknowledgements are still on their way


def sent_by(name: str) -> tuple[int, int]:
    """Bytes and packets, as /proc/net/dev of the host has them."""
    for line in in_namespace(name, "cat", "/proc/net/dev").splitlines():
        interface, _, numbers = line.partition(":")
        if interface.strip() == INTERFACE:
            values = list(map(int, numbers.split()))
            return values[8], values[9]
    raise LabError(f"{name} has no {INTERFACE}")


def compare_counters(entries: Sequence[Entry], out: Path, *, is_quick: bool) -> int:
    """What is done is kept, as in the other runs."""
    steps, kept = QUICK_STEPS if is_quick else STEPS, out / "wire.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    lines = kept.read_text().splitlines() if kept.exists() else []
    done = {(r["key"], r["settings"], r["steps"]): r for r in map(json.loads, lines)}
    rows: dict[str, list[Host]] = {}
    commits = []
    with LazyLab() as lab:
        for entry in entries:
            task = (entry.key, json.dumps(dict(entry.settings)), steps)
            if task not in done:
                hosts = measure(lab.up(), entry, steps, out / f"wire-{entry.key}.log")
                record = dict(zip(("key", "settings", "steps"), task, strict=True)) | {"commit": current_commit()}
                done[task] = record | {"hosts": [asdict(host) for host in hosts]}
                with kept.open("a") as file:
                    file.write(json.dumps(done[task]) + "\n")
            rows[entry.name] = [Host(**host) for host in done[task]["hosts"]]
            commits.append(done[task]["commit"])
            print(row(entry.name, rows[entry.name]), flush=True)
    lines = report(rows, steps)
    print("\n".join(lines))
    if not is_quick:
        write_section("strategies: the counter and the wire", lines, commits)
    return 0


class LazyLab:
    """Built when it is first needed: where all is done already there is none."""

    def __init__(self) -> None:
        self._lab: Lab | None = None

    def __enter__(self) -> LazyLab:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lab:
            self._lab.__exit__(*exc)

    def up(self) -> Lab:
        if self._lab is None:
            self._lab = Lab(hosts=NODES, rate=None, shared_home=True).__enter__()
        return self._lab


def row(name: str, hosts: Sequence[Host]) -> list:
    """Sums over the hosts; `more` is that of the host where counter and interface differ most."""
    counted, sent, votes, packets = (
        sum(getattr(host, what) for host in hosts) for what in ("counted", "sent", "votes", "packets")
    )
    return [
        *(name, f"{counted / 1e6:.2f}", f"{sent / 1e6:.2f}", f"{100 * worst(hosts):+.1f}"),
        *(f"{packets:,}", f"{HEADER * packets / 1e3:.1f}", f"{votes / 1e3:.1f}"),
    ]


def worst(hosts: Sequence[Host]) -> float:
    return max((host.more for host in hosts), key=abs)


def report(rows: dict[str, list[Host]], steps: int) -> list[str]:
    parameters = sum(p.numel() for p in new_net("large", 0).parameters())
    misses = [
        f"{name}: {100 * worst(hosts):+.1f} % at one host" for name, hosts in rows.items() if abs(worst(hosts)) > WITHIN
    ]
    return [
        f"An MLP of {'-'.join(map(str, LARGE))} ({parameters:,} parameters), {steps} steps on {NODES} lab hosts. Bytes "
        "that all hosts sent, by our counter and by /proc/net/dev of each, from before the ranks start until after "
        f"they have ended. What the interfaces have more are headers ({HEADER} bytes a packet, acknowledgements too), "
        "votes, and the meeting at the store. The kernel hands the interface many segments as one packet, so headers "
        "are few. More, %: at the host where the two differ most. Not in it: heartbeats and SSH of "
        "`distributed-train`.",
        "",
        *table(HEAD, (row(name, hosts) for name, hosts in rows.items())),
        *(listed(misses) or ["", f"No misses: {WITHIN:.0%} allowed."]),
    ]
