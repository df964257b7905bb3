"""`python check_slowly.py STORE SECONDS MANIFEST MODEL OUT [HOSTS]`: `data check` on a machine that needs SECONDS more
for each group of clips, with a cache of its own. The report goes to OUT.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from distributed.launcher import evaluate
from multimac.commands import data_check
from whisper_tuner.eval import evaluation


def main() -> int:
    store, seconds, manifest, model, out, *hosts = sys.argv[1:]
    transcribe = evaluation.transcribe

    def slowly(*arguments, **settings):
        time.sleep(float(seconds))
        return transcribe(*arguments, **settings)

    evaluation.transcribe = slowly
    evaluate.CHECK_BATCH_SIZE = 2  # clips of a group: there are few
    evaluate.hear_together = partial(evaluate.hear_together, worth_s=0.0)
    data_check.PROJECT = Path(store)
    hosts_file = Path(hosts[0]) if hosts else None
    return data_check.data_check([manifest], model=model, hosts=hosts_file, out=Path(out), language="en")


if __name__ == "__main__":
    sys.exit(main())
