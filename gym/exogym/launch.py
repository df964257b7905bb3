"""`python -m exogym.launch train.py [args] --nproc-per-node 4`: a script as several processes, which can form a group.

Over torch.distributed.run, with its names of options. In the script, `exogym.launch.init()` joins the default group of
torch.distributed; `LaunchedTrainer` trains without that. A script that was started alone is a group of one, so the same
script runs both ways.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from exogym.comm.comm import DEFAULT_TIMEOUT, Comm, SingleComm
from exogym.comm.process_group import LOOPBACK, ProcessGroupComm, brief, gloo_options, leave_default_group
from exogym.config import at_least, one_of
from exogym.errors import ExogymError, NodeFailed, PeerLost, SettingError
from exogym.nodes import LAUNCHER, end_with_launcher
from exogym.strategy import communicate
from exogym.strategy.upstream import of_upstream

__all__ = ["init", "launch", "main"]

BACKEND = "EXOGYM_BACKEND"  # what `--backend` says
ASK_EVERY_S = 0.02
PORT = 29500  # of the first machine, where the processes of several machines meet
OPTIONS = {
    "nproc-per-node": "processes on this machine: a number, or auto, cpu, gpu (1)",
    "nnodes": "machines, each with a command of its own: a number, or fewest:most (1)",
    "node-rank": "of several machines, the number of this one (0)",
    "master-addr": "of several machines, the address of number 0, as the others reach it",
    "master-port": f"of several machines, a free port of number 0 ({PORT})",
    "backend": "of torch.distributed, for exogym.launch.init (gloo)",
    "max-restarts": "how often all processes are started again after one has failed (0)",
    "monitor-interval": "seconds between two looks at the processes (0.1)",
    "start-timeout": "seconds to wait for the other machines",
}
OURS = ("backend", "start_timeout")  # the rest are of torch.distributed.run


def launch(
    target: Callable[..., Any] | str | Path,
    args: Sequence[Any] = (),
    *,
    nproc_per_node: int | str = 1,
    nnodes: int | str = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    backend: str = "gloo",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    start_timeout: float | None = None,
) -> list[Any]:
    """Run a script, or a function of a module, in several processes, and wait until all have ended.

    Returns what the function returned, by rank of this machine; of a script None for each. A function is found by its
    name, so `if __name__ == "__main__":` must stand before the call. Raises NodeFailed with the traceback of the first
    process that failed, PeerLost if other machines do not come; no process is left behind then.
    """
    given = {
        **{"nproc-per-node": nproc_per_node, "nnodes": nnodes, "node-rank": node_rank},
        **{"master-addr": master_addr, "master-port": master_port, "max-restarts": max_restarts},
        **{"monitor-interval": monitor_interval},
    }
    argv = [f"--{name}={value}" for name, value in given.items() if value is not None]
    if isinstance(target, (str, Path)):
        return _run(_parse([*argv, str(target), *map(str, args)]), backend, start_timeout)
    name = getattr(target, "__qualname__", "")
    if "<" in name:  # <lambda>, or f.<locals>.g
        raise SettingError(f"{name} cannot be found by its name, as the processes must: define it in a module")
    return _run(_parse([*argv, "function"]), backend, start_timeout, target, args)


def main(argv: list[str] | None = None) -> int:
    """Options may stand before the script or after it; what stands after `--` is the script's. Returns the status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        "python -m exogym.launch",
        usage="%(prog)s [options] train.py [arguments of the script] [options]",
        description="Run a script as several processes. The words after -- are the script's, whatever they are.",
        epilog="Other options of torch.distributed.run (as --rdzv-endpoint or --tee) must stand before the script.",
        allow_abbrev=False,
        add_help=False,
    )
    for name, about in OPTIONS.items():
        kind = float if name == "start-timeout" else str
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", help=about, type=kind, metavar="X")
    if not argv or argv[0] in ("-h", "--help"):
        parser.print_help()
        return 0 if argv else 2
    end = argv.index("--") if "--" in argv else len(argv)
    found, rest = parser.parse_known_args(argv[:end])
    given = {name: value for name, value in vars(found).items() if value is not None}
    backend, start_timeout = (given.pop(name, None) for name in OURS)
    theirs = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    try:
        _run(_parse([*theirs, *rest, *argv[end + 1 :]]), backend or "gloo", start_timeout)
    except ExogymError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingError) else 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Have torch.distributed.run read the options, the script and its arguments."""
    options = run.get_args_parser().parse_args(argv)
    options.by_torch = options.no_python or options.run_path
    return options


def _run(
    options: argparse.Namespace,
    backend: str,
    start_timeout: float | None,
    function: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
) -> list[Any]:
    one_of("backend", backend, _backends())
    script = options.training_script
    if function is None and not options.by_torch:  # each process runs it by way of nodes.py
        if not options.module and not Path(script).is_file():
            raise SettingError(f"there is no script {script!r}")
        options.training_script_args = [*(["-m"] if options.module else []), script, *options.training_script_args]
        options.training_script, options.module = "exogym.nodes", True
    try:
        processes = run.determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise SettingError(f"nproc-per-node: {error}") from None
    at_least("nproc-per-node", processes, 1)
    ours = {BACKEND: backend, LAUNCHER: str(os.getpid())}
    defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
    with _environment(ours, defaults), _signals_kept():
        config, command, arguments = _configure(options, start_timeout)
        entry, arguments = (command, arguments) if function is None else (_as_rank, [function, *args])
        try:
            results = elastic_launch(config, entry)(*arguments)
        except ChildFailedError as error:
            raise NodeFailed(_told(error)) from error
        except (RendezvousError, DistError) as error:
            raise PeerLost(f"the {options.nnodes} machines did not meet: {brief(error)}") from error
    return [results[rank] for rank in sorted(results)]


def _configure(options: argparse.Namespace, start_timeout: float | None) -> tuple[LaunchConfig, Any, list[Any]]:
    is_given = options.rdzv_endpoint or options.rdzv_backend != "static" or options.master_port
    if options.standalone or (str(options.nnodes) in ("1", "1:1") and not is_given):
        # Processes of this machine alone meet at a free port of its own.
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", f"{LOOPBACK}:0", str(uuid.uuid4())
        options.local_addr = options.local_addr or LOOPBACK
    options.master_port = options.master_port or PORT
    at_least("max-restarts", options.max_restarts, 0)
    try:
        config, command, arguments = run.config_from_args(options)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise SettingError(f"what was given does not go together: {brief(error)}") from error
    if start_timeout is not None:
        names = ("timeout",) if config.rdzv_backend == "static" else ("join_timeout", "read_timeout")
        config.rdzv_configs |= {name: max(1, round(start_timeout)) for name in names}
    return config, command, arguments


def _as_rank(function: Callable[..., Any], *args: Any) -> Any:
    end_with_launcher()
    return function(*args)


@contextmanager
def _environment(values: dict[str, str], defaults: dict[str, str]) -> Iterator[None]:
    """Change the environment that the processes inherit."""
    before = dict(os.environ)
    os.environ.update({**defaults, **os.environ, **values})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """torch sets handlers of its own, which turn Ctrl-C into a SignalException, and leaves them behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _told(error: ChildFailedError) -> str:
    """Tell which rank failed first, and its traceback if it had one."""
    failures = _failures(error)
    exceptions: dict[int, dict[str, Any]] = {}  # what processes wrote down of theirs
    told = {}
    for rank, failure in failures.items():
        written = failure.error_file_data.get("message")
        if isinstance(written, dict) and written:
            exceptions[rank] = written
            told[rank] = written.get("extraInfo", {}).get("py_callstack") or str(written.get("message"))
        else:
            told[rank] = failure.message if failure.exitcode < 0 else "it ended without an exception"

    def order(rank: int) -> tuple[bool, float]:
        """Ranks that lost another, or were stopped for another, come last: times are in whole seconds."""
        was_stopped = failures[rank].exitcode == -signal.SIGTERM and rank not in exceptions
        return PeerLost.__name__ in told[rank] or was_stopped, failures[rank].timestamp

    first = min(told, key=order)
    # One with an exception that has a signal's status was stopped on its way out.
    status = 1 if first in exceptions and failures[first].exitcode < 0 else failures[first].exitcode
    return f"rank {first} failed with status {status}: {told[first]}"


