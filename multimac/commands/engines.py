"""`multimac train-rank` and `submit`: the same profile on torchrun and Slurm, which start the processes themselves."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from distributed.hosts.paths import PROJECT
from distributed.plan.job import resolve
from distributed.run_dir.folder import as_file_name
from multimac.view.terminal import Console
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ConfigError, ExitStatus, RunError
from whisper_tuner.files import write_atomically

from .options import CONFIG, Config, Set, command

# A job goes on after its time limit, and after a rank was lost: ranks stop in order on SIGTERM, and then `train-rank`
# ends with 130. From 130 to 149 a signal has ended a rank. What another start would not mend ends the job.
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --chdir={folder}
#SBATCH --output={output}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@{stop_s}
{options}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))

srun --kill-on-bad-exit=1 {command}
status=$?
case $status in
    0) exit 0 ;;
    {stopped}) again=yes ;;
    {lost} | 13[0-9] | 14[0-9]) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ] && again=yes ;;
esac
[ "$again" = yes ] && scontrol requeue "$SLURM_JOB_ID" && sleep 60
exit $status
"""
STOP_S = 120  # before a time limit: for a round to end, and to save
RESTARTS = 10


@command("train-rank")
def train_rank(
    profile: Annotated[str, Argument(help="A [distributed:NAME], or a [profile:NAME] trained with DiLoCo.")],
    run: Annotated[
        str, Option("--run", help="Name of the run: started again it goes on. [default: the launch's own number]")
    ] = "",
    settings: Set = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """Be one rank of a run, started by torchrun, Slurm or another program: see docs/engines.md."""
    from distributed.launched import LaunchedRun, launch_id, take_place  # loads torch

    os.environ.update(take_place(os.environ))
    if "RANK" not in os.environ:
        what = "nothing has started this process as a rank: RANK is not set"
        raise ConfigError(what, remedy="Start it by torchrun or srun; on this machine alone: multimac finetune")
    job = resolve(ConfigFile(config), profile, settings=settings or ())
    return LaunchedRun(job, run or launch_id(os.environ), report="multimac.report").go()


@command("submit")
def submit(
    profile: Annotated[str, Argument(help="A [distributed:NAME], or a [profile:NAME] trained with DiLoCo.")],
    slurm: Annotated[bool, Option("--slurm", help="To Slurm, by sbatch.")] = False,
    ray: Annotated[str, Option("--ray", metavar="ADDRESS", help="To a cluster of Ray's, such as auto.")] = "",
    nodes: Annotated[int, Option(help="Machines, with a rank on each; or Ray's workers.", min=1)] = 2,
    run: Annotated[str, Option("--run", help="With --ray, the name of a run that is to go on.")] = "",
    seeds: Annotated[str, Option(metavar="1,2,3", help="An array of jobs, one for each seed.")] = "",
    sbatch: Annotated[
        list[str] | None, Option("--sbatch", metavar="OPTION", help="Of sbatch, such as --time=4:00:00; several times.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the job's script and do nothing.")] = False,
    settings: Set = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """Train a profile on a cluster of Slurm's or Ray's, which goes on after a lost machine: see docs/engines.md."""
    console = Console()
    if slurm == bool(ray):
        raise ConfigError("submit: to which program?", remedy="Add --slurm, or --ray ADDRESS.")
    if not all(seed.isdigit() for seed in seeds.split(",") if seeds):
        raise ConfigError(f"--seeds {seeds}: expected whole numbers with commas between them")
    job = resolve(ConfigFile(config), profile, settings=settings or ())
    runs = job.profile.runs_dir.absolute()
    if ray:
        return _to_ray(console, ray, nodes, run, profile, config.absolute(), list(settings or ()), runs)
    script = job_script(profile, runs, nodes, seeds, sbatch or (), settings or (), config.absolute())
    if dry_run:
        print(script, end="")
        return ExitStatus.OK
    if not shutil.which("sbatch"):
        raise ConfigError("this machine has no sbatch", remedy="Submit it where Slurm's commands are.")
    name = as_file_name(profile)
    path = runs / f"{name}.sbatch"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, script)
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"sbatch refuses {path}: {done.stderr.strip()}", remedy="--sbatch passes options to it.")
    number = done.stdout.strip().split(";")[0]
    output = runs / (f"{name}-{number}_*.txt" if seeds else f"{name}-{number}.txt")
    console.print(f"job {number}: {output}", markup=False, soft_wrap=True)
    console.print(f"  squeue --job {number}\n  multimac runs list", markup=False)
    return ExitStatus.OK


def _to_ray(
    console: Console, address: str, workers: int, run: str, profile: str, config: Path, settings: list[str], runs: Path
) -> ExitStatus:
    try:
        from distributed.ray_train import fit
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Ray is not installed here: {error}", remedy='Install it: pip install "ray[train]"'
        ) from None
    model = fit(address, workers, run or time.strftime("%H%M%S"), profile, config, settings, runs)
    console.print(f"model: {model}", soft_wrap=True)
    return ExitStatus.OK


def job_script(
    profile: str, runs: Path, nodes: int, seeds: str, options: list[str] | tuple[str, ...], settings, config: Path
) -> str:
    words = [sys.executable, str(PROJECT / "cli_typer.py"), "train-rank", profile, "--config", str(config)]
    for setting in settings:
        words += ["--set", setting]
    command = shlex.join(words) + (' --set seed="$SLURM_ARRAY_TASK_ID"' if seeds else "")
    return SCRIPT.format(
        name=as_file_name(profile),
        nodes=nodes,
        folder=shlex.quote(str(Path.cwd())),
        output=shlex.quote(str(runs).replace("%", "%%") + ("/%x-%A_%a.txt" if seeds else "/%x-%j.txt")),
        stop_s=STOP_S,
        options="".join(f"#SBATCH {option}\n" for option in [*([f"--array={seeds}"] if seeds else []), *options]),
        command=command,
        stopped=int(ExitStatus.INTERRUPTED),
        lost=int(ExitStatus.RUN),
        restarts=RESTARTS,
    )
