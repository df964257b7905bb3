"""Nested dicts, lists and tensors as JSON beside named tensors; and the hash of all of it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from exogym.errors import CheckpointError


def to_tree(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON that mirrors `value`, its tensors replaced by names and put into `tensors`."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[to_tree(key, tensors), to_tree(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [to_tree(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(f"a {type(value).__name__} cannot be part of a checkpoint")


def from_tree(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {from_tree(key, tensors): from_tree(item, tensors) for key, item in content}
    items = [from_tree(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def fingerprint(state: Any) -> int:
    """64 bits of the hash of a state, as a signed number; the same for states that are equal to the bit."""
    tensors: dict[str, torch.Tensor] = {}
    hasher = hashlib.blake2b(json.dumps(_sorted(to_tree(state, tensors))).encode(), digest_size=8)
    for tensor in tensors.values():
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return int.from_bytes(hasher.digest(), "big", signed=True)


def _sorted(tree: Any) -> Any:
    """Dicts that are equal may have their keys in another order."""
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "tensor":
        return tree
    if kind == "dict":
        return {kind: sorted(([_sorted(key), _sorted(item)] for key, item in content), key=lambda pair: repr(pair[0]))}
    return {kind: [_sorted(item) for item in content]}
