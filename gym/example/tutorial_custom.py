"""Lesson 3: a strategy of your own, a communication module of your own, and a composition of modules.

PYTHONPATH=gym python gym/example/tutorial_custom.py

What is defined here travels to the nodes' processes by itself: a strategy may stand in a script or a notebook.
"""

import argparse
from dataclasses import dataclass

import torch
from comparison import DigitModel, accuracy, load_digits, show, train

from exogym import AllReduceStrategy, CommunicateOptimizeStrategy, CommunicationModule, Strategy, StrategyConfig
from exogym.config import setting
from exogym.strategy import communicate
from exogym.strategy.communicate_optimize import Exchanged
from exogym.strategy.federated_averaging import AveragingCommunicator

# Part 1: a strategy. The loop computes gradients, then calls two methods of the strategy at every step:
#   communicate_gradients   `.grad` is the mean gradient of this node's samples; here ranks talk
#   update_parameters       all ranks have communicated; here the weights change
# A third one, _init_node(model, rank, num_nodes), is called once and may prepare something.
# Settings of a strategy are the fields of its Config. It has those of every strategy: lr, inner_optim, max_norm, ...


@dataclass(frozen=True, kw_only=True)
class SignVoteConfig(StrategyConfig):
    limit: float = setting(2.0, "no weight becomes larger than this")


class SignVoteStrategy(Strategy):
    """Ranks send the signs of their gradients, one byte each, and step along the majority's (1810.05291)."""

    Config = SignVoteConfig

    def communicate_gradients(self):
        gradients = [parameter.grad for parameter in self.parameters.parameters]  # of all that is trained
        votes = torch.cat([gradient.flatten() for gradient in gradients]).sign().to(torch.int8)
        communicate.all_reduce(votes)  # the sum over ranks; one call for all tensors is faster than one for each
        of_parameters = votes.sign().split([gradient.numel() for gradient in gradients])
        for gradient, majority in zip(gradients, of_parameters, strict=True):
            gradient.copy_(majority.view_as(gradient))

    def update_parameters(self):
        super().update_parameters()  # a step of the optimizer
        with torch.no_grad():
            for parameter in self.parameters.parameters:
                parameter.clamp_(-self.config.limit, self.config.limit)


# Rules for communicate_gradients: all ranks make the same calls in the same order, and it changes nothing but `.grad`.
# Where a rank is lost, the others call it again, from the gradients that they had.


# Part 2: a communication module. Here nodes make optimizer steps of their own, and after every `interval` steps the
# module brings their weights together. This one lets neighbours average: 0 with 1 and 2 with 3, the next time 1 with 2.
# A module's settings are the fields of its class; `interval` it has from CommunicationModule.
@dataclass(kw_only=True, eq=False)
class Neighbours(CommunicationModule):
    def setup(self, comm, parameters, common, *, keeps_common):
        super().setup(comm, parameters, common, keeps_common=keeps_common)
        self.turn = 0

    def exchange(self, draft, samples, stopping):
        """All communication stands here. It may be repeated, so it changes nothing but the draft of the new weights."""
        wants_to_stop = torch.tensor([float(stopping)])  # if one rank was asked to stop, all have to know
        self.comm.all_reduce_(wants_to_stop)
        rank = self.comm.rank
        other = rank + 1 if (rank + self.turn) % 2 == 0 else rank - 1
        if other in range(self.comm.world_size):  # at either end a rank may be without a neighbour
            weights = draft.read()  # float32 [numel], on the CPU
            self.comm.reduce_among_(weights, sorted([rank, other]))
            draft.set(weights / 2)
        return Exchanged(None, stop=wants_to_stop.item() > 0)

    def apply(self, result, draft):
        """The exchange counts: now the module may change what it keeps."""
        self.turn += 1

    def state_dict(self):
        """Return what a checkpoint needs, so that a stopped run goes on with the right neighbour."""
        return {"turn": self.turn}

    def load_state_dict(self, state):
        self.turn = state["turn"]


# Part 3: compositions. CommunicateOptimizeStrategy takes any modules, ours and its own.
lr = 2e-3
strategies = {
    "AllReduce": lambda: AllReduceStrategy(lr=lr),
    "votes on signs": lambda: SignVoteStrategy(inner_optim="sgd", lr=lr, limit=1.0),
    "neighbours": lambda: CommunicateOptimizeStrategy(communication_modules=[Neighbours(interval=5)], lr=lr),
    "neighbours, and all": lambda: CommunicateOptimizeStrategy(
        communication_modules=[Neighbours(interval=5), AveragingCommunicator(interval=30)], lr=lr
    ),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", type=int, default=4)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--quick", action="store_true", help="two nodes, one epoch and two strategies")
options = parser.parse_args()
nodes, epochs = (2, 1) if options.quick else (options.nodes, options.epochs)
chosen = ["votes on signs", "neighbours, and all"] if options.quick else list(strategies)

train_data, val_data = load_digits()
settings = {"num_nodes": nodes, "num_epochs": epochs, "batch_size": 16, "device": "cpu"}
outcomes = [train(name, strategies[name](), DigitModel(), train_data, val_data, **settings) for name in chosen]
show(outcomes, [accuracy(outcome.model, val_data) for outcome in outcomes])
print(
    """
How to read it: a sign is sent as one byte, a gradient as four, so votes cost a quarter of AllReduce. Neighbours send
all weights to one rank instead of all, every 5 steps. Ranks whose module does not bring all to the same weights stay
apart; what `fit` returns is then the mean of all."""
)
