"""Memory that strategies take beside what DiLoCo takes for plain averaging, which whisper_tuner.model.memory counts."""

from __future__ import annotations

from exogym.strategy import (
    AllReduceConfig,
    DiLoCoConfig,
    FedAvgConfig,
    ParameterServerConfig,
    SPARTADiLoCoConfig,
    StrategyConfig,
)

# Of a trained parameter in a checkpoint: the common value and this rank's, AdamW's moments, the strategy's own.
CHECKPOINT_BYTES = 28
# Bytes for each trained parameter, from peaks of two ranks with a random whisper-tiny that saved after each exchange.
# Plain averaging and SPARTA took 37 of them, outer momentum 45, Adam 53; the server with momentum 55, with Adam 66;
# islands 42, SPARTA-DiLoCo with outer momentum 50. Two bare ranks with the decoder of whisper-tiny took 38 to 43 for
# plain averaging. Two bare ranks of 38 linear layers took 40 to 46 for plain averaging, 39 to 50 with share_moments, 47
# to 60 with overlap_steps, 50 to 61 with both, 65 to 73 with wire = int8 as well; 54 to 63 with int8 or bf16 alone.
OUTER_STATE = 8  # a number of the outer optimizer, and its copy while a checkpoint is written
SERVER = 10  # new weights and new numbers of its outer optimizer, until they count
ROUNDED = 20  # what was not sent yet, its copy in a checkpoint, and room for both with the sum of the next exchange
# A rank's weights at the end of a round, while its exchange travels beside the steps' gradients, whose room stays; and
# what it has made since with a copy, while a checkpoint is written.
IN_FLIGHT = 16
MOMENTS = 8  # own and mean second moments, a quarter of them, while they are summed, and what they leave in the heap
DRAFT = 5  # own weights beside those that ranks share
ALONE = -17  # nothing is kept to be sent, and checkpoints are far apart: 8 of the optimizer and 12 of a copy, and gaps


def more_bytes(config: StrategyConfig, ranks: int) -> int:
    """Return the bytes for each trained parameter at the peak, beyond TRAINED_BYTES; below 0 where it takes less."""
    if ranks == 1 and isinstance(config, AllReduceConfig):
        return ALONE
    found = 0
    if isinstance(config, DiLoCoConfig):
        if states := _outer_states(config):
            found += OUTER_STATE * states + (SERVER if isinstance(config, ParameterServerConfig) else 0)
        if config.wire != "float32":
            found += ROUNDED
        if config.overlap_steps and ranks > 1:
            found += IN_FLIGHT
        if config.share_moments and ranks > 1:
            found += MOMENTS
    in_islands = isinstance(config, FedAvgConfig) and config.island_size is not None
    return found + (DRAFT if in_islands or isinstance(config, SPARTADiLoCoConfig) else 0)


def _outer_states(config: DiLoCoConfig) -> int:
    """Return how many numbers the outer optimizer keeps of each parameter."""
    if config.outer_optim == "sgd":
        return 1 if config.outer_momentum else 0
    return 2  # Adam's; another may keep fewer
