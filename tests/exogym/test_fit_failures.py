"""A rank that fails ends `fit` within seconds, with that rank's traceback, and no process is left."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import torch
from exogym_toys import Line, Points

from exogym import AllReduceStrategy, DiLoCoStrategy, LocalTrainer, NodeFailed

SECONDS = 15  # on a busy machine; what a rank waits for others in vain is 60
ASLEEP = ["sleep", f"1000.0{os.environ.get('PYTEST_XDIST_WORKER', '')[2:]}"]  # not that of a test beside this one
STRATEGIES = {"allreduce": AllReduceStrategy, "diloco": lambda: DiLoCoStrategy(H=100_000)}
SLOW_DILOCO = pytest.param("diloco", marks=pytest.mark.slow)
SLOW = pytest.mark.slow


def is_node(rank):
    return multiprocessing.current_process().name == f"node {rank}"


def at_step(step):
    """A model that does this in rank 1's forward pass of this step."""

    def decorate(act):
        class Model(Line):
            def __init__(self):
                super().__init__()
                self.calls = 0

            def forward(self, batch):
                self.calls += 1
                if is_node(1) and self.calls > step:
                    act()
                return super().forward(batch)

        return Model

    return decorate


@at_step(3)
def raises():
    raise ZeroDivisionError("in forward")


@at_step(3)
def exits():
    os._exit(0)


@at_step(3)
def leaves():
    sys.exit(7)


@at_step(3)
def freezes():
    os.kill(os.getpid(), signal.SIGSTOP)


@at_step(3)
def starts_another_and_is_killed():
    """Its child holds its end of the pipe."""
    subprocess.Popen(ASLEEP, close_fds=False)
    os.kill(os.getpid(), signal.SIGKILL)


class Torn(Points):
    def __getitem__(self, i):
        if is_node(1) and i > 8:
            raise OSError(f"row {i}")
        return super().__getitem__(i)


class NotHere(Points):
    def __setstate__(self, state):
        raise ModuleNotFoundError("unpickled in the wrong place")


def no_data_on_rank_1(rank, num_nodes, train_dataset):
    if rank == 1:
        raise FileNotFoundError("shard-1.csv")
    return Points(16)


class Heard:
    """A logger that keeps the time of the last event of each rank."""

    def __init__(self):
        self.last, self.closed = {}, False

    def __call__(self, event):
        self.last[event["rank"]] = time.monotonic()

    def close(self):
        self.closed = True


def living_children():
    return {p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def fail(model, data, strategy, *, match, logger, error=NodeFailed, timeout=60, **more):
    """Seconds from the last event of rank 1 to the end of fit."""
    before, others = model.linear.weight.clone(), living_children()
    trainer = LocalTrainer(model, data)
    settings = {"max_steps": 10**7, "batch_size": 4, "minibatch_size": 4, "device": "cpu"}
    with pytest.raises(error, match=match):
        trainer.fit(strategy=strategy, num_nodes=2, logger=logger, timeout=timeout, **settings | more)
    ended = time.monotonic()
    assert living_children() <= others
    assert torch.equal(model.linear.weight, before) and trainer.result is trainer.results is None
    return ended - getattr(logger, "last", {}).get(1, ended)


@pytest.mark.parametrize("strategy", ["allreduce", SLOW_DILOCO])
@pytest.mark.parametrize(
    ("model", "match"),
    [
        (raises, r"(?s)node 1 of 2 failed: Traceback.*in forward.*ZeroDivisionError: in forward"),
        pytest.param(exits, "node 1 of 2 failed: ended without a word, exit status 0", marks=SLOW),
        pytest.param(leaves, "(?s)node 1 of 2 failed: Traceback.*SystemExit: 7", marks=SLOW),
        pytest.param(
            starts_another_and_is_killed,
            "node 1 of 2 failed: .*exit status -9 .killed; the system does that when mem",
            marks=SLOW,
        ),
    ],
)
def test_a_rank_that_fails_in_a_step(model, match, strategy):
    logger = Heard()
    seconds = fail(model(), Points(64), STRATEGIES[strategy](), match=match, logger=logger)
    assert seconds < SECONDS and logger.closed
    sleeping = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ASLEEP]
    assert not sleeping


