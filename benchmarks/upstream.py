"""Upstream exogym side by side with ours: the same model, images, steps and settings; losses, bytes and time.

    git -C CLONE archive 9fa323c exogym | tar -x -C DIR
    PYTHONPATH=PACKAGES python benchmarks/upstream.py --upstream DIR [--quick] [--seeds 3] [--more N]

CLONE is one of github.com/exo-explore/gym. PACKAGES is a folder with what upstream needs besides .venv (einops): pip
install --target PACKAGES einops. Two things are changed in its memory, not in its files: on Linux its nodes meet on
the interface `lo`, where it names a Mac's, and its collectives are counted, by the bytes that a ring would send. The
row "copies" has a third: its DiLoCo writes the master's weights into rank 0's model, as it does on a GPU; on a CPU the
two share memory from the first round on, so that later pseudo-gradients are zero.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path += [str(PROJECT), str(PROJECT / "tests")]  # not gym: the environment says which exogym it is

from benchmarks.base import Done, RunFailed, parser_of, publish, table  # noqa: E402
from benchmarks.digits import BATCH, NODES, WIDTHS, evaluate, load_digits, new_net  # noqa: E402

STEPS, QUICK_STEPS, LR, H, P_SPARTA, TOP_K = 300, 20, 3e-3, 10, 0.05, 32
NOISE = 2  # standard deviations of the seeds: less is no difference
OUTER = {"plain": {"lr": 1.0}, "nesterov": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}
KEYS = {
    "allreduce": "AllReduce",
    "diloco-plain": f"DiLoCo, H={H}, plain",
    "diloco-nesterov": f"DiLoCo, H={H}, Nesterov 0.7/0.9",
    "diloco-nesterov-copies": f"DiLoCo, H={H}, Nesterov 0.7/0.9, upstream copies",
    "sparta": f"SPARTA, p={P_SPARTA}",
    "demo": f"DeMo, {TOP_K} of 64x64",
    "fedavg": f"FedAvg, H={H}",
}
FIGURES = ("train", "validation", "sent", "seconds")
HEAD = ("strategy", "train loss", "upstream's", "validation loss", "upstream's", "difference / noise")
HEAD += ("bytes a node and step", "/ upstream's", "s", "/ upstream's")


@dataclass(frozen=True, kw_only=True)
class Task:
    key: str
    whose: str
    seed: int
    steps: int

    def __str__(self) -> str:
        return f"{self.key} by {self.whose}, {self.steps} steps, seed {self.seed}"


def strategy_of(key: str) -> Any:
    """Make the strategy, in the words of whichever exogym this is: these are upstream's, which ours takes too."""
    import torch

    from exogym.strategy import DeMoStrategy, DiLoCoStrategy, FedAvgStrategy, OptimSpec, SPARTAStrategy
    from exogym.strategy.strategy import SimpleReduceStrategy

    inner = {"optim_spec": OptimSpec(torch.optim.AdamW, lr=LR, weight_decay=0.0)}
    if key.startswith("diloco"):
        outer = OptimSpec(torch.optim.SGD, **OUTER[key.split("-")[1]])
        return DiLoCoStrategy(**inner, outer_optim_spec=outer, H=H)
    if key == "demo":  # upstream's has no other learning rate than 1e-3, ours that one by default
        return DeMoStrategy(compression_topk=TOP_K, compression_chunk=64, compression_decay=0.999)
    kinds = {"allreduce": (SimpleReduceStrategy, {}), "sparta": (SPARTAStrategy, {"p_sparta": P_SPARTA})}
    kind, settings = kinds.get(key, (FedAvgStrategy, {"H": H}))
    return kind(**inner, **settings)


