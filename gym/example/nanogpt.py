"""A small GPT that writes characters, in the style of nanoGPT, trained on N nodes with AllReduce and with DiLoCo.

PYTHONPATH=gym python gym/example/nanogpt.py --nodes 2 --steps 400
PYTHONPATH=gym python gym/example/nanogpt.py --text BOOK.txt

The text is sonnets.txt, beside this file: 36 of Shakespeare's sonnets (1609) in modern spelling, in the public domain.
With 22 kB of text the model learns what words and lines look like, not what they mean.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from comparison import show, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from exogym import AllReduceStrategy, DiLoCoStrategy

SONNETS = Path(__file__).parent / "sonnets.txt"


class Windows(Dataset):
    """Stretches of `context` characters, from every `stride`-th on, and for each the characters that come next."""

    def __init__(self, codes: Tensor, context: int, stride: int):
        self.codes, self.context, self.stride = codes, context, stride

    def __len__(self) -> int:
        return (len(self.codes) - self.context - 1) // self.stride + 1

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        window = self.codes[n * self.stride :][: self.context + 1]
        return {"inputs": window[:-1], "targets": window[1:]}


class Block(nn.Module):
    """Attention to what came before, then a layer for each place by itself; both are added to what goes in."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        x = x + self.attend(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, T, width / heads]
        return self.from_heads(seen.transpose(1, 2).flatten(-2))


class GPT(nn.Module):
    def __init__(self, characters: int, context: int, *, width: int, layers: int, heads: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.context = context
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.tokens.weight  # tied: they travel once
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        """The mean loss, and over how many characters it is the mean: ranks are weighted by them."""
        logits, targets = self.logits(batch["inputs"]), batch["targets"]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), targets.numel()

    def logits(self, codes: Tensor) -> Tensor:
        """[B, T] -> [B, T, characters]"""
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.norm(self.blocks(self.tokens(codes) + self.places(places))))

    @torch.no_grad()
    def write(self, codes: Tensor, count: int, temperature: float = 0.8) -> Tensor:
        """[T] -> [T + count]: each next character is drawn from those that the model thinks likely."""
        drawing = torch.Generator().manual_seed(0)
        for _ in range(count):
            last = self.logits(codes[None, -self.context :])[0, -1] / temperature
            codes = torch.cat([codes, torch.multinomial(last.softmax(-1), 1, generator=drawing)])
        return codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=SONNETS, help="a text in UTF-8 to learn from")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=20, metavar="H", help="steps in a round of DiLoCo")
    parser.add_argument("--quick", action="store_true", help="a tiny model and 20 steps, to see that it runs")
    options = parser.parse_args()
    steps, context, width, layers = (20, 32, 32, 1) if options.quick else (options.steps, 64, 96, 3)

    text = options.text.read_text(encoding="utf-8")
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    split = len(codes) * 9 // 10
    train_data, val_data = Windows(codes[:split], context, 1), Windows(codes[split:], context, context)
    model = GPT(len(letters), context, width=width, layers=layers)
    size = sum(p.numel() for p in model.parameters())
    print(f"{options.text.name}: {len(text):,} characters, {len(letters)} different ones; {size:,} parameters")

    schedule = {"schedule": "cosine", "warmup_steps": steps // 20, "max_norm": 1.0}
    strategies = {
        "AllReduce": AllReduceStrategy(lr=3e-3, **schedule),
        f"DiLoCo, H={options.rounds}": DiLoCoStrategy(H=options.rounds, lr=3e-3, **schedule),
    }
    outcomes = [
        train(
            name,
            strategy,
            model,
            train_data,
            val_data,
            num_nodes=options.nodes,
            max_steps=steps,
            batch_size=16,
            device="cpu",
        )
        for name, strategy in strategies.items()
    ]
    show(outcomes)
    start = torch.tensor([letters.index(letter) for letter in text[:12]])
    written = outcomes[-1].model.eval().write(start, 40 if options.quick else 300)
    print(f"\nWritten by the model that {outcomes[-1].name} trained:\n" + "".join(letters[code] for code in written))


if __name__ == "__main__":
    main()
