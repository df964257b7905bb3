"""Processes that are ranks: a local run starts its nodes, listens to them, and sees to it that none is left behind.

Each is a fresh interpreter that does not import the script that was started: so that script needs no
`if __name__ == "__main__"`, and there may be none, as in a notebook. What it defines travels by value (cloudpickle).

`python -m exogym.nodes train.py [args]` runs a script as one rank; `exogym.launch` starts it for each.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import cloudpickle
import psutil
import torch
from torch import nn
from torch.nn.utils import parametrize

from exogym.errors import NodeFailed, PeerLost, SettingError, StageLost
from exogym.logger import Events

JOB, WEIGHTS = "job.pt", "weights.pt"
GRACE = 3.0  # seconds: for a node to exit, and for others to report, once one has lost a peer: the cause is theirs
POLL = 0.2  # seconds
LAUNCHER = "EXOGYM_LAUNCHER"  # the process that has started this one as a rank of a launch
BOOT = """
import json, sys
about = json.loads(sys.argv[1])
sys.path[:], sys.argv[:] = about["path"], about["argv"]
from exogym.nodes import node_main
node_main(*about["node"])
"""


@dataclass
class _Node:
    rank: int
    process: subprocess.Popen[bytes]
    pipe: Connection[Any, Any]
    result: Any = None  # what the trainer's `run_rank` returned
    failure: str | None = None
    mistake: SettingError | None = None  # what failed, where that is a setting
    lost_a_peer: bool = False
    has_ended: bool = False

    @property
    def is_done(self) -> bool:
        return self.has_ended or self.result is not None or self.failure is not None

    def listen(self, events: Events) -> None:
        """Take in one message; a pipe that closes before the outcome came is a failure too."""
        try:
            kind, *content = self.pipe.recv()
        except (EOFError, OSError):
            self.ended()
            return
        if kind == "event":
            events(content[0])
        elif kind == "result":
            self.result = content[0]
        else:
            self.failure, self.lost_a_peer, self.mistake = content

    def ended(self) -> None:
        self.has_ended = True
        if self.result is None and self.failure is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
            status = self.process.returncode
            killed = " (killed; the system does that when memory runs out)" if status == -signal.SIGKILL else ""
            self.failure = f"ended without a word, exit status {status}{killed}"

    def kill(self) -> None:
        """Kill it with all that it has started: it leads a session of its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


def run_nodes(
    job: Any, num_nodes: int, events: Events, should_stop: Callable[[], bool]
) -> tuple[list[Any], dict[str, Any]]:
    """Run `trainer.run_rank(rank, settings)` in one process for each rank, where `job` is (trainer, settings).

    Returns all ranks' results, and the state dict of rank 0's model, on the CPU. Raises NodeFailed, and SettingError as
    a node did, or if the job cannot be pickled; kills all nodes on the way out.
    """
    with tempfile.TemporaryDirectory(prefix="exogym-") as name:
        folder = Path(name)
        _save(job, folder / JOB)
        nodes: list[_Node] = []
        try:
            for rank in range(num_nodes):
                nodes.append(_start(rank, num_nodes, folder))
            _listen(nodes, events, should_stop)
            until = time.monotonic() + GRACE  # what users have registered with atexit may have something to do
            for node in nodes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.process.wait(max(0.0, until - time.monotonic()))
        finally:
            for node in nodes:
                node.kill()
        weights: dict[str, Any] = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=False)
        return [node.result for node in nodes], weights


class Pickler(cloudpickle.Pickler):
    """Pickles also modules with parametrizations (torch.nn.utils.parametrize), each of which has a class of its own."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            names = [*cast(nn.ModuleDict, obj.parametrizations)]
            return _parametrized, (parametrize.type_before_parametrizations(obj), names), vars(obj)
        return super().reducer_override(obj)


def pickled(job: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(job)
    return file.getvalue()


def _parametrized(kind: type[nn.Module], names: list[str]) -> nn.Module:
    """Return a module, still empty, whose tensors of these names are computed by its parametrizations."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _save(job: Any, path: Path) -> None:
    """Save it through a file, not as process arguments: there torch would share the weights' memory among the nodes."""

    def problem(value: Any) -> Exception | None:
        try:
            torch.save(value, path, pickle_module=sys.modules[__name__], pickle_protocol=pickle.DEFAULT_PROTOCOL)
        except (AttributeError, RuntimeError, TypeError, ValueError, pickle.PicklingError) as error:
            return error
        return None

    if error := problem(job):
        trainer, settings = job
        parts = {name: getattr(trainer, name) for name in ("model", "train_dataset", "val_dataset")}
        parts["strategy"] = settings.strategy
        name = next((name for name, part in parts.items() if problem(part)), "trainer")
        what = f"the {name} must travel to the nodes' processes by pickle, and cannot: {error}"
        raise SettingError(f"{what}; open files, locks and connections when they are first used") from error