def watch_upstream(folder: Path, key: str) -> None:
    """Have each of upstream's nodes write what it sent and how long it trained into `folder`."""
    import torch.distributed as dist

    import exogym.strategy.diloco as diloco
    import exogym.trainer as trainer

    sent, began = [0.0], [0.0]

    def counted(name: str, share: float, at: int = 0) -> None:
        collective = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sent[0] += share * args[at].nbytes
            return collective(*args, **kwargs)

        setattr(dist, name, call)

    def meet(backend: str, rank: int, world_size: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        dist.init_process_group(backend, rank=rank, world_size=world_size)

    def train(node: Any, whole: Any = trainer.TrainNode.train) -> Any:
        sent[0], began[0] = 0.0, time.perf_counter()
        state = whole(node)
        told = {"sent": sent[0], "seconds": time.perf_counter() - began[0]}
        (folder / f"{node.rank}.json").write_text(json.dumps(told), encoding="utf-8")
        return state

    def copies(module: Any, model: Any) -> None:
        for own, master in zip(model.parameters(), module.master_model.parameters(), strict=True):
            own.data.copy_(master.data)

    counted("all_reduce", 2 * (NODES - 1) / NODES)
    counted("broadcast", (NODES - 1) / NODES)  # the mean: one node sends to all others
    counted("all_gather", NODES - 1, at=1)
    trainer.init_process_group_portsafe, trainer.TrainNode.train = meet, train
    if key.endswith("copies"):
        diloco.DiLoCoCommunicator._synchronize_master_model = copies


def run_here(task: Task, folder: Path) -> None:
    """Train with the exogym of this process, and print the figures."""
    import exogym.trainer

    data, model, steps = load_digits(), new_net("mlp", task.seed), []
    made = exogym.trainer.Trainer(model, data["train"], data["validation"], 12400 + 10 * task.seed, device="cpu")
    logged = {"run_name": task.key} if task.whose == "upstream" else {"logger": steps.append}
    model = made.fit(
        **{"num_epochs": 1, "max_steps": task.steps, "num_nodes": NODES, "strategy": strategy_of(task.key), **logged},
        **{"batch_size": BATCH, "minibatch_size": BATCH, "val_size": 0, "seed": task.seed},
    )
    nodes = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("?.json")]
    if task.whose == "ours":  # seconds of steps, as upstream's: without the wait for nodes that start
        seconds = sum(e["seconds"] + e["seconds_waiting"] for e in steps if e["type"] == "step") / NODES
        nodes = [{"sent": node.bytes_sent, "seconds": seconds} for node in made.results]
    losses = {part: evaluate(model, data[part])[0] for part in FIGURES[:2]}
    print(json.dumps({**losses, **{name: mean(node[name] for node in nodes) for name in FIGURES[2:]}}))


def work(task: Task, upstream: Path) -> dict:
    """Train in a process of its own, in an empty folder. Raises RunFailed."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(PROJECT / "gym" if task.whose == "ours" else upstream), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        environment["ONE"] = json.dumps(asdict(task))
        done = subprocess.run([sys.executable, __file__], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RunFailed(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def row(done: Done, tasks: list[Task], key: str) -> list:
    """Compare the means over the seeds."""
    keys = {"ours": key.removesuffix("-copies"), "upstream": key}
    runs = {whose: [r for t, r in done.found(tasks) if (t.whose, t.key) == (whose, key)] for whose, key in keys.items()}
    found = {whose: {name: mean(r[name] for r in rs) for name in FIGURES} for whose, rs in runs.items()}
    ours, theirs = found["ours"], found["upstream"]
    noise = max(stdev(r["validation"] for r in rs) if len(rs) > 1 else 0.0 for rs in runs.values())
    apart = f"{(ours['validation'] - theirs['validation']) / noise if noise else 0:+.1f}"
    losses = (f"{side[part]:.4f}" for part in FIGURES[:2] for side in (ours, theirs))
    less, time_ = (f"{ours[name] / theirs[name]:.2f}" for name in FIGURES[2:])
    return [KEYS[key], *losses, apart, f"{ours['sent'] / tasks[0].steps:,.0f}", less, f"{ours['seconds']:.1f}", time_]


def main() -> int:
    parser = parser_of(__doc__, "upstream", f"{QUICK_STEPS} steps, one seed")
    parser.add_argument("--upstream", type=Path, required=True, metavar="DIR", help="the folder that holds its exogym")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    steps, seeds = (QUICK_STEPS, 1) if args.quick else (STEPS, args.seeds)
    ways = [(key, whose) for key in KEYS for whose in ("ours", "upstream") if whose != "ours" or key[-6:] != "copies"]
    tasks = [Task(key=key, whose=whose, seed=seed, steps=steps) for seed in range(seeds) for key, whose in ways]
    done = Done(args.out / "quick" if args.quick else args.out)
    done.run(tasks, lambda task: work(task, args.upstream.resolve()), args.more)
    if done.left(tasks):
        return int(bool(done.failed))
    rows = [row(done, tasks, key) for key in KEYS]
    misses = [
        f"{name}: {far} standard deviations" for name, *_, far in (r[:6] for r in rows) if abs(float(far)) > NOISE
    ]
    about = (
        f"Digits, an MLP of {'-'.join(map(str, WIDTHS))}, {NODES} nodes on this machine, {steps} steps of {BATCH} "
        f"images on each, AdamW with lr {LR:g} (DeMo 1e-3), no schedule. Means of {seeds} seeds, each with the same "
        "first weights. Noise: the larger standard deviation of the two sides' validation losses. Bytes are a ring's."
    )
    lines = [about, "", *table(HEAD, rows), *done.listed(tasks, misses)]
    publish("upstream exogym side by side", lines, done.commits(tasks), write=not args.quick)
    return 0


if one := os.environ.get("ONE"):  # also in the processes that upstream starts
    the_task = Task(**json.loads(one))
    if the_task.whose == "upstream":
        watch_upstream(Path.cwd(), the_task.key)

if __name__ == "__main__":
    sys.exit(run_here(the_task, Path.cwd()) if one else main())
