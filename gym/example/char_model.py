"""A tiny character model, trained on N local nodes with AllReduce and with DiLoCo: loss against bytes sent.

PYTHONPATH=gym python gym/example/char_model.py --nodes 2 --steps 200
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from exogym import AllReduceStrategy, CsvLogger, DiLoCoStrategy, LocalTrainer

CONTEXT = 32  # characters


class Characters(Dataset):
    """Windows of CONTEXT + 1 bytes of this package's own source."""

    def __init__(self, validation: bool):
        files = sorted((Path(__file__).parent.parent / "exogym").rglob("*.py"))
        text = torch.tensor(list(b"".join(f.read_bytes() for f in files)))
        split = len(text) * 9 // 10
        self.text = text[split:] if validation else text[:split]

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        window = self.text[i * CONTEXT : (i + 1) * CONTEXT + 1]
        return {"inputs": window[:-1], "labels": window[1:]}


class CharModel(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        states, _ = self.recurrent(self.embedding(batch["inputs"]))  # [B, CONTEXT, width]
        loss = nn.functional.cross_entropy(self.head(states).flatten(0, 1), batch["labels"].flatten())
        return loss, batch["labels"].numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--log", type=Path, help="folder for CSV logs")
    arguments = parser.parse_args()
    strategies = {
        "allreduce": AllReduceStrategy(lr=3e-3, max_norm=1.0),
        "diloco": DiLoCoStrategy(H=20, lr=3e-3, max_norm=1.0, outer_momentum=0.9),
        "averaging": DiLoCoStrategy(H=20, lr=3e-3, max_norm=1.0),
    }
    torch.manual_seed(0)
    trainer = LocalTrainer(CharModel(), Characters(validation=False), Characters(validation=True))
    for name, strategy in strategies.items():
        log = CsvLogger(arguments.log / f"{name}.csv") if arguments.log else None
        _, result = trainer.fit(
            strategy=strategy,
            num_nodes=arguments.nodes,
            max_steps=arguments.steps,
            batch_size=32,
            device="cpu",
            events=log,
        )
        print(f"{name:10} validation loss {result.val_loss:.3f}   {result.bytes_sent / 1e6:8.1f} MB sent per node")


if __name__ == "__main__":
    main()
