"""A profile on a cluster of Ray's: a TorchTrainer whose workers are the ranks. Ray replaces lost ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from distributed.hosts.paths import PROJECT
from distributed.launched import LaunchedRun
from distributed.plan.job import resolve
from distributed.run_dir.summary import read_run
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import RunError

RESTARTS = 10


def fit(address: str, workers: int, run: str, profile: str, config: Path, settings: list[str], runs: Path) -> Path:
    """Train on a cluster until the end. Returns the folder of the trained model. Raises RunError.

    run: the end of the run's name, by which workers that Ray starts again find it.
    """
    paths = os.pathsep.join([str(PROJECT / "gym"), str(PROJECT)])
    environment = {"env_vars": {"PYTHONPATH": paths, "RAY_TRAIN_V2_ENABLED": "1"}}
    ray.init(address=address, runtime_env=environment, log_to_driver=True)
    asked = {"profile": profile, "config": str(config), "settings": settings, "run": run, "folder": str(Path.cwd())}
    trainer = TorchTrainer(
        be_rank,
        train_loop_config=asked,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=bool(ray.cluster_resources().get("GPU"))),
        run_config=RunConfig(
            name=run, storage_path=str(runs / "ray"), failure_config=FailureConfig(max_failures=RESTARTS)
        ),
    )
    try:
        result = trainer.fit()
    except Exception as error:  # Ray has a class of its own for each way to fail
        raise RunError(f"Ray ended the run: {error}", remedy="Submit it with the same --run to go on.") from error
    finally:
        ray.shutdown()
    return Path(result.checkpoint.path)


def be_rank(asked: dict[str, Any]) -> None:
    """Be one rank, in a worker of Ray's, and report the trained model to Ray."""
    os.chdir(asked["folder"])
    job = resolve(ConfigFile(Path(asked["config"])), asked["profile"], settings=asked["settings"])
    launched = LaunchedRun(job, asked["run"], report="multimac.report")
    if status := launched.go():
        raise RunError(f"rank {os.environ['RANK']} ended with status {status}")
    metrics, model = {}, None
    if os.environ["RANK"] == "0":
        final = launched.run_dir / "final"
        run = read_run(final.parent)
        metrics, model = {"steps": run.steps, "wer": run.wer_after}, Checkpoint(str(final))
    ray.train.report(metrics, checkpoint=model)
