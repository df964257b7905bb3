"""What is run with the programs of a stock Mac, and what people are told to type."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bsd_tools import bsd_tools
from login_shells import SYSTEM_SHELLS, installed

PROJECT = Path(__file__).parents[2]
GNU = r"ls -\w*e|sed -i|readlink -f|stat -c|date -d|grep -\w*P|xargs -r|tail --pid"
LINUX = r"\b(timeout|setsid|flock|nproc|tac) "


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_help_lists_the_targets_in_columns(tmp_path):
    path = {"PATH": str(bsd_tools(tmp_path / "tools"))}
    shown = subprocess.run([shutil.which("make"), "help"], cwd=PROJECT, env=path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[:2] == [f"  {'help':12}list the targets", f"  {'setup':12}make .venv with all dependencies"]
    assert len(lines) == (PROJECT / "Makefile").read_text(encoding="utf-8").count("  ## ")


@pytest.mark.parametrize("shell", SYSTEM_SHELLS)
@pytest.mark.parametrize("name", ["setup.sh", "system_packages.sh"])
def test_any_shell_that_may_be_called_sh_reads_our_scripts(name, shell, tmp_path):
    sh = installed(shell, tmp_path, called="sh")
    assert subprocess.run([sh, "-n", PROJECT / "tools" / name], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "name", ["Makefile", "tools/setup.sh", "tools/system_packages.sh", ".github/workflows/mac.yml"]
)
def test_no_line_of_ours_needs_gnu_programs(name):
    assert not re.findall(f"{GNU}|{LINUX}", (PROJECT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", ["distributed", "multimac", "whisper_tuner", "gym", "docs"])
def test_nobody_is_told_to_use_them(folder):
    for path in [*(PROJECT / folder).rglob("*.py"), *(PROJECT / folder).rglob("*.md")]:
        assert not re.findall(f"`(?:{GNU}|{LINUX})", path.read_text(encoding="utf-8")), path
