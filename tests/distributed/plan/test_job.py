import pytest

from distributed.plan.automatic import open_settings
from distributed.plan.job import resolve
from exogym.strategy import OptimSpec
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ConfigError

TEXT = """\
[profile:mine]
base_model = openai/whisper-tiny
train = train.csv
learning_rate = 3e-5

[distributed:three]
base_profile = mine
strategy = diloco
communication_interval = 20
batch_size = 2
"""


@pytest.fixture
def job(tmp_path):
    def read(text: str = TEXT, name: str = "three"):
        path = tmp_path / "config.ini"
        path.write_text(text)
        return resolve(ConfigFile(path), name)

    return read


def test_a_distributed_profile_overrides_its_base(job):
    found = job()
    assert found.profile.batch_size == 2
    assert found.profile.learning_rate == 3e-5
    assert found.distribution.communication_interval == 20


def test_a_plain_profile_trains_with_diloco(job):
    assert job(name="mine").distribution.strategy == "diloco"


@pytest.mark.parametrize("total_steps", [20, 999, 1_000, 1_001, 20_000])
def test_plain_averaging_is_the_default_at_any_length(job, total_steps):
    config = job().strategy_config(total_steps)
    assert (config.H, config.outer_spec()) == (20, OptimSpec(name="sgd", lr=1.0))


def test_what_was_set_is_never_overridden(job):
    config = job(TEXT + "outer_lr = 0.5\nouter_momentum = 0.8\n").strategy_config(200)
    assert config.outer_spec() == OptimSpec(name="sgd", lr=0.5, momentum=0.8, nesterov=True)


def test_steps_that_hide_an_exchange_may_be_as_many_as_a_round_has(job):
    text = TEXT.replace("communication_interval = 20", "communication_interval = 400")
    config = job(text + "overlap_steps = 399\n").strategy_config(2000)
    assert (config.H, config.overlap_steps) == (400, 399)


@pytest.mark.parametrize(
    ("line", "place", "words"),
    [
        ("outer_lrr = 1", "config.ini:11", "did you mean 'outer_lr'"),
        ("outer_lr = much", "config.ini", "not a number"),
        ("H = 5", "config.ini:11", "unknown key 'H'"),
        ("overlap_steps = 20", "config.ini:11 ", "must be below the steps of a round, which are 20: make it smaller"),
        ("shares = evenly", "config.ini:11", "expected one of auto, fixed"),
    ],
)
def test_a_mistake_names_key_and_place(job, line, place, words):
    with pytest.raises(ConfigError) as raised:
        job(TEXT + line + "\n")
    assert place in str(raised.value) and words in str(raised.value)


def test_an_unknown_name_lists_profiles_and_distributed_profiles(job):
    with pytest.raises(ConfigError, match="three, mine"):
        job(name="thre")


def test_what_is_only_wrong_alone_is_not_blamed(job):
    with pytest.raises(ConfigError, match=r"config.ini:12 .*: outer_momentum = 2: .*, not 2"):
        job(TEXT + "nesterov = true\nouter_momentum = 2\n")


def test_what_is_set_by_hand_wins_and_is_not_chosen_automatically(tmp_path):
    (tmp_path / "config.ini").write_text(TEXT + "[model:other]\nlora_r = 4\nlearning_rate = 1\n")
    by_hand = ("batch_size=4", " wire = int8 ", "train=b/c.csv", "model=other", "min_hosts=2", "language=")
    found = resolve(ConfigFile(tmp_path / "config.ini"), "three", settings=by_hand)
    assert (found.profile.batch_size, found.profile.lora_r, found.profile.train) == (4, 4, tmp_path / "b/c.csv")
    assert found.profile.learning_rate == 3e-5  # the profile's own goes before its model's
    assert found.distribution.min_hosts == 2 and found.strategy_settings == {"wire": "int8"}
    assert found.origin["batch_size"] == "--set batch_size" and "wire" not in open_settings(found)
    assert "overlap_steps" in open_settings(found)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (TEXT, "three", None),
        ("[DEFAULT]\nnotify = desktop\n" + TEXT, "three", "desktop"),
        ("[DEFAULT]\nnotify = desktop\n" + TEXT, "mine", "desktop"),
        (TEXT.replace("[profile:mine]", "[profile:mine]\nnotify = curl -d"), "three", "curl -d"),
        ("[DEFAULT]\nnotify = desktop\n" + TEXT + "notify = none\n", "three", None),
        (TEXT + "notify = say\n", "mine", None),
    ],
)
def test_any_section_may_say_how_the_user_is_told_and_the_nearest_wins(job, text, name, expected):
    assert job(text, name).distribution.notify == expected
    assert ConfigFile("config.ini", text).profile("mine") == ConfigFile("config.ini", TEXT).profile("mine")


def test_a_setting_that_the_message_names_itself_is_named_once(job):
    with pytest.raises(ConfigError) as told:
        job(TEXT.replace("strategy = diloco", "strategy = parameter_server") + "overlap_steps = 3\n")
    assert str(told.value).count("overlap_steps = 3") == 1


def test_a_plain_profile_takes_the_settings_of_a_strategy_by_hand(tmp_path):
    (tmp_path / "config.ini").write_text(TEXT)
    found = resolve(ConfigFile(tmp_path / "config.ini"), "mine", settings=["strategy=allreduce", "epochs=2"])
    assert (found.distribution.strategy, found.profile.epochs) == ("allreduce", 2)