@pytest.mark.parametrize(
    ("data", "match"),
    [
        pytest.param(Torn(64), "(?s)node 1 of 2.*in __getitem__.*OSError: row", marks=SLOW),
        (no_data_on_rank_1, "(?s)node 1 of 2.*in no_data_on_rank_1.*FileNotFoundError: shard-1.csv"),
        (NotHere(64), "(?s)node [01] of 2.*in __setstate__.*ModuleNotFoundError: unpickled in the wrong place"),
    ],
)
def test_a_rank_that_fails_with_its_data(data, match):
    started = time.monotonic()
    fail(Line(), data, STRATEGIES["diloco"](), match=match, logger=Heard())
    assert time.monotonic() - started < 50  # the start of two interpreters included


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [AllReduceStrategy, pytest.param(lambda: DiLoCoStrategy(H=5), marks=pytest.mark.slow)]
)
def test_a_rank_that_freezes_is_given_up_after_the_timeout(strategy):
    logger = Heard()
    match = "(?s)node 0 of 2 failed: .*PeerLost.*Nothing was heard of node 1: is it stopped, or very slow?"
    seconds = fail(freezes(), Points(64), strategy(), match=match, logger=logger, timeout=4)
    assert 3 < seconds < 4 + SECONDS


@pytest.mark.slow
def test_a_rank_that_is_killed_from_outside():
    class Killer(Heard):
        def __call__(self, event):
            super().__call__(event)
            if event["rank"] == 1 and event.get("step") == 5:
                [second] = [p for p in psutil.Process().children() if '"node": [1,' in p.cmdline()[-1]]
                second.kill()

    seconds = fail(Line(), Points(64), AllReduceStrategy(), match="node 1 of 2.*exit status -9", logger=Killer())
    assert seconds < SECONDS


@pytest.mark.slow
def test_what_the_caller_raises_ends_the_run_too():
    class Full(Heard):
        def __call__(self, event):
            if event["type"] == "step":
                raise OSError("no space left on device")

    logger = Full()
    fail(Line(), Points(64), STRATEGIES["diloco"](), match="no space left", logger=logger, error=OSError)
    assert logger.closed

    def stop():
        raise RuntimeError("asked to stop, and cannot say")

    fail(
        Line(),
        Points(64),
        AllReduceStrategy(),
        match="cannot say",
        logger=Heard(),
        error=RuntimeError,
        should_stop=stop,
    )


FOREVER = """
from exogym_toys import Line, Points
from exogym import DiLoCoStrategy, LocalTrainer

def show(event):
    print(event["type"], flush=True)

try:
    LocalTrainer(Line(), Points(16)).fit(
        strategy=DiLoCoStrategy(H=10**6), max_steps=10**9, num_nodes=2, device="cpu", logger=show, batch_size=4)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_nodes(tmp_path):
    """It reaches all processes of the terminal's group."""
    script = tmp_path / "forever.py"
    script.write_text(textwrap.dedent(FOREVER))
    here = os.path.dirname(__file__)  # noqa: PTH120
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, "gym"])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, script], env=environment, start_new_session=True, **pipes)
    while parent.stdout.readline() != "step\n":
        pass
    children = psutil.Process(parent.pid).children(recursive=True)
    os.killpg(parent.pid, signal.SIGINT)
    shown, complaints = parent.communicate(timeout=20)
    assert shown.splitlines()[-1] == "interrupted" and parent.returncode == 0
    assert "Traceback" not in complaints, complaints
    assert len(children) == 2 and not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_neither_nodes_nor_files(tmp_path):
    script = tmp_path / "forever.py"
    script.write_text(textwrap.dedent(FOREVER))
    folder = tmp_path / "temporary"
    folder.mkdir()
    here = os.path.dirname(__file__)  # noqa: PTH120
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, "gym"]), "TMPDIR": str(folder)}
    parent = subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True)
    while parent.stdout.readline() != "step\n":
        pass
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) == 2 and list(folder.glob("exogym-*"))
    parent.kill()
    parent.communicate(timeout=20)
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert not list(folder.glob("exogym-*"))
