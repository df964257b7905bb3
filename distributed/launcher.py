"""The launcher: one process per run, in a session of its own. `python -m distributed.launcher RUN_DIR` reads run.json.

It holds the store where the ranks meet, the SSH sessions, and rank 0 as a child; it writes events.jsonl and, when all
ranks are done, evaluates. The command that the user typed only follows events.jsonl: closing its terminal is no harm.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import signal
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whisper_tuner.errors import ExitStatus, RunError, TunerError
from whisper_tuner.runs import EventLog, write_atomically

from .hosts import Host
from .machine import LocalMachine, Machine, Process
from .remote import Remote
from .spec import Rendezvous, RunSpec, build
from .workers import Crew, Worker

PROJECT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """One worker to start. `host` is None on this machine; `label` stands before each of its lines."""

    label: str
    spec: RunSpec
    host: Host | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What run.json holds. `address` is this machine's own, where the ranks meet."""

    run_id: str
    name: str
    ranks: tuple[Rank, ...]
    address: str = "127.0.0.1"
    timeout_s: float = 120.0
    evaluate: bool = True
    test: str | None = None

    def save(self, run_dir: Path) -> None:
        write_atomically(run_dir / "run.json", json.dumps(dataclasses.asdict(self), indent=2, default=str) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> Launch:
        return build(cls, json.loads((run_dir / "run.json").read_text()), "run.json")


def environment(project: str | Path) -> dict[str, str]:
    """Variables of each process of a run."""
    return {
        "PYTHONPATH": f"{project}/gym:{project}",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of every address without a name
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


class Launcher:
    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.launch = Launch.load(run_dir)
        self.events = EventLog(run_dir / "events.jsonl")
        self._interrupts = 0
        self._machines: list[Machine] = []

    def interrupt(self, *_signal) -> None:
        """First: finish the step, agree, save, stop. Second: stop now."""
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt

    def run(self) -> ExitStatus:
        status, message = ExitStatus.OK, ""
        try:
            self._train()
            if (self.run_dir / "final").is_dir():
                self.events({"type": "model", "path": str(self.run_dir / "final")})
            if self._interrupts:
                status, message = ExitStatus.INTERRUPTED, "stopped as asked; what was trained so far is in final/"
            elif self.launch.evaluate and self.launch.test:
                self._evaluate()
        except KeyboardInterrupt:
            status, message = ExitStatus.INTERRUPTED, "stopped at once"
        except TunerError as error:
            status, message = error.exit_status, str(error)
        except Exception as error:
            traceback.print_exc()
            status, message = ExitStatus.ERROR, f"{type(error).__name__}: {error} (see {self.run_dir}/launcher.log)"
        self.events({"type": "end", "status": int(status), "message": message})
        return status

    def _train(self) -> None:
        crew = None
        try:
            self.events({"type": "phase", "phase": "start", "hosts": [rank.label for rank in self.launch.ranks]})
            rendezvous = self._open_store() if len(self.launch.ranks) > 1 else None
            with ThreadPoolExecutor(max_workers=len(self.launch.ranks)) as pool:
                processes = list(pool.map(self._start, self.launch.ranks))
            workers = [
                Worker(rank=rank.spec.rank, name=rank.label, process=process)
                for rank, process in zip(self.launch.ranks, processes, strict=True)
            ]
            crew = Crew(workers, events=self.events, log=lambda line: print(line, flush=True))
            for worker, rank in zip(workers, self.launch.ranks, strict=True):
                spec = dataclasses.replace(rank.spec, rendezvous=rendezvous)
                worker.process.write(spec.to_json().encode() + b"\n")
            failed = crew.watch(lambda: self._interrupts > 0)
            if failed:
                raise RunError(f"{failed.name}: {failed.describe_failure()}")
        finally:
            if crew:
                crew.end()
            for machine in self._machines:
                machine.close()

    def _open_store(self) -> Rendezvous:
        """Listen on the one address where the ranks meet, never on all interfaces."""
        from torch.distributed import TCPStore

        listener = socket.create_server((self.launch.address, 0), backlog=128)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            self.launch.address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return Rendezvous(
            address=self.launch.address, port=port, prefix=secrets.token_hex(16), timeout_s=self.launch.timeout_s
        )

    def _start(self, rank: Rank) -> Process:
        command = ["-m", "distributed.worker_main"]
        if rank.host is None:
            machine: Machine = LocalMachine(rank.label)
            python, project = sys.executable, str(PROJECT)
        else:
            machine = Remote.connect(rank.host)
            python, project = machine.expand(rank.host.python), machine.expand(rank.host.project_path)
        self._machines.append(machine)
        return machine.start([python, *command], env=environment(project), cwd=project)

    def _evaluate(self) -> None:
        from .evaluate_run import evaluate_run

        self.events({"type": "phase", "phase": "evaluate"})
        evaluate_run(self.launch.ranks[0].spec, Path(self.launch.test), self.events)


def main() -> int:
    launcher = Launcher(Path(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, launcher.interrupt)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return launcher.run()


if __name__ == "__main__":
    sys.exit(main())
