import functools
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from exogym_toys import make_step

from exogym import (
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    FitSettings,
    ParameterServerStrategy,
    SingleComm,
    SPARTADiLoCoStrategy,
    build_strategy,
    strategy_config,
    strategy_of,
)
from exogym.config import from_text
from exogym.errors import SettingError
from exogym.strategy import DiLoCoConfig, OptimSpec, ScheduleSpec, SimpleReduceStrategy, StrategyConfig
from exogym.strategy.diloco import DiLoCoCommunicator, outer_optimizer
from exogym.strategy.optim import inner_optimizer
from exogym.strategy.sparta import SparseCommunicator


def outer(**settings):
    strategy = DiLoCoStrategy(**settings)
    return outer_optimizer(strategy.config, [torch.nn.Parameter(torch.zeros(1))])


def test_imports_no_torch():
    script = (
        "import sys, exogym, exogym.config, exogym.errors, exogym.strategy\n"
        "exogym.strategy_config('diloco', {'H': '5', 'lr': '1e-4'})\n"
        "assert 'torch' not in sys.modules\n"
        "exogym.DiLoCoStrategy\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": "gym"})


def test_every_lazy_name_exists():
    import exogym

    for name in exogym.__all__:
        assert getattr(exogym, name) is not None
    with pytest.raises(AttributeError, match="Trianer"):
        _ = exogym.Trianer


def test_what_is_not_given_is_as_in_the_papers_and_upstream():
    """DiLoCo's outer step (2311.08105), FedAvg's H, and torch's weight decay; see exo-explore/gym, commit 9fa323c."""
    assert DiLoCoStrategy().config.H == 100 and FedAvgStrategy().config.H == 1
    for strategy in (DiLoCoStrategy(), SPARTADiLoCoStrategy(), ParameterServerStrategy(), build_strategy("diloco", {})):
        assert strategy.config.outer_spec() == OptimSpec(name="sgd", lr=0.7, momentum=0.9, nesterov=True)
    decays = [OptimSpec(name=name).weight_decay for name in ("adamw", "adam", "sgd")]
    assert decays == [0.01, 0.0, 0.0] and FedAvgStrategy().config.schedule_spec().name == "constant"
    ends = [AllReduceStrategy(lr_scheduler=name).config.schedule_spec().min_ratio for name in ("cosine", "linear")]
    assert ends == [ScheduleSpec(name=name).min_ratio for name in ("cosine", "linear")] == [0.1, 0.0]
    assert FitSettings(strategy=DiLoCoStrategy()).val_size == 64


def test_a_profile_says_all_of_it_and_has_what_fine_tuning_needs():
    config = strategy_config("diloco", {"schedule": "cosine"})
    assert config.outer_spec() == OptimSpec(name="sgd", lr=1.0) and config.schedule_spec().min_ratio == 0.0
    assert strategy_of(config).config == config


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"outer_momentum": 0}, (1.0, 0.0, False)),
        ({"outer_momentum": None, "outer_lr": 0.5}, (0.5, 0.0, False)),
        ({"outer_lr": 0.5}, (0.5, 0.9, True)),
        ({"outer_optim": torch.optim.SGD, "nesterov": False}, (0.7, 0.9, False)),
        ({"outer_momentum": 0.9}, (0.7, 0.9, True)),
        ({"outer_momentum": 0.5, "nesterov": False}, (0.7, 0.5, False)),
        ({"outer_momentum": 0.5, "outer_lr": 1.0}, (1.0, 0.5, True)),
        ({"outer_optim": OptimSpec(name="sgd", lr=0.3)}, (0.3, 0.0, False)),
    ],
)
def test_explicit_outer_settings_are_kept(settings, expected):
    group = outer(**settings).param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == expected


def test_inner_optimizer_by_name_class_spec_and_callable():
    weights = [torch.nn.Parameter(torch.zeros(1, 1))]

    def build(**settings):
        return inner_optimizer(AllReduceStrategy(**settings).config, weights)

    assert isinstance(build(inner_optim="sgd", lr=0.1), torch.optim.SGD)
    by_class = build(inner_optim=torch.optim.SGD, lr=0.1, weight_decay=0.2)
    assert isinstance(by_class, torch.optim.SGD)
    assert (by_class.param_groups[0]["lr"], by_class.param_groups[0]["weight_decay"]) == (0.1, 0.2)
    spec = OptimSpec(name="adam", lr=0.5, betas=(0.5, 0.6), eps=1e-3)
    group = build(inner_optim=spec).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.5, 0.6), 1e-3)
    assert isinstance(build(inner_optim=torch.optim.RMSprop, lr=0.3), torch.optim.RMSprop)
    assert build(inner_optim=lambda p: torch.optim.Adagrad(p, lr=0.25)).param_groups[0]["lr"] == 0.25


def uneven(like):
    """1 and, for every other element, -0.1."""
    flat = torch.ones(like.numel())
    flat[::2] = -0.1
    return flat.view_as(like)