def _start(rank: int, num_nodes: int, folder: Path) -> _Node:
    ours, theirs = multiprocessing.Pipe()
    with theirs:  # else the end of the process would not close the pipe
        node = [rank, num_nodes, str(folder), theirs.fileno()]
        about = {"path": [p for p in sys.path if isinstance(p, str)], "argv": sys.argv, "node": node}
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT, json.dumps(about)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # so that Ctrl-C reaches the parent alone, which decides
        )
    return _Node(rank, process, ours)


def _listen(nodes: list[_Node], events: Events, should_stop: Callable[[], bool]) -> None:
    """Listen until all nodes have reported, or one has failed. Raises NodeFailed, or the node's SettingError."""
    give_up, has_stopped = float("inf"), False
    while (waiting := [node for node in nodes if not node.is_done]) and time.monotonic() < give_up:
        ready = wait([node.pipe for node in waiting], timeout=POLL)
        for node in waiting:
            if node.pipe in ready:
                node.listen(events)
        for node in nodes:  # a process may be gone while another that it had started still holds its end of the pipe
            if not node.is_done and node.process.poll() is not None and not node.pipe.poll():
                node.ended()
        failed = [node for node in nodes if node.failure]
        if any(not node.lost_a_peer for node in failed):
            break
        if failed:  # losing a peer is what another's failure looks like, which may be about to be told
            give_up = min(give_up, time.monotonic() + GRACE)
        if not has_stopped and should_stop():
            has_stopped = True
            for node in nodes:
                with contextlib.suppress(OSError):
                    node.pipe.send("stop")
    failed = [node for node in nodes if node.failure]
    if not failed:
        return
    first = min(failed, key=lambda node: node.lost_a_peer)
    if first.mistake:
        raise first.mistake
    silent = [str(node.rank) for node in nodes if not node.is_done]
    hint = f"\nNothing was heard of node {', '.join(silent)}: is it stopped, or very slow?" if first.lost_a_peer else ""
    raise NodeFailed(f"node {first.rank} of {len(nodes)} failed: {first.failure}{hint if silent else ''}")


def node_main(rank: int, num_nodes: int, folder: str, descriptor: int) -> None:
    """Be the process of one node."""
    multiprocessing.current_process().name = f"node {rank}"  # which logging shows
    pipe, stop = Connection(descriptor), threading.Event()
    threading.Thread(target=_hear_parent, args=[pipe, stop, folder], daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_nodes))
    try:
        trainer, settings = torch.load(Path(folder, JOB), map_location="cpu", weights_only=False)
        result = trainer.run_rank(
            rank, settings, events=lambda event: pipe.send(("event", event)), should_stop=stop.is_set
        )
        if rank == 0:
            torch.save(trainer.model.state_dict(), Path(folder, WEIGHTS))
        pipe.send(("result", result))
    except BaseException as error:  # a boundary: also SystemExit, which a user's code may raise
        mistake = error if isinstance(error, SettingError) else None
        pipe.send(("failure", traceback.format_exc(), isinstance(error, (PeerLost, StageLost)), mistake))
        sys.exit(1)


def _hear_parent(pipe: Connection, stop: threading.Event, folder: str) -> None:
    """Clean up and end, with all that this process has started, once the parent was killed and cannot."""
    try:
        while pipe.recv() == "stop":
            stop.set()
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_with_launcher() -> None:
    """End this process when its launcher is killed, which then cannot stop its ranks."""
    parent, launcher = os.getppid(), int(os.environ.get(LAUNCHER) or os.getppid())

    def watch() -> None:
        # Between the two may stand a profiler (PYTHON_EXEC); and the launcher may be gone before this process looks.
        while os.getppid() == parent and is_alive(launcher):
            time.sleep(POLL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_as_rank(arguments: list[str]) -> None:
    """Run a script, or a module after `-m`, as Python itself does; an exception is written down for the launcher."""
    end_with_launcher()
    from torch.distributed.elastic.multiprocessing.errors import record  # loads torch's launcher: see LaunchedTrainer

    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    if is_module:
        record(runpy.run_module)(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        record(runpy.run_path)(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run_as_rank(sys.argv[1:])
