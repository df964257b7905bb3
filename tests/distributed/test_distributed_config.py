import pytest

from distributed.config import resolve
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


def test_few_rounds_are_averaged_plainly_and_many_take_the_papers_outer_step(job):
    few, many = job().strategy_config(200), job().strategy_config(20_000)
    assert (few.H, few.outer_lr, few.outer_momentum) == (20, 1.0, 0.0)
    assert many.outer_spec().lr == 0.7 and many.outer_spec().momentum == 0.9


def test_what_was_set_is_never_overridden(job):
    config = job(TEXT + "outer_lr = 0.5\n").strategy_config(200)
    assert config.outer_spec().lr == 0.5 and config.outer_spec().momentum == 0.9


@pytest.mark.parametrize(
    ("line", "place", "words"),
    [
        ("outer_lrr = 1", "config.ini:11", "did you mean 'outer_lr'"),
        ("outer_lr = much", "config.ini", "not a number"),
        ("H = 5", "config.ini:11", "unknown key 'H'"),
        ("shares = evenly", "config.ini:11", "expected one of fixed, auto"),
    ],
)
def test_a_mistake_names_key_and_place(job, line, place, words):
    with pytest.raises(ConfigError) as raised:
        job(TEXT + line + "\n")
    assert place in str(raised.value) and words in str(raised.value)


def test_an_unknown_name_lists_profiles_and_distributed_profiles(job):
    with pytest.raises(ConfigError, match="three, mine"):
        job(name="thre")
