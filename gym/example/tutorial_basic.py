"""Lesson 1: train a model on several nodes of this machine, and compare what that costs.

PYTHONPATH=gym python gym/example/tutorial_basic.py

A node is a process with a copy of the model and a share of the data. On one machine this is a way to try out what
would happen on several: nodes talk over real sockets, and what they send is counted.
"""

import argparse
import copy

import torch
from comparison import accuracy, load_digits
from torch import nn

from exogym import AllReduceStrategy, DiLoCoStrategy, LocalTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", type=int, default=4)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--quick", action="store_true", help="two nodes and two epochs, to see that it runs")
options = parser.parse_args()
nodes, epochs = (2, 2) if options.quick else (options.nodes, options.epochs)

# Step 1: data. Any dataset with a length and an order will do. These hold pairs of 64 pixels and a label.
train_data, val_data = load_digits()
print(f"Step 1: {len(train_data)} images to train on, {len(val_data)} to validate with.")


# Step 2: a model. Its `forward` takes a batch, as torch's default collate makes it of the samples, and returns the mean
# loss. It may return (mean loss, number of target tokens) instead, where samples differ in length.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, batch):
        pixels, labels = batch
        return nn.functional.cross_entropy(self.layers(pixels), labels)


torch.manual_seed(0)
first_model = Model()
print(f"Step 2: the model has {sum(p.numel() for p in first_model.parameters()):,} parameters.")
print(f"        Before training it is right in {accuracy(first_model, val_data):.0%} of cases: it guesses.")

# Step 3: one node. `fit` trains the model that the trainer was given and returns it; so each run here gets a copy.
# batch_size is what one node takes in a step.
settings = {"num_epochs": epochs, "batch_size": 32, "device": "cpu"}
trainer = LocalTrainer(copy.deepcopy(first_model), train_data, val_data)
model = trainer.fit(strategy=AllReduceStrategy(lr=1e-3), num_nodes=1, **settings)
print(f"Step 3: one node made {trainer.result.steps} steps: {accuracy(model, val_data):.1%} right.")
print(f"        It sent {trainer.result.bytes_sent} bytes, since there is nobody to send to.")

# Step 4: several nodes that average their gradients at every step. They train as one node would with a batch of all
# their samples, so they need fewer steps for an epoch. Each gradient travels: that is the cost.
trainer = LocalTrainer(copy.deepcopy(first_model), train_data, val_data)
model = trainer.fit(strategy=AllReduceStrategy(lr=1e-3), num_nodes=nodes, **settings)
print(f"Step 4: {nodes} nodes with AllReduce made {trainer.result.steps} steps: {accuracy(model, val_data):.1%} right.")
print(f"        Each sent {trainer.result.bytes_sent / 1e6:.2f} MB.")
all_reduce_sent = trainer.result.bytes_sent

# Step 5: DiLoCo. Nodes make H steps alone, and only then bring their weights together. They send about H times less.
# (Besides, nodes make sure that they start alike, and add up their validation losses: that is counted, too.)
trainer = LocalTrainer(copy.deepcopy(first_model), train_data, val_data)
model = trainer.fit(strategy=DiLoCoStrategy(H=20, lr=1e-3), num_nodes=nodes, **settings)
sent = trainer.result.bytes_sent
print(f"Step 5: {nodes} nodes with DiLoCo made {trainer.result.steps} steps: {accuracy(model, val_data):.1%} right.")
print(f"        They agreed {trainer.result.rounds} times, and each sent {sent / 1e6:.2f} MB.")
print(f"        That is {all_reduce_sent / sent:.0f} times less than with AllReduce.")

# Step 6: what is known about a run. `trainer.result` is rank 0's; `trainer.results` has those of all ranks.
result = trainer.result
print(f"Step 6: validation loss {result.val_loss:.3f}; {result.seconds:.1f} s, of these")
print(f"        {result.seconds_communicating:.1f} s in exchanges, waiting for other nodes included.")
print(f"        All nodes ended with the same weights: {len({each.digest for each in trainer.results}) == 1}.")

# Step 7: the model is an ordinary torch module, to be used and saved as any other.
print(f"Step 7: it takes the first image of the validation set for a {model.layers(val_data[0][0]).argmax().item()}.")
print(f"        It is a {val_data[0][1].item()}. To keep the model: torch.save(model.state_dict(), 'model.pt')")
