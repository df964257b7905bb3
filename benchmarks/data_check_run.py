"""`multimac data check FOLDER/train.csv FOLDER/test.csv --json`, with its store in FOLDER: for data_check.py."""

from __future__ import annotations

import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from multimac.commands import data_check  # noqa: E402

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    data_check.PROJECT = folder
    manifests = [str(folder / f"{part}.csv") for part in ("train", "test")]
    sys.exit(data_check.data_check(manifests, language="en", as_json=True, config=PROJECT / "config.ini"))
