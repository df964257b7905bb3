import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exogym_toys import run_threads

import exogym
from exogym.errors import SettingError
from exogym.info import check_communication, main, measure
from exogym.launch import launch

SCRIPT = Path(__file__).with_name("launched_script.py")


def test_what_this_machine_has():
    found = exogym.info()
    assert found["torch"] == torch.__version__ and found["backends"][0] == "gloo"
    assert {"allreduce", "diloco"} <= {*found["strategies"]}
    cpu = found["devices"][0]
    assert cpu["name"] == "cpu" and 0 < cpu["free"] <= cpu["memory"]
    lines = str(found).splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("device")] == [
        f"device {device['name']}" for device in found["devices"]
    ]
    assert found["exogym"]["source"] in lines[0] and found["exogym"]["source"] == exogym.info()["exogym"]["source"]


def test_importing_exogym_imports_no_torch_and_info_stays_a_function():
    code = """
import sys
import exogym
assert "torch" not in sys.modules
found = exogym.info()
import exogym.info
assert exogym.info().keys() == found.keys()
exogym.check_communication
print(found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "python" in done.stdout, done.stderr


@pytest.mark.slow
def test_real_processes_are_timed():
    found = check_communication(megabytes=[0.01, 2], repeats=3)
    assert found.passed and found.ranks == 2
    assert [(each.collective, each.megabytes) for each in found.timed] == [
        ("all_reduce", 0.01),
        ("broadcast", 0.01),
        ("all_reduce", 2),
        ("broadcast", 2),
    ]
    assert [each.sent for each in found.timed] == [10_000, 10_000, 2_000_004, 2_000_004]  # pieces begin with a meeting
    assert all(0 < each.seconds < 10 for each in found.timed)
    rows = str(found).splitlines()
    assert rows[0] == "2 ranks" and len(rows) == 6 and all(row.endswith("  right") for row in rows[2:])


def test_ranks_that_get_something_else_are_told():
    def rank_main(comm, damage):
        class Damaged(type(comm)):
            def all_reduce_(self, flat):
                super().all_reduce_(flat)
                if flat.numel() > 1:
                    damage(self.rank, flat)

        comm.__class__ = Damaged
        return measure(comm, [0.001], 1)

    def on_one_rank(rank, flat):
        flat[0] += rank

    def on_all_ranks(rank, flat):
        flat[0] += 1

    unequal = run_threads(3, lambda comm: rank_main(comm, on_one_rank))
    assert {str(each) for each in unequal} == {str(unequal[0])} and not unequal[0].passed
    assert str(unequal[0]).splitlines()[2].endswith("  WRONG, NOT EQUAL on all ranks")
    assert str(unequal[0]).splitlines()[3].endswith("  right")
    equal = run_threads(2, lambda comm: rank_main(comm, on_all_ranks))[0]
    assert not equal.passed and str(equal).splitlines()[2].endswith("  WRONG")


@pytest.mark.slow
def test_in_a_launched_script(tmp_path):
    launch(SCRIPT, ["check", tmp_path], nproc_per_node=2)
    first, second = ((tmp_path / f"{rank}.json").read_text() for rank in range(2))
    assert first == second and first.count("all_reduce") == 2


def test_the_command(capsys):
    assert main([]) == 0
    assert "all_reduce" not in capsys.readouterr().out
    assert main(["--check", "--nproc", "2", "--megabytes", "0.1", "--repeats", "1"]) == 0
    assert "\n2 ranks\n" in capsys.readouterr().out
    assert main(["--check", "--nproc", "1"]) == 1
    assert "num_nodes must be at least 2" in capsys.readouterr().err
    with pytest.raises(SettingError, match="megabytes must be at least"):
        check_communication(megabytes=[0])
