"""`python -m multimac.report RUN_DIR`, by the launcher at the end of a run: see distributed/launcher/main.py."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from .page import contents, write_report


def main(run_dir: Path) -> int:
    """Prints the report's path; nothing for a run that has trained no step; or the reason, with status 1."""
    try:
        found = contents(run_dir, ended=True)
        if found["run"].steps:
            print(write_report(found))
        return 0
    except Exception as error:
        traceback.print_exc()  # into launcher.log
        print(str(error).splitlines()[0] if str(error) else type(error).__name__)
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
