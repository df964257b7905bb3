"""Machines whose arithmetic differs train together: outer optimizers give the same bits, and drift is taken away."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exogym_toys import Steps, Tokens, token_batch, train_node

from exogym import AllReduceStrategy, Checkpoints, DiLoCoStrategy, FlatParameters, digest
from exogym.comm.process_group import LOOPBACK, ProcessGroupComm, join_local_store, local_store
from exogym.strategy import OptimSpec
from exogym.strategy.optim import exact_from_spec, from_spec

SPECS = {
    "plain": OptimSpec(name="sgd", lr=0.7),
    "decay": OptimSpec(name="sgd", lr=0.7, weight_decay=0.1),
    "momentum": OptimSpec(name="sgd", lr=0.7, momentum=0.9),
    "nesterov": OptimSpec(name="sgd", lr=0.7, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": OptimSpec(name="adam", lr=0.01, weight_decay=0.1),
    "adamw": OptimSpec(name="adamw", lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
}
every_spec = pytest.mark.parametrize("name", SPECS)


def drawn(shape, chance):
    """Whole numbers of 1/4096, at random: torch.randn has other bits on another CPU."""
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    return torch.randint(-(2**13), 2**13, size, generator=chance) / 2**12


def steps_with(make, spec, steps=30):
    """Weights after some steps with gradients that are the same each time."""
    chance = torch.Generator().manual_seed(3)
    weights = [torch.nn.Parameter(drawn(shape, chance)) for shape in (1003, (7, 5))]
    optimizer = make(spec, weights)
    for _ in range(steps):
        for weight in weights:
            weight.grad = drawn(weight.shape, chance) * 0.1
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights]), optimizer


@every_spec
def test_they_are_torchs_optimizers_up_to_rounding(name):
    ours, _ = steps_with(exact_from_spec, SPECS[name])
    theirs, _ = steps_with(lambda spec, weights: from_spec(spec, [{"params": weights}]), SPECS[name])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@every_spec
def test_their_state_goes_through_a_checkpoint(name, tmp_path):
    whole, _ = steps_with(exact_from_spec, SPECS[name], steps=2)
    _, half = steps_with(exact_from_spec, SPECS[name], steps=1)
    kept = Checkpoints(tmp_path, "rank0")
    kept.save(1, half.state_dict())
    chance = torch.Generator().manual_seed(3)
    weights = [torch.nn.Parameter(drawn(shape, chance)) for shape in (1003, (7, 5))]
    optimizer = exact_from_spec(SPECS[name], weights)
    for step in range(2):
        for weight in weights:
            weight.grad = drawn(weight.shape, chance) * 0.1
        if step:
            optimizer.load_state_dict(kept.load(1))
        optimizer.step()
    assert torch.equal(whole, torch.cat([weight.detach().flatten() for weight in weights]))


STRATEGIES = {
    "allreduce": lambda: AllReduceStrategy(lr=0.02, weight_decay=0.1, max_norm=0.5, check_interval=40),
    "averaging": lambda: DiLoCoStrategy(lr=0.02, H=5, outer_momentum=0),
    "momentum": lambda: DiLoCoStrategy(lr=0.02, H=5, outer_momentum=0.9),
    "outer adam": lambda: DiLoCoStrategy(lr=0.02, H=5, outer_optim="adamw", outer_lr=0.01),
    "an optimizer of one's own": lambda: DiLoCoStrategy(lr=0.02, H=5, outer_optim=torch.optim.RMSprop, outer_lr=0.01),
}
STEPS = 100


def train(name: str, rank: int, port: int, folder: str) -> list:
    """What one of two ranks ended with, and what it compares within itself."""
    comm = ProcessGroupComm(rank=rank, world_size=2, store=join_local_store(port), address=LOOPBACK, timeout=60)
    source = Steps([[token_batch(4, seed=10 * i + rank)] for i in range(STEPS)])
    model, events = Tokens(), []
    with torch.no_grad():  # what is frozen comes from a file; random numbers that are drawn here may differ
        model.frozen.weight.copy_(torch.eye(8))
        model.frozen.bias.zero_()
    node = train_node(
        model, comm, STRATEGIES[name](), source, epochs=1, device="cpu", events=events.append,
        checkpoints=Checkpoints(folder, f"rank{comm.rank}"), checkpoint_interval=15,
    )  # fmt: skip
    result = node.run()
    saved = node.saved.checkpoints
    kept = [[number, node.state.fingerprint_of(saved.load(number)["agreed"])] for number in saved.good()]
    drifts = sum(event["type"] == "drift" and event["difference"] > 0 for event in events)
    return [result.digest == digest(FlatParameters(model).read()), result.digest, kept, drifts]


def rank_main(rank: int, ports: list[int], folder: str) -> None:
    """Train with each strategy in this process; say what came of it, and which bits optimizers have here."""
    found = {name: train(name, rank, port, f"{folder}/{port}") for name, port in zip(STRATEGIES, ports, strict=True)}
    exact, _ = steps_with(exact_from_spec, SPECS["nesterov"])
    theirs, _ = steps_with(lambda spec, weights: from_spec(spec, [{"params": weights}]), SPECS["adamw"])
    print(json.dumps(found | {"optimizers": [digest(exact), digest(theirs)]}), flush=True)
    os._exit(0)


@pytest.fixture(scope="module")
def two_kinds_of_cpu(tmp_path_factory):
    """What each of two ranks says whose processes compute with different instructions."""
    stores, folder = [local_store() for _ in STRATEGIES], tmp_path_factory.mktemp("ranks")
    ports = [store.port for store in stores]
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, [here, here.parent, here.parents[2] / "gym"]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", f"import test_exact; test_exact.rank_main({rank}, {ports}, {str(folder / kind)!r})"],
            env={**os.environ, "PYTHONPATH": path, "ATEN_CPU_CAPABILITY": kind, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, kind in enumerate(("avx2", "default"))
    ]
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), [error[-2000:] for _, error in said]
    return [json.loads(out) for out, _ in said]


@pytest.mark.skipif("AVX" not in torch.backends.cpu.get_cpu_capability(), reason="this CPU has one arithmetic only")
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_kinds_of_cpu_finish_with_equal_weights(name, two_kinds_of_cpu):
    first, second = (rank[name] for rank in two_kinds_of_cpu)
    assert first[0] and second[0] and first[1:3] == second[1:3]
    drifts = [first[3], second[3]]
    assert drifts == [0, 0] if name not in ("allreduce", "an optimizer of one's own") else drifts[1] > 0


@pytest.mark.skipif("AVX" not in torch.backends.cpu.get_cpu_capability(), reason="this CPU has one arithmetic only")
def test_two_kinds_of_cpu_have_the_same_bits_of_an_exact_optimizer_and_not_of_torchs(two_kinds_of_cpu):
    (exact, theirs), (other_exact, other_theirs) = (rank["optimizers"] for rank in two_kinds_of_cpu)
    assert exact == other_exact
    assert theirs != other_theirs, "their arithmetic is the same: these tests have shown nothing"