def _failures(error: ChildFailedError) -> dict[int, ProcessFailure]:
    """Find failures by rank, also of ranks that were still on their way out when another had ended."""
    found = dict(error.failures)
    for rank, failure in error.failures.items():
        for file in Path(failure.error_file).parent.parent.glob("[0-9]*/error.json"):  # a folder for each local rank
            with suppress(ValueError):  # half written
                local_rank = int(file.parent.name)
                of_it = ProcessFailure(local_rank, pid=0, exitcode=1, error_file=str(file))
                found.setdefault(rank - failure.local_rank + local_rank, of_it)
    return found


# In a process of the launch: the group that it forms with the others.

_store: dist.Store | None = None
_groups = count()


def __getattr__(name: str) -> Any:
    return of_upstream(__name__, name)


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def init(backend: str | None = None, *, timeout: float = DEFAULT_TIMEOUT) -> Comm:
    """Join the default group of torch.distributed with all processes of the launch, unless this one already has.

    backend: as `--backend` if not given. timeout: seconds that a rank waits for the slowest. Returns what
    `exogym.strategy.communicate` uses now: its `rank` and `world_size`. Raises SettingError, PeerLost.
    """
    if not dist.is_initialized():
        backend = one_of("backend", backend or os.environ.get(BACKEND) or "gloo", _backends())
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        wait = timedelta(seconds=timeout)
        try:
            store = dist.PrefixStore(_next_group(), meeting_store(timeout))
            options = gloo_options(wait, own_address()) if backend == "gloo" else None
            dist.init_process_group(
                backend, store=store, rank=rank(), world_size=world_size(), timeout=wait, pg_options=options
            )
        except RuntimeError as error:
            raise PeerLost(f"rank {rank()} of {world_size()} could not join the group: {brief(error)}") from error
        atexit.register(leave_default_group)
    return communicate.current()


