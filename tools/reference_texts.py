"""What the reference cannot take from the source: examples, the hosts file's keys, and titles for modules."""

from __future__ import annotations

from pathlib import Path

KINDS = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path"}

EXAMPLES = {
    # Profile
    "base_model": "openai/whisper-small",
    "language": "fr",
    "task": "translate",
    "train": "recordings/train.csv",
    "validation": "recordings/validation.csv",
    "test": "recordings/test.csv",
    "max_duration_s": "20",
    "bad_rows": "refuse",
    "method": "lora",
    "lora_r": "16",
    "lora_alpha": "32",
    "lora_dropout": "0.05",
    "lora_targets": "q_proj, v_proj",
    "dropout": "0.1",
    "gradient_checkpointing": "true",
    "epochs": "3",
    "max_steps": "500",
    "batch_size": "4",
    "accumulation": "2",
    "learning_rate": "1e-4",
    "schedule": "linear",
    "warmup_ratio": "0.05",
    "weight_decay": "0.0",
    "max_grad_norm": "0.5",
    "seed": "7",
    "audio_context": "full",
    "device": "mps",
    "precision": "bf16",
    "num_threads": "2",
    "runs_dir": "~/whisper-runs",
    "shards": "mac-studio.local mac-mini.local",
    "checkpoint_interval": "5",
    "keep_checkpoints": "2",
    # Distribution
    "base_profile": "mine",
    "strategy": "diloco",
    "communication_interval": "20",
    "hosts_config": "distributed_hosts.json",
    "shares": "fixed",
    "min_hosts": "2",
    "round_timeout_s": "300",
    # Strategies
    "inner_optim": "adamw",
    "min_lr_ratio": "0.1",
    "check_interval": "50",
    "outer_optim": "sgd",
    "outer_lr": "0.7",
    "outer_momentum": "0.9",
    "nesterov": "true",
}

# key -> type, default, meaning, example
SSH_CONFIG = "as `~/.ssh/config` says"
HOST_TEXTS = {
    "master": (
        "address or object",
        "required",
        "the machine that the command is given on; it trains as well, as rank 0",
        '"master": "mac-studio.local"',
    ),
    "workers": (
        "list",
        "required",
        "the other machines: addresses or objects; may be empty",
        '"workers": ["mac-mini.local", {"host": "192.168.1.30"}]',
    ),
    "host": (
        "text",
        "required",
        "name, `.local` name or IPv4 address",
        '"host": "192.168.1.30"',
    ),
    "ssh_user": ("text", SSH_CONFIG, "user name over there", '"ssh_user": "anna"'),
    "ssh_key_path": (
        "path",
        SSH_CONFIG + ", and the agent",
        "private key on this machine",
        '"ssh_key_path": "~/.ssh/id_ed25519"',
    ),
    "python_env": (
        "path on the host",
        "`.venv` in `project_path`",
        "virtual environment that trains, or the path of a Python; `hosts setup` makes the default one",
        '"python_env": "~/multimac-whisper/.venv"',
    ),
    "project_path": (
        "path on the host",
        "`{}`",
        "where code, models and audio are sent to",
        '"project_path": "~/multimac-whisper"',
    ),
    "ssh_port": ("whole number, 1 to 65535", SSH_CONFIG, "port of its SSH server", '"ssh_port": 2222'),
    "interface": (
        "text",
        "the one that reaches the others",
        "network interface that the ranks talk over",
        '"interface": "en0"',
    ),
    "device": (
        "`auto`, `mps`, `cuda`, `cuda:N` or `cpu`",
        "the profile's `device`",
        "where this host trains",
        '"device": "cpu"',
    ),
}

SECTIONS = {
    "configuration": """\
`config.ini` has sections `[DEFAULT]`, `[model:NAME]`, `[dataset:NAME]`, `[profile:NAME]` and `[distributed:NAME]`.
A profile names a `model` and a `dataset` and inherits from both, and all from `[DEFAULT]`; the nearest wins.
Relative paths start at the folder of `config.ini`. `multimac config show NAME` prints the resolved values, and where
each came from.""",
    "profile": """\
In `[DEFAULT]`, `[model:NAME]`, `[dataset:NAME]` or `[profile:NAME]`; a `[distributed:NAME]` section may override any
of them. `model = NAME` and `dataset = NAME` stand in a profile only.""",
    "distributed": "In `[distributed:NAME]`, beside any key of a profile.",
    "strategies": """\
Keys of `[distributed:NAME]`, by `strategy`. The learning rate, its schedule, weight decay and gradient clipping are
the profile's; the length of a DiLoCo round is `communication_interval`.

At the end of a DiLoCo round the machines take the average of their weights. `outer_momentum = 0.9` makes it the outer
step of the paper (2311.08105) instead: Nesterov momentum, and `outer_lr` 0.7 if that is not given. It helps where a
model is pre-trained from scratch over many rounds. Fine-tuning the bundled model (WER 67.7) it overshot: to 75.9 with
2 ranks, 8 epochs and 62 rounds (plain averaging: 22.7), to 41.7 with 4 ranks, 16 epochs and 52 rounds (plain
averaging: 17.6).""",
    "hosts": """\
`distributed_hosts.json` is one object. A worker is an address, or an object with `host` and any of the keys below,
which then hold for that machine alone. See `distributed_hosts.example.json`.""",
}

INTRODUCTION = """\
What the program says when something is wrong: `error: ` and the message, below it what to do. `<...>` stands for what
depends on the case, `[...]` for what may be missing, `(... / ...)` for one of several, HOST for a host's address.
Where a worker raises it, it ends the run, with the host before it; a lost peer, an SSH error and, after the first
round, what nobody foresaw only lose that host, and the run goes on. What `multimac doctor` finds is described in
[mac.md](mac.md)."""