class Normed(torch.nn.Module):
    """Kernels and matrices, biases, a norm and a single number; the biases come before weights of later layers."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.conv, self.norm, self.linear = torch.nn.Conv1d(2, 3, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 4)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        for weight in self.parameters():
            torch.nn.init.normal_(weight, generator=generator)

    def step(self, strategy, steps=1):
        strategy.setup(self, SingleComm(), steps)
        for _ in range(steps):
            for weight in self.parameters():
                weight.grad = uneven(weight)
            make_step(strategy, 1.0, 1)
        return dict(self.named_parameters())


DECAYING = {"conv.weight", "linear.weight"}
KINDS_OF_OPTIMIZER = {
    "name": {"inner_optim": "adamw", "lr": 0.1, "weight_decay": 0.5},
    "class": {"inner_optim": torch.optim.AdamW, "lr": 0.1, "weight_decay": 0.5},
    "spec": {"inner_optim": OptimSpec(name="adamw", lr=0.1, weight_decay=0.5)},
    "callable": {"inner_optim": functools.partial(torch.optim.AdamW, lr=0.1), "weight_decay": 0.5},
}


@pytest.mark.parametrize("settings", KINDS_OF_OPTIMIZER.values(), ids=KINDS_OF_OPTIMIZER.keys())
def test_weight_decay_spares_biases_norms_and_other_small_tensors(settings):
    """AdamW's first step by hand: w (1 - lr decay) - lr sign(gradient), since both moments are the gradient's own."""
    before = {name: weight.detach().clone() for name, weight in Normed().named_parameters()}
    for name, weight in Normed().step(AllReduceStrategy(**settings)).items():
        expected = before[name] * (1 - 0.1 * 0.5 if name in DECAYING else 1) - 0.1 * uneven(weight).sign()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_without_weight_decay_an_optimizer_is_the_plain_one(name):
    plain = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
    settings = {"weight_decay": 0.0} if name == "adamw" else {}
    by_hand = Normed().step(AllReduceStrategy(inner_optim=lambda p: plain(p, lr=0.1, **settings)), 3)
    ours = Normed().step(AllReduceStrategy(inner_optim=name, lr=0.1, weight_decay=0.0), 3)
    for key, weight in ours.items():  # fused, if it is Adam: rounded elsewhere
        torch.testing.assert_close(by_hand[key], weight, rtol=1e-5, atol=1e-7)


def test_groups_are_made_where_there_is_decay_and_none_is_empty():
    def groups(*shapes, **settings):
        config = AllReduceStrategy(**settings).config
        made = inner_optimizer(config, [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes])
        return [(group["weight_decay"], len(group["params"])) for group in made.param_groups]

    assert groups((2, 2), (2,), (2, 2, 2), (), inner_optim="sgd", weight_decay=0.1) == [(0.1, 2), (0.0, 2)]
    assert groups((2, 2), inner_optim="adam", weight_decay=0.1) == [(0.1, 1)]
    assert groups((2,), weight_decay=0.1) == [(0.0, 1)]
    assert groups((2, 2), (2,), weight_decay=0.0) == [(0.0, 2)]
    assert groups((2, 2), (2,)) == [(0.01, 1), (0.0, 1)] and groups((2, 2), (2,), inner_optim="adam") == [(0.0, 2)]
    assert groups((2, 2), (2,), inner_optim=lambda p: torch.optim.Adagrad(p, weight_decay=0.3)) == [(0.3, 2)]


def test_the_outer_optimizer_decays_all_of_its_flat_pieces():
    group = outer(outer_optim=OptimSpec(name="sgd", lr=0.3, weight_decay=0.1)).param_groups[0]
    assert (group["weight_decay"], len(group["params"])) == (0.1, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner_optim": "admw"}, "did you mean 'adamw'"),
        ({"inner_optim": OptimSpec(), "lr": 0.1}, "lr would not be used"),
        ({"outer_optim": OptimSpec(name="sgd"), "outer_momentum": 0.5}, "outer_momentum would not be used"),
        ({"outer_optim": "adam"}, "needs outer_lr"),
        ({"outer_optim": "adam", "outer_lr": 0.1, "nesterov": True}, "nesterov would not be used"),
        ({"outer_momentum": 0.0, "nesterov": True}, "needs a momentum"),
        ({"outer_momentum": None, "nesterov": True}, "needs a momentum"),
        (
            {"schedule": torch.optim.lr_scheduler.StepLR},
            "must be constant, linear, cosine or a ScheduleSpec, not <class",
        ),
        ({"schedule": None}, "or a ScheduleSpec, not None"),
        ({"lr": "0.1"}, "lr must be a number or None, not '0.1'"),
        ({"lr": True}, "lr must be a number or None, not True"),
        ({"nesterov": "false"}, "nesterov must be True or False or None, not 'false'"),
        ({"share_moments": 1}, "share_moments must be True or False, not 1"),
        ({"wire": 8}, "wire must be text, not 8"),
        ({"H": 0}, "H must be at least 1"),
        ({"H": 2.5}, "H must be a whole number, not 2.5"),
        ({"lr": -1.0}, "lr must be"),
        ({"max_norm": 0.0}, "max_norm"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"schedule": ScheduleSpec(), "warmup_steps": 3}, "in it, not beside"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        DiLoCoStrategy(**settings)


def test_a_misspelt_keyword_is_an_error():
    with pytest.raises(SettingError, match=r"'outer_mometum'; did you mean 'outer_momentum'\?"):
        DiLoCoStrategy(outer_mometum=0.5)
    with pytest.raises(SettingError, match=r"'outer_mometum'; did you mean 'outer_momentum'\?"):
        strategy_config("diloco", {"outer_mometum": 0.5})
    with pytest.raises(SettingError, match="did you mean 'diloco'"):
        strategy_config("dilco", {})


def test_strategy_from_text():
    strategy = build_strategy("diloco", {"H": "20", "lr": "1e-4", "nesterov": "false", "max_norm": "none"})
    assert strategy.config == DiLoCoConfig(H=20, lr=1e-4, nesterov=False, max_norm=None, outer_momentum=0.9)
    assert isinstance(build_strategy("allreduce", {"lr": 0.1}), SimpleReduceStrategy)
    with pytest.raises(SettingError, match=r"H = '2\.5' is not a whole number"):
        strategy_config("diloco", {"H": "2.5"})


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int | None, " None ", None),
        (float | None, "", None),
        (Path | None, "", None),
        (Path | None, "none", Path("none")),
        (str, "none", "none"),
        (bool, "On", True),
        (tuple[str, ...], "a, b c", ("a", "b", "c")),
        (str | OptimSpec, "sgd", "sgd"),
    ],
)
def test_text_is_read_by_the_annotation_of_a_field(hint, text, value):
    assert from_text(hint, text) == value


def test_schedules():
    linear = ScheduleSpec(name="linear", warmup_steps=2, min_ratio=0.1)
    assert [round(linear.factor(s, 12), 3) for s in (0, 1, 2, 7, 12, 40)] == [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    cosine = ScheduleSpec(name="cosine", min_ratio=0.0)
    assert [round(cosine.factor(s, 4), 3) for s in range(5)] == [1.0, 0.854, 0.5, 0.146, 0.0]
    assert ScheduleSpec().factor(99, 100) == 1.0


def test_settings_of_ones_own_need_not_be_made_by_setting():
    @dataclass(frozen=True, kw_only=True)
    class Own(StrategyConfig):
        pace: "Unknown" = 1  # noqa: F821  (as a name that is imported for type checkers only)
        other: int = field(default=1, metadata={"about": "something else"})

    assert Own(pace=2).pace == 2
    with pytest.raises(SettingError, match="inner_optim"):
        Own(inner_optim="adamx")


@pytest.mark.parametrize("given", [{"H": None}, {"wire": None}, {"H": True}])
def test_what_must_be_given_may_not_be_none(given):
    with pytest.raises(SettingError):
        DiLoCoStrategy(**given)


@pytest.mark.parametrize("name", ["overlap_steps", "scale_lr", "lr", "misspelt"])
def test_a_module_of_a_composition_refuses_what_it_would_not_use(name):
    with pytest.raises(SettingError, match=name):
        DiLoCoCommunicator(interval=10, **{name: 1})


def test_a_composition_is_recorded_as_before():
    assert [*DiLoCoCommunicator(interval=10, wire="int8").settings().items()] == [
        ("interval", 10),
        ("outer_optim", "sgd"),
        ("outer_lr", None),
        ("outer_momentum", 0.9),
        ("nesterov", None),
        ("wire", "int8"),
        ("share_moments", False),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimSpec(lr="0.1"), "lr must be a number, not '0.1'"),
        (lambda: OptimSpec(name="sgd", momentum=0.9, nesterov="no"), "nesterov must be True or False, not 'no'"),
        (lambda: OptimSpec(betas=None), "each of betas must be a number, not None"),
        (lambda: OptimSpec(betas=(0.9, "0.99")), "each of betas must be a number, not '0.99'"),
        (lambda: CommunicateOptimizeStrategy(communication_modules=5), "must be a list of one at least"),
        (lambda: ScheduleSpec(warmup_steps=2.5), "warmup_steps must be a whole number, not 2.5"),
        (lambda: ScheduleSpec(min_ratio=True), "min_ratio must be a number, not True"),
        (lambda: SparseCommunicator(sparsification_rate="0.1"), "sparsification_rate must be a number, not '0.1'"),
        (lambda: FedAvgStrategy(island_size=2.0), "island_size must be a whole number or None, not 2.0"),
    ],
)
def test_types_are_looked_at_wherever_settings_are(make, message):
    with pytest.raises(SettingError, match=message):
        make()