@pytest.mark.parametrize("line", ["early_stopping = 2", "keep_best = true"])
def test_what_goes_by_validation_needs_validation_clips(job, tmp_path, line):
    with pytest.raises(ConfigError, match=rf"config.ini:11 \[distributed:three\]: {line}: there are no validation"):
        job(TEXT + line)
    (tmp_path / "validation.csv").touch()  # beside train.csv
    assert job(TEXT + line).profile.validation == tmp_path / "validation.csv"
    with pytest.raises(ConfigError, match="no validation"):
        job(TEXT + line + "\nvalidation =\n")


def test_the_profiles_optimizer_is_the_strategys(job, tmp_path):
    low = TEXT.replace("learning_rate", "optimizer = low_memory\nlearning_rate")
    assert job(low).strategy_config(10).inner_optim == "low_memory"
    assert job().strategy_config(10).inner_optim == "adamw"
    config = ConfigFile(tmp_path / "config.ini", text=low)
    for alone in ("allreduce", "diloco"):
        assert resolve(config, "mine", strategy=alone).strategy_config(10).inner_optim == "low_memory"
    with pytest.raises(ConfigError, match=r"config.ini:12 .*: scale_lr = true: scale_lr needs inner_optim adam"):
        job(low + "scale_lr = true\n")
    with pytest.raises(ConfigError, match=r"config.ini:4 .*: optimizer = low_memory, and inner_optim says otherwise"):
        job(low + "inner_optim = sgd\n")
    with pytest.raises(ConfigError, match="optimizer = low_memory, and strategy = demo says otherwise"):
        job(low.replace("strategy = diloco\ncommunication_interval = 20", "strategy = demo"))


KEEPS = (
    TEXT
    + """
keeps = english, spoken, en/test.csv
language = fr
[dataset:english]
train = en/train.csv
language = en
[dataset:spoken]
test = spoken.csv
delimiter = semicolon
"""
)


def test_what_a_model_is_to_keep_is_a_data_set_or_a_list(job, tmp_path):
    (tmp_path / "en").mkdir()
    for name in ("train", "test"):
        (tmp_path / "en" / f"{name}.csv").write_text("id,audio_path,transcription\n")
    found = [(kept.name, kept.clips, kept.language, kept.reading.delimiter) for kept in job(KEEPS).keeps]
    assert found[0] == ("english", tmp_path / "en/test.csv", "en", "")  # it lies beside train
    assert found[1] == ("spoken", tmp_path / "spoken.csv", "fr", "semicolon")
    assert found[2] == ("en-test", tmp_path / "en/test.csv", "fr", "")
    with pytest.raises(ConfigError, match=r"config.ini:12 .*keeps = english: it has no test clips"):
        (tmp_path / "en/test.csv").unlink()
        job(KEEPS)
    with pytest.raises(ConfigError, match=r"config.ini:12 .*there is no \[dataset:englisch\], did you mean 'english'"):
        job(KEEPS.replace("keeps = english", "keeps = englisch"))


def test_of_what_a_model_is_to_keep_some_is_trained_unless_the_profile_says_otherwise(job, tmp_path):
    """Where it has training clips: `spoken` and the list have none."""
    (tmp_path / "en").mkdir()
    for name in ("train", "test"):
        (tmp_path / "en" / f"{name}.csv").write_text("id,audio_path,transcription\n")
    [english] = job(KEEPS).added
    assert (english.name, english.clips, english.language) == ("english", tmp_path / "en/train.csv", "en")
    assert (english.share, english.most, english.task) == (1.0, 0.25, "transcribe")
    assert job(KEEPS.replace("[dataset:english]", "[dataset:english]\ntask = translate")).added[0].task == "translate"
    assert job(KEEPS.replace("language = fr", "language = fr\nalso_train =")).added == ()
    of_list = (
        KEEPS.replace("keeps = english, spoken, en/test.csv", "keeps = en/test.csv") + "[dataset:en-test]\ntrain = x\n"
    )
    assert job(of_list).added == ()  # another set, whose name is by chance that of the list


def test_two_sets_of_one_name_are_refused(job, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder / "en").mkdir(parents=True)
        (tmp_path / folder / "en" / "test.csv").touch()
    with pytest.raises(ConfigError, match=r"config.ini:12 .*keeps: two sets are called en-test"):
        job(KEEPS.replace("keeps = english, spoken, en/test.csv", "keeps = a/en/test.csv, b/en/test.csv"))


@pytest.mark.parametrize("share", ["0", "10.5", "nan", "a", "", " *0.2"])
def test_a_share_of_another_set_is_above_0_and_at_most_10(job, share):
    text = KEEPS.replace("keeps = english, spoken, en/test.csv", "also_train = english*0.2")
    assert [(other.name, other.share, other.clips.name) for other in job(text).added] == [("english", 0.2, "train.csv")]
    assert job(text.replace("*0.2", "*3")).added[0].share == 3.0
    with pytest.raises(ConfigError, match=r"config.ini:12 .*not a number above 0, up to 10\n  Write english\*0.2"):
        job(text.replace("*0.2", f"*{share}"))
