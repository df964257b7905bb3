"""`python evaluate_slowly.py RUN CACHE SECONDS [alone]`: evaluates a run again, on a master that needs SECONDS more for
each group of clips. Events are lines of JSON; predictions lie in the run's folder.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

from distributed.launcher import evaluate
from distributed.plan.launch import Launch
from whisper_tuner.eval import evaluation


def main() -> None:
    run_dir, cache, seconds, *alone = sys.argv[1:]
    launch = Launch.load(Path(run_dir))
    transcribe = evaluation.transcribe

    def slowly(*arguments, **settings):
        time.sleep(float(seconds))
        return transcribe(*arguments, **settings)

    evaluation.transcribe = slowly
    spec = dataclasses.replace(launch.ranks[0].spec, cache_dir=f"{cache}/cache")
    helpers = [] if alone else [rank for rank in launch.ranks if rank.host]
    tell = lambda event: print(json.dumps(event), flush=True)  # noqa: E731
    evaluate.evaluate_run(spec, Path(launch.test), tell, helpers, worth_s=0.0)


if __name__ == "__main__":
    main()
