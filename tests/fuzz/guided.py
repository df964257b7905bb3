"""The same readers with bytes that atheris mutates, guided by which of our lines they reach; for Linux.

pip install atheris
python tests/fuzz/guided.py [--runs 5000] [FORM ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import atheris

PROJECT = Path(__file__).parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]
LONGEST = 4096  # bytes
OURS = ["cli_typer", "distributed", "exogym", "whisper_tuner"]
Target = tuple[list[bytes], Callable[[bytes], object]]  # examples, and what reads


def hosts_file(folder: Path) -> Target:
    import test_fuzz_hosts_file as of

    def read(data: bytes) -> None:
        (file := folder / "hosts.json").write_bytes(data)
        of.outcome(of.load_hosts, file, names=file, of=data)

    return [json.dumps(document).encode() for document in (of.SHORT, of.LONG)], read


def config(folder: Path) -> Target:
    import test_fuzz_config as of

    def read(data: bytes) -> None:
        (file := folder / "config.ini").write_bytes(data)
        of.outcome(of.jobs, file, names="config.ini", of=data)

    (folder / "model").mkdir()
    return [of.CONFIG, of.LITTLE], read


def manifest(folder: Path) -> Target:
    import test_fuzz_manifests as of

    return [of.CSV], lambda data: of.read(folder / "manifest.csv", data)


def manifest_lines(folder: Path) -> Target:
    import test_fuzz_manifests as of

    return [of.LINES], lambda data: of.read(folder / "manifest.jsonl", data)


def run_spec(folder: Path) -> Target:
    import test_fuzz_specs as of

    return [of.SPEC.to_json().encode()], lambda data: of.told(data.decode("utf-8", "replace"))


def events(folder: Path) -> Target:
    import test_fuzz_events as of

    run = folder / "runs" / "20251121-120000-mine"
    run.mkdir(parents=True)

    def read(data: bytes) -> None:
        of.scanned(run, data)
        of.followed(run, data)

    mock.patch("distributed.launcher.follow.time.sleep").start()
    return [of.WHOLE], read


def checkpoint(folder: Path) -> Target:
    import test_fuzz_checkpoints as of

    checkpoints = of.Checkpoints(folder, "rank0")
    for number in (1, 2):
        checkpoints.save(number, of.STATE)
    return [of.INDEX], lambda data: of.counts(checkpoints, data, of.WEIGHTS)


TARGETS = {each.__name__: each for each in (hosts_file, config, manifest, manifest_lines, run_spec, events, checkpoint)}


def fuzz(form: str, runs: int) -> None:
    """Does not return: libFuzzer ends the process, with another status than 0 if an input made `read` raise."""
    with tempfile.TemporaryDirectory(prefix="guided-") as name:
        for folder in ("files", "corpus"):
            (Path(name) / folder).mkdir()
        with atheris.instrument_imports(include=OURS):
            examples, read = TARGETS[form](Path(name) / "files")
        for number, example in enumerate(examples):
            (Path(name) / "corpus" / f"example-{number}").write_bytes(example)
        options = [f"-runs={runs}", f"-max_len={LONGEST}", "-timeout=20", f"-artifact_prefix={form}-"]
        atheris.Setup([sys.argv[0], *options, f"{name}/corpus"], read)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", metavar="FORM", help=f"of {', '.join(TARGETS)} [default: all]")
    parser.add_argument("--runs", type=int, default=5000, help="inputs of each [default: 5000]")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        fuzz(args.forms[0], args.runs)
    failed = []
    for form in args.forms or TARGETS:
        command = [sys.executable, __file__, form, "--runs", str(args.runs), "--here"]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        print(f"{form}: {' '.join(done.stderr.splitlines()[-1:])} (status {done.returncode})", flush=True)
        failed += [form] if done.returncode else []
    print(f"failed: {', '.join(failed)}" if failed else "none failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
