"""docs/api.md: its Python runs as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TEXT = (PROJECT / "docs" / "api.md").read_text(encoding="utf-8")
NETWORK, WHISPER = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "printed"),
    [(NETWORK, r"(2\.[89]|3\.0)\d* 160"), (WHISPER, r"\d+\.\d+ 5")],
)
def test_an_example_runs(block, printed, tmp_path):
    (tmp_path / "example.py").write_text(block, encoding="utf-8")
    (tmp_path / "bundled").symlink_to(PROJECT / "bundled")
    env = os.environ | {"PYTHONPATH": f"{PROJECT}/gym:{PROJECT}"}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(printed, done.stdout.splitlines()[-1]), done.stdout
