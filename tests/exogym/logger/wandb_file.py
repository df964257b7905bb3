"""Reads the run file that wandb leaves: protocol buffers in LevelDB's log format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Record]:
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = HEADER, []
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block that holds no header
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + HEADER : at + HEADER + size])
        at += HEADER + size
        if kind in (FULL, LAST):
            yield Record.FromString(b"".join(parts))
            parts = []


def history(path: Path) -> list[dict]:
    rows = [record.history.item for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [{".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row} for row in rows]


def config(path: Path) -> dict:
    found = {}
    for record in records(path):
        updates = [record.run.config.update, record.config.update]
        found |= {".".join(u.nested_key) or u.key: json.loads(u.value_json) for items in updates for u in items}
    return found


def summary(path: Path) -> dict:
    updates = [record.summary.update for record in records(path)]
    return {".".join(u.nested_key) or u.key: json.loads(u.value_json) for items in updates for u in items}
