"""What strategies take, against peaks of real runs."""

import pytest

from distributed.plan.strategy_memory import more_bytes
from exogym.strategy import STRATEGIES, AllReduceConfig, DiLoCoConfig, strategy_config
from whisper_tuner.model.memory import AFTER_A_STEP_BYTES, TRAINED_BYTES

# (strategy, keys) -> bytes of the peak for each trained parameter, of the rank that takes most; beyond 0.5 GB and the
# parameter itself. Two ranks with a random whisper-tiny, two clips of 3 s, a checkpoint after each exchange, Linux CPU.
# Those with `wire`, `share_moments` or `overlap_steps` are the most in 3 or 4 runs of two bare ranks of 38 linear
# layers, beyond 0.35 GB, where plain averaging took 39.4.
MEASURED = {
    ("allreduce", ()): 36.1,
    ("diloco", ()): 37.0,
    ("diloco", ("outer_momentum = 0.9",)): 45.1,
    ("diloco", ("outer_optim = adam", "outer_lr = 0.1")): 52.8,
    ("diloco", ("wire = int8",)): 62.5,
    ("diloco", ("wire = bf16",)): 62.5,
    ("diloco", ("share_moments = true",)): 49.9,
    ("diloco", ("overlap_steps = 1",)): 59.6,
    ("diloco", ("share_moments = true", "overlap_steps = 1")): 60.8,
    ("diloco", ("share_moments = true", "overlap_steps = 1", "wire = int8")): 73.3,
    ("parameter_server", ()): 36.9,
    ("parameter_server", ("outer_momentum = 0.9",)): 55.1,
    ("parameter_server", ("outer_optim = adam", "outer_lr = 0.1")): 65.7,
    ("fedavg", ("island_size = 2",)): 42.3,
    ("sparta", ()): 37.6,
    ("sparta", ("compression_method = topk", "quantization_bits = 8")): 37.4,
    ("sparta_diloco", ("compression_method = topk", "outer_momentum = 0.9")): 49.6,
}
NOT_MEASURED = {"demo"}


@pytest.mark.parametrize("run", MEASURED, ids=str)
def test_no_strategy_takes_more_than_its_estimate(run):
    name, keys = run
    config = strategy_config(name, dict(key.split(" = ") for key in keys))
    assert 0.9 < (TRAINED_BYTES + more_bytes(config, 2)) / MEASURED[run] < 1.25


def test_a_rank_alone_keeps_its_moments_and_a_copy_for_a_checkpoint():
    """8 and 12 bytes; whisper-tiny took 19 to 22 in three epochs of French prompts."""
    config = AllReduceConfig()
    assert 20 <= AFTER_A_STEP_BYTES + more_bytes(config, 1) <= 24 and more_bytes(config, 2) == 0
    assert more_bytes(DiLoCoConfig(), 1) == more_bytes(DiLoCoConfig(), 2)  # it keeps flats, though nobody is there


def test_every_strategy_was_measured():
    assert set(STRATEGIES) - NOT_MEASURED == {name for name, _ in MEASURED}
