"""A script that fits a model of the user's own on the hosts of a file, for those who run it somewhere."""

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from distributed.network_trainer import NetworkTrainer  # its old name, which users may have
from exogym.strategy import DiLoCoStrategy

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, batch):
        x, y = batch
        return ((self.layer(x) - y) ** 2).mean()

torch.manual_seed(0)
x = torch.randn(256, 4)
model = Line()
before = model.layer.weight.clone()
trainer = NetworkTrainer(sys.argv[1], model, TensorDataset(x, x.sum(1, keepdim=True)))
strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=5, outer_momentum=0)
fitted = trainer.fit(strategy=strategy, max_steps=40, batch_size=16, device="cpu")
assert fitted is model and not torch.allclose(model.layer.weight, before)
print(trainer.result.rounds, [round(w, 2) for w in model.layer.weight[0].tolist()])
"""
FITTED = "8 [1.0, 1.0, 1.0, 1.0]"  # the last line that it prints