# Rows of a manifest: no errors by themselves.
ROWS = "Rows that are left out"
ROW_REMEDY = "Mend the row; it is left out, or nothing begins with `bad_rows = refuse` (status 4)."

# Messages that are put together from pieces: module, text, remedy, kind. A test looks the words up in the module.
# Those without a kind end nothing.
GOES_ON = "Nothing: the run goes on, and takes the host back (lost-hosts.md)."
AGAIN = "The run goes on; when the same happens three times in a row, the host is not tried again."
PIECED = [
    (
        "distributed/micro_batch.py",
        "HOST: one clip of <seconds> s takes <needed> of memory, and the share of this worker is <share>",
        "Train with method = lora, gradient_checkpointing = true, a smaller max_duration_s, fewer workers on that "
        "machine, or a smaller model; close other programs there.",
        "RunError",
    ),
    (
        "distributed/micro_batch.py",
        "HOST: <clips> clips of <seconds> s at once would take <needed> of memory, and its share is <share>: it "
        "computes <clips> at once",
        "Nothing: the result is the same up to rounding. Other programs that are closed there leave more.",
        "warning",
    ),
    (
        "distributed/worker.py",
        "HOST is lost: nothing heard for <silence s> s: asleep, or its network is gone",
        GOES_ON,
        "",
    ),
    ("distributed/worker.py", "HOST is lost: the SSH connection was lost; its last lines: <output>", GOES_ON, ""),
    ("distributed/worker.py", "HOST is lost: it had lost the master, and ended by itself", GOES_ON, ""),
    (
        "distributed/worker.py",
        "HOST is lost: the worker was killed by <signal>; its last lines: <output>",
        f"{AGAIN} Signal 9 is most often a lack of memory there: a smaller batch_size or method = lora need less.",
        "",
    ),
    (
        "distributed/worker.py",
        "HOST is lost: the worker ended, for a reason that nobody saw; its last lines: <output>",
        AGAIN,
        "",
    ),
    (
        "distributed/worker.py",
        "HOST is lost: the worker ended with status <status>; its last lines: <output>",
        f"{AGAIN} All that the hosts printed is in launcher.log in the run's folder.",
        "",
    ),
    (
        "distributed/workers.py",
        "HOST is lost: made no step for <seconds> s while others were waiting for it",
        f"{AGAIN} A host that is only slow needs a larger round_timeout_s.",
        "",
    ),
    (
        "distributed/workers.py",
        "only <hosts> left, and min_hosts = <min hosts>",
        "Look at what the hosts that are not tried again said, then go on with --resume, perhaps with other --hosts.",
        "RunError",
    ),
    (
        "distributed/console.py",
        "<hosts> cannot reach each other, though this machine reaches them: perhaps a firewall, or a Wi-Fi that keeps "
        "clients apart; left out until then: <hosts>",
        "The run goes on without one of them, and takes it back when they can (troubleshooting.md names the causes).",
        "",
    ),
    ("distributed/workers.py", "no host is left", "The same.", "RunError"),
    ("distributed/workers.py", "every host was lost before the model was saved", "Go on with --resume.", "RunError"),
]

STATUSES = {
    0: "all went well",
    1: "a defect of this program: the traceback is shown",
    2: "the command line itself",
    3: "`config.ini`, a flag, the hosts file, or a program that is not installed",
    4: "a manifest, an audio file or a model",
    5: "a host: SSH, its Python, disk or files",
    6: "a run that ended early",
    130: "stopped with Ctrl-C",
}

# A module, or the beginning of its path -> heading, in the order of the page; others go by their docstring.
CONFIG_INI, AUDIO, MODEL, RUN = "config.ini", "Manifests and audio", "Models", "Runs"
SSH, ENVIRONMENT, TRAINING = "SSH", "Python environments of the hosts", "While training"
TITLES = {
    "whisper_tuner/config.py": CONFIG_INI,
    "whisper_tuner/settings.py": CONFIG_INI,
    "distributed/config.py": CONFIG_INI,
    "gym/exogym/config.py": CONFIG_INI,
    "distributed/commands/": "Commands",
    "distributed/comparison.py": "Commands",
    "distributed/hosts.py": "Hosts file",
    "whisper_tuner/": AUDIO,
    "distributed/shipment.py": AUDIO,
    ROWS: ROWS,
    "whisper_tuner/models.py": MODEL,
    "whisper_tuner/export.py": MODEL,
    "whisper_tuner/evaluation.py": MODEL,
    "whisper_tuner/model_check.py": MODEL,
    "whisper_tuner/token_limit.py": MODEL,
    "whisper_tuner/hub.py": MODEL,
    "distributed/remote.py": SSH,
    "distributed/machine.py": SSH,
    "distributed/ssh_settings.py": SSH,
    "distributed/known_hosts.py": SSH,
    "distributed/interfaces.py": "Networks",
    "distributed/environment.py": ENVIRONMENT,
    "distributed/wheelhouse.py": ENVIRONMENT,
    "distributed/ask.py": ENVIRONMENT,
    "distributed/preflight": "Before a run: the preflight",
    "distributed/sync.py": "Sending files",
    "distributed/": TRAINING,
    "gym/exogym/": TRAINING,
    "gym/exogym/state/checkpoint.py": "Checkpoints and --resume",
    "distributed/commands/resume.py": "Checkpoints and --resume",
    "whisper_tuner/run": RUN,
    "distributed/commands/runs.py": RUN,
    "distributed/doctor": "multimac doctor",
    "distributed/wizard/": "Wizard",
    "distributed/bundle.py": "A model of your own (NetworkTrainer)",
}