def join(timeout: float = DEFAULT_TIMEOUT) -> Comm:
    """Form a new group of all processes of the launch, beside any others. Raises SettingError, PeerLost."""
    if world_size() == 1:
        return SingleComm()
    try:
        store = dist.PrefixStore(_next_group(), meeting_store(timeout))
    except RuntimeError as error:
        raise PeerLost(f"rank {rank()} of {world_size()} cannot reach the others: {brief(error)}") from error
    return ProcessGroupComm(rank=rank(), world_size=world_size(), store=store, address=own_address(), timeout=timeout)


def meeting_store(timeout: float) -> dist.Store:
    """Return the store where the processes of the launch meet. Raises SettingError, PeerLost, RuntimeError."""
    global _store
    if _store is None and world_size() == 1:
        _store = dist.HashStore()
    elif _store is None and dist.is_initialized():
        _store = dist.distributed_c10d._get_default_store()
    elif _store is None:
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        except ValueError as error:
            raise SettingError(f"this process was not launched as it should be: {error}") from None
        _store = dist.PrefixStore(_agreed_name(store, timeout), store)
    return _store


def _agreed_name(store: dist.Store, timeout: float) -> str:
    """Return a new name, the same on all ranks. Raises PeerLost, RuntimeError.

    A store may outlive processes that are started again, with what they have left in it; and torchrun's restart count
    is not the same on machines that came at different times. So each rank asks rank 0 with a number of its own.
    """
    own = uuid.uuid4().hex
    if rank():
        store.set(f"exogym/ask/{rank()}", own)
        name: str = store.get(f"exogym/answer/{own}").decode()
        store.set(f"exogym/{name}/{rank()}", "")
        return name
    awaited, until = set(range(1, world_size())), time.monotonic() + timeout
    while awaited:
        for other in sorted(awaited):
            if store.check([f"exogym/{own}/{other}"]):
                awaited.remove(other)
            elif store.check([ask := f"exogym/ask/{other}"]):
                store.set(f"exogym/answer/{store.get(ask).decode()}", own)
        if time.monotonic() > until:
            raise PeerLost(f"ranks {sorted(awaited)} have not come in {timeout:.0f} s")
        time.sleep(ASK_EVERY_S)
    return own


def own_address() -> str | None:
    """Return this machine's IPv4 address on the way to where all meet; None if gloo is to take GLOO_SOCKET_IFNAME's."""
    master = os.environ.get("MASTER_ADDR")
    if "GLOO_SOCKET_IFNAME" in os.environ or not master:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
        try:
            probe.connect((master, int(os.environ.get("MASTER_PORT") or 1)))
        except OSError as error:
            raise SettingError(f"MASTER_ADDR = {master} cannot be reached over IPv4: {error}") from None
        return str(probe.getsockname()[0])


def _next_group() -> str:
    """Return a name for each group that forms, the same on all ranks."""
    return f"exogym/{next(_groups)}"


def _backends() -> list[str]:
    return [known for known in dist.Backend.backend_list if known != dist.Backend.UNDEFINED]


if __name__ == "__main__":
    sys.exit(main())
