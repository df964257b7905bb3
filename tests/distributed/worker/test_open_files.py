"""A Mac's terminal and its sshd allow 256 open files, which groups that were given up would use up."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
from distributed.worker import main
resource.setrlimit(resource.RLIMIT_NOFILE, {allowed})
main.allow_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("allowed", "then"), [((256, 4500), 4096), ((256, 1000), 1000), ((4200, 4200), 4200)])
def test_a_worker_may_open_many_but_no_more_than_the_system_allows(allowed, then):
    script = SCRIPT.format(allowed=allowed)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(then), str(allowed[1])]
