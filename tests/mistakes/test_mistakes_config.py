"""config.ini and the profile in it: exit status 3."""

from __future__ import annotations

import pytest

from whisper_tuner.errors import ExitStatus

ANY = "config show mine"
PROFILE = "[profile:mine]\nbase_model = model\ntrain = clips.csv\n"
TOGETHER = PROFILE + "[distributed:both]\nbase_profile = mine\n"

# name: (config.ini, None for none; command; the message names; the remedy says)
MISTAKES = {
    "config.ini is missing": (
        None,
        "finetune mine",
        "config.ini: No such file",
        ("Run from the project folder", "--config"),
    ),
    "another file is named that is not there": (PROFILE, f"{ANY} --config no.ini", "no.ini: No such file", "--config"),
    "a line that is no setting": (PROFILE + "epochs\n", ANY, ("config.ini:4", "epochs"), "key = value"),
    "settings before the first section": ("epochs = 3\n" + PROFILE, ANY, "config.ini:1", "[profile:NAME]"),
    "a key twice": (PROFILE + "train = b.csv\n", ANY, ("config.ini:4", "train"), "Remove one"),
    "a section twice": (PROFILE + PROFILE, ANY, ("config.ini:4", "profile:mine"), "Remove one"),
    "not UTF-8": (PROFILE.encode() + b"# caf\xe9\n", ANY, ("config.ini:4", "not UTF-8"), "Save it as UTF-8"),
    "an unknown kind of section": (
        PROFILE + "[profil:x]\n",
        ANY,
        ("config.ini:4", "[profil:x]", "did you mean 'profile'?"),
        "[profile:NAME]",
    ),
    "a bracket that is not closed": (
        PROFILE + "[dataset:x\n",
        ANY,
        "config.ini:4: the name of a section lacks its closing bracket",
        "[KIND:NAME]",
    ),
    "a section without a name": (PROFILE + "[profile:]\n", ANY, "config.ini:4: unknown section [profile:]", "NAME"),
    "an unknown key": (
        PROFILE + "batchsize = 8\n",
        ANY,
        ("config.ini:4 [profile:mine]", "'batchsize', did you mean 'batch_size'?"),
        "Known keys: accumulation",
    ),
    "a word for a number": (
        PROFILE + "epochs = many\n",
        ANY,
        ("config.ini:4 [profile:mine]", "epochs = many: expected a whole number"),
        "passes over the training clips",
    ),
    "a fraction for a whole number": (
        PROFILE + "batch_size = 1.5\n",
        ANY,
        "expected a whole number",
        "clips per optimizer step",
    ),
    "neither true nor false": (
        PROFILE + "gradient_checkpointing = maybe\n",
        ANY,
        "config.ini:4 [profile:mine]: gradient_checkpointing = maybe: expected true or false",
        "saves memory",
    ),
    "a number out of range": (
        PROFILE + "lora_dropout = 2\n",
        ANY,
        ("config.ini:4 [profile:mine]", "lora_dropout = 2: expected a number from 0.0 to 0.9"),
        "dropout inside the LoRA branches",
    ),
    "not a number at all": (PROFILE + "learning_rate = nan\n", ANY, "config.ini:4", "peak learning rate"),
    "an unknown choice": (
        PROFILE + "method = loar\n",
        ANY,
        ("config.ini:4", "expected one of full, lora, decoder, did you mean 'lora'?"),
        "which weights are trained",
    ),
    "a profile that is not there": (
        PROFILE,
        "finetune mien",
        ("config.ini", "[profile:mien]", "did you mean 'mine'?"),
        "Known: mine",
    ),
    "a profile without base_model": (
        "[profile:mine]\ntrain = clips.csv\n",
        "finetune mine",
        ("config.ini", "[profile:mine] has no base_model"),
        "Whisper checkpoint",
    ),
    "a profile without train": (
        "[profile:mine]\nbase_model = model\n",
        "finetune mine",
        ("config.ini", "[profile:mine] has no train"),
        "manifest",
    ),
    "a model section that is not there": (
        "[model:tiny]\nbase_model = model\n" + PROFILE + "model = tny\n",
        ANY,
        ("config.ini:6 [profile:mine]", "[model:tny]", "did you mean 'tiny'?"),
        "Known: tiny",
    ),
    "a base profile that is not there": (
        PROFILE + "[distributed:both]\nbase_profile = mien\n",
        "config show both",
        ("config.ini:5 [distributed:both]", "[profile:mien]", "did you mean 'mine'?"),
        "Known: mine",
    ),
    "an unknown strategy": (
        TOGETHER + "strategy = dilco\n",
        "config show both",
        ("config.ini:6 [distributed:both]", "strategy = dilco", "did you mean 'diloco'?"),
        "how the ranks agree",
    ),
    "a setting of another strategy": (
        TOGETHER + "strategy = allreduce\nouter_lr = 0.7\n",
        "config show both",
        ("config.ini:7 [distributed:both]", "'outer_lr'"),
        "Keys of strategy allreduce",
    ),
    "a strategy's setting out of range": (
        TOGETHER + "outer_momentum = 2\n",
        "config show both",
        ("config.ini:6 [distributed:both]", "outer_momentum"),
        "config show both",
    ),
    "--set of an unknown key": (
        PROFILE,
        "finetune mine --set batchsize=8",
        "error: --set batchsize: unknown key 'batchsize', did you mean 'batch_size'?",
        "All keys: multimac config show mine",
    ),
    "--set of a word for a number": (
        TOGETHER,
        "distributed-train both --set epochs=many",
        "error: --set epochs: epochs = many: expected a whole number",
        "passes over the training clips",
    ),
    "--set of a strategy's setting out of range": (
        TOGETHER,
        "distributed-train both --set outer_momentum=2",
        "error: --set outer_momentum: outer_momentum = 2",
        "config show both",
    ),
    "--set of a model that is not there": (
        PROFILE + "[model:small]\n",
        "finetune mine --set model=smal",
        "error: --set model: there is no [model:smal], did you mean 'small'?",
        "Known: small",
    ),
    "--set without a value": (PROFILE, "finetune mine --set epochs", "error: --set epochs: not a setting", "KEY=VALUE"),
    "--set twice": (PROFILE, "finetune mine --set epochs=1 --set epochs=2", "--set epochs: it is set twice", "Leave"),
    "--set of a run that is resumed": (PROFILE, "finetune --resume last --set epochs=1", "--set is for", "Leave"),
    "a distributed run without hosts": (
        TOGETHER,
        "distributed-train both",
        ("both: no hosts file", "--hosts", "hosts_config", "nor distributed_hosts.json"),
        ("distributed_hosts.example.json distributed_hosts.json", "multimac hosts pair", "python wizard.py"),
    ),
}


@pytest.mark.parametrize(("text", "command", "place", "remedy"), MISTAKES.values(), ids=MISTAKES.keys())
def test_config(desk, text, command, place, remedy):
    if text is None:
        (desk.folder / "config.ini").unlink()
    else:
        desk.write("config.ini", text)
    desk.refuses(command, ExitStatus.CONFIG, place, remedy)
