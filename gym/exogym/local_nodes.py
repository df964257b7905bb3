"""Starts the nodes of a local run as processes, listens to them, and sees to it that none is left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event as Flag
from pathlib import Path
from pickle import PicklingError
from typing import Any

import torch

from exogym.errors import NodeFailed, PeerLost, SettingError
from exogym.logger import Events
from exogym.train_node import TrainResult

JOB, WEIGHTS = "job.pt", "weights.pt"
GRACE = 3.0  # seconds for the others to report, once a node has failed: the cause may be theirs
POLL = 0.2  # seconds


@dataclass
class _Node:
    rank: int
    process: BaseProcess
    pipe: Connection
    result: TrainResult | None = None
    failure: str | None = None
    lost_a_peer: bool = False
    done: bool = False

    def listen(self, events: Events) -> None:
        """Take in one message; a pipe that closes before the outcome came is a failure too."""
        try:
            kind, *content = self.pipe.recv()
        except EOFError:
            self.done = True
            if self.result is None and self.failure is None:
                self.process.join(GRACE)
                self.failure = f"ended without a word, exit status {self.process.exitcode}"
            return
        if kind == "event":
            events(content[0])
        elif kind == "result":
            self.result = content[0]
        else:
            self.failure, self.lost_a_peer = content


def run_nodes(
    job: Any,
    folder: Path,
    num_nodes: int,
    events: Events,
    should_stop: Callable[[], bool],
) -> list[TrainResult]:
    """Run `trainer.run_rank(rank, settings)` in one process for each rank, where `job` is (trainer, settings).

    Rank 0 leaves its state dict in folder/WEIGHTS. Raises NodeFailed; kills all nodes on the way out.
    """
    _save(job, folder / JOB)
    context = get_context("spawn")
    stop = context.Event()
    nodes: list[_Node] = []
    try:
        for rank in range(num_nodes):
            nodes.append(_start(context, rank, num_nodes, folder, stop))
        _listen(nodes, events, should_stop, stop)
    finally:
        for node in nodes:
            node.process.kill()
        for node in nodes:
            node.process.join()
            node.pipe.close()
    return [node.result for node in nodes]


def _save(job: Any, path: Path) -> None:
    # Through a file, not as process arguments: there torch would share the weights' memory among the nodes.
    try:
        torch.save(job, path)
    except (AttributeError, TypeError, PicklingError) as error:
        raise SettingError(
            f"model, datasets and strategy travel to the nodes by pickle, and one of them cannot: {error}; "
            "define functions and classes at the top level of a module"
        ) from error


def _start(context: Any, rank: int, num_nodes: int, folder: Path, stop: Flag) -> _Node:
    ours, theirs = context.Pipe()
    process = context.Process(target=_node_main, args=(rank, num_nodes, folder, theirs, stop), name=f"node {rank}")
    process.start()
    theirs.close()  # else the end of the process would not close the pipe
    return _Node(rank, process, ours)


def _listen(nodes: list[_Node], events: Events, should_stop: Callable[[], bool], stop: Flag) -> None:
    give_up = float("inf")
    while (waiting := {n.pipe: n for n in nodes if not n.done}) and time.monotonic() < give_up:
        for pipe in connection.wait(list(waiting), timeout=POLL):
            waiting[pipe].listen(events)
        if give_up == float("inf") and any(n.failure for n in nodes):
            give_up = time.monotonic() + GRACE
        if should_stop():
            stop.set()
    failed = [n for n in nodes if n.failure]
    if failed:
        first = min(failed, key=lambda n: n.lost_a_peer)  # losing a peer is what a failure looks like to the others
        raise NodeFailed(f"node {first.rank} of {len(nodes)} failed: {first.failure}")


def _node_main(rank: int, num_nodes: int, folder: Path, pipe: Connection, stop: Flag) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    _die_with_parent()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_nodes))
    try:
        trainer, settings = torch.load(folder / JOB, weights_only=False)
        result = trainer.run_rank(
            rank, settings, events=lambda event: pipe.send(("event", event)), should_stop=stop.is_set
        )
        if rank == 0:
            torch.save(trainer.model.state_dict(), folder / WEIGHTS)
        pipe.send(("result", result))
    except Exception as error:
        pipe.send(("failure", traceback.format_exc(), isinstance(error, PeerLost)))
        sys.exit(1)


def _die_with_parent() -> None:
    """A parent that is killed cannot clean up."""

    def watch() -> None:
        connection.wait([parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
