"""Linear layers whose backward pass sums over few enough outputs for Apple's GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class SplitLinear(nn.Linear):
    """An nn.Linear that is computed in parts of `most` outputs: the gradient of its inputs sums over each part alone.

    Whisper's output layer has 51,865 outputs or so, more than M1 and M2 sum rightly (see exogym.device.MPS_TERMS).
    """

    most: int

    def forward(self, values: Tensor) -> Tensor:
        size = math.ceil(self.out_features / math.ceil(self.out_features / self.most))
        weights = self.weight.split(size)
        biases = [None] * len(weights) if self.bias is None else self.bias.split(size)
        parts = [linear(values, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return torch.cat(parts, dim=-1)


def split_wide_layers(model: nn.Module, most: int) -> None:
    """Make a SplitLinear of each linear layer of more outputs than `most`, where it stands: ties and hooks stay."""
    for module in model.modules():
        if type(module) is nn.Linear and module.out_features > most:
            module.__class__, module.most = SplitLinear, most
