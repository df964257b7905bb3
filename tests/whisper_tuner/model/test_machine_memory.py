import subprocess
import sys

import psutil
import pytest

from whisper_tuner.model import machine_memory as module
from whisper_tuner.model.machine_memory import boot_id, machine_memory, tightest_group

GB = 10**9
# As `sysctl -n kern.bootsessionuuid` prints it, by published transcripts; not recorded on a Mac of ours.
MAC = "8C9A3B52-5F0E-4B7A-9C55-0D1A6F3E2B71\n"


def group(folder, files, **values) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(files, values.values(), strict=True):
        (folder / name).write_text(f"{value}\n")


def second(folder, limit, used=0, cache=0) -> None:
    group(folder, ("memory.max", "memory.current"), limit=limit, used=used)
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 3\n")


def first(folder, limit, used=0, cache=0) -> None:
    group(folder, ("memory.limit_in_bytes", "memory.usage_in_bytes"), limit=limit, used=used)
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cache}\n")


def test_of_this_machine():
    known = machine_memory()
    assert 0 < known["available"] <= known["total"] <= psutil.virtual_memory().total
    again = subprocess.check_output(
        [sys.executable, "-c", "from whisper_tuner.model.machine_memory import *; print(machine_memory()['machine'])"]
    )
    assert again.decode().strip() == known["machine"] != ""


def test_the_tightest_of_the_groups_around_counts(tmp_path):
    second(tmp_path / "user", 8 * GB, 5 * GB, 2 * GB)
    second(tmp_path / "user" / "session", "max", GB)
    limit, used, identity = tightest_group("0::/user/session\n", tmp_path)
    assert (limit, used) == (8 * GB, 3 * GB)  # what files are cached for is given back when it is needed
    assert identity == tightest_group("0::/user\n", tmp_path)[2]
    assert tightest_group("0::/other\n", tmp_path) is None


def test_groups_of_the_first_version(tmp_path):
    first(tmp_path / "memory", 2**63 - 4096)
    first(tmp_path / "memory" / "box", 4 * GB, 3 * GB, GB)
    listing = "9:name=systemd:/\n4:memory:/box\n1:cpu:/box\n0::/\n"
    assert tightest_group(listing, tmp_path)[:2] == (4 * GB, 2 * GB)


@pytest.mark.parametrize("path", ["/docker/0123", "/../.."])
def test_a_container_sees_its_own_group_as_the_root(tmp_path, path):
    second(tmp_path, 2 * GB, GB)
    assert tightest_group(f"0::{path}\n", tmp_path)[:2] == (2 * GB, GB)


def test_a_limit_counts_as_the_machine(tmp_path, monkeypatch):
    second(tmp_path / "box", GB, GB // 4)
    (tmp_path / "listing").write_text("0::/box\n")
    free = machine_memory()
    monkeypatch.setattr(module, "LISTING", tmp_path / "listing")
    monkeypatch.setattr(module, "GROUPS", tmp_path)
    limited = machine_memory()
    assert limited["total"] == GB and limited["available"] == GB - GB // 4
    assert limited["machine"].startswith(boot_id()) and limited["machine"] != free["machine"]


@pytest.mark.parametrize(("text", "known"), [(MAC, MAC.strip()), ("", ""), ("sysctl: unknown oid\n", "")])
def test_a_mac_is_known_by_its_boot(monkeypatch, text, known):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(module, "MAC_BOOT_ID", ["printf", "%s", text])
    assert boot_id() == known
