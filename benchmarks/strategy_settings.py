"""Which strategies benchmarks/strategies.py compares, with which settings, and what each should send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import exogym.strategy
from benchmarks.digits import NODES
from exogym import Strategy

H, P_SPARTA, CHUNK, TOP_K = 100, 0.005, 64, 32
RATES = 3e-3, 1e-2, 3e-2
OVERSHOOTS = "outer momentum overshoots where there are few rounds"
DRIFTS = "ranks drift apart between averages, and the data are few"
WEIGHT, PLACE = 4, 2  # bytes of a float32; of a place in a chunk of 64x64 as DeMo sends it


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row. strategy: name of the class in exogym.strategy. note: why it falls behind AllReduce, if it does.

    lr: the best of `rates` by `--sweep`, which makes a short run with each and looks at the validation accuracy.
    label: in the chart; the name, if empty.
    """

    key: str
    name: str
    strategy: str
    lr: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = RATES
    note: str = ""
    label: str = ""

    def build(self, lr: float) -> Strategy:
        """Raises SettingError."""
        return getattr(exogym.strategy, self.strategy)(lr=lr, schedule="cosine", **self.settings)


# Rates are those of `strategies.py --sweep`: 600 steps, seed 100, the highest validation accuracy; of rates that come
# out equal the one with the lowest loss. 1e-3 was worse for all. Made with ranks as threads of one process.
ENTRIES = (
    Entry(key="allreduce", name="AllReduce", strategy="AllReduceStrategy", lr=3e-2),
    Entry(key="diloco", name=f"DiLoCo, H={H}", strategy="DiLoCoStrategy", lr=1e-2, settings={"H": H}, note=DRIFTS),
    Entry(
        key="diloco-nesterov",
        name=f"DiLoCo, H={H}, outer Nesterov 0.7/0.9",
        label=f"DiLoCo, H={H}, Nesterov",
        strategy="DiLoCoStrategy",
        lr=1e-2,
        settings={"H": H, "outer_optim": "sgd", "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True},
        note=OVERSHOOTS,
    ),
    Entry(
        key="server",
        name=f"parameter server, H={H}",
        strategy="ParameterServerStrategy",
        lr=1e-2,
        settings={"H": H},
        note=DRIFTS,
    ),
    Entry(key="fedavg", name=f"FedAvg, H={H}", strategy="FedAvgStrategy", lr=1e-2, settings={"H": H}, note=DRIFTS),
    Entry(
        key="fedavg-islands",
        name="FedAvg, islands of 2, H=10",
        strategy="FedAvgStrategy",
        lr=3e-2,
        settings={"H": 10, "island_size": 2},
        note=DRIFTS,
    ),
    Entry(
        key="sparta",
        name=f"SPARTA, p={P_SPARTA}",
        strategy="SPARTAStrategy",
        lr=3e-3,
        settings={"p_sparta": P_SPARTA},
        note=DRIFTS,
    ),
    Entry(
        key="sparta-topk",
        name=f"SPARTA, p={P_SPARTA}, top-k",
        strategy="SPARTAStrategy",
        lr=3e-2,
        settings={"p_sparta": P_SPARTA, "compression_method": "topk"},
        note=DRIFTS,
    ),
    Entry(
        key="sparta-8bit",
        name=f"SPARTA, p={P_SPARTA}, top-k, 8 bits",
        strategy="SPARTAStrategy",
        lr=1e-2,
        settings={"p_sparta": P_SPARTA, "compression_method": "topk", "quantization_bits": 8},
        note=DRIFTS,
    ),
    Entry(
        key="sparta-diloco",
        name=f"SPARTA-DiLoCo, p={P_SPARTA}, H={H}",
        strategy="SPARTADiLoCoStrategy",
        lr=1e-2,
        settings={"p_sparta": P_SPARTA, "H": H},
        note=DRIFTS,
    ),
    Entry(
        key="demo",
        name=f"DeMo, {TOP_K} of {CHUNK}x{CHUNK}",
        strategy="DeMoStrategy",
        lr=3e-2,
        settings={"compression_decay": 0.999, "compression_topk": TOP_K, "compression_chunk": CHUNK},
        note="its updates are signs of few frequencies, and need a learning rate that suits them",
    ),
)
BY_KEY = {entry.key: entry for entry in ENTRIES}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`key` sends at least `times` less than AllReduce on `net`, over so many steps or more.

    by_formula: how many times less without flags, and without what comes at the end of a run.
    """

    key: str
    net: str
    times: float
    steps: int = 1
    what: str
    formula: str
    by_formula: float


RING = "AllReduce sends 2 (N-1)/N x 4 bytes a parameter at every step"
CLAIMS = (
    Claim(
        key="diloco",
        net="mlp",
        times=95,
        steps=2000,
        what=f"DiLoCo at H={H}",
        formula=f"{RING}, DiLoCo after every H: H = {H}",
        by_formula=H,
    ),
    Claim(
        key="sparta",
        net="mlp",
        times=150,
        steps=2000,
        what=f"SPARTA at p={P_SPARTA}",
        formula=f"{RING}, SPARTA a part p of it: 1/p = {1 / P_SPARTA:g}",
        by_formula=1 / P_SPARTA,
    ),
    Claim(
        key="demo",
        net="layers",
        times=30,
        what="DeMo on layers of 64x64 and up",
        formula=f"{RING}, DeMo N-1 times {TOP_K} components of {WEIGHT} + {PLACE} bytes a chunk of {CHUNK}x{CHUNK}: "
        f"2 x 4 x {CHUNK}^2 / (N x {TOP_K} x {WEIGHT + PLACE}) at N = {NODES}",
        by_formula=2 * WEIGHT * CHUNK**2 / (NODES * TOP_K * (WEIGHT + PLACE)),
    ),
)
