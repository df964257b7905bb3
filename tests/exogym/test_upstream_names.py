"""Names of upstream exogym, revisions c8012ac and 9fa323c: each can be imported and called, or says what to write."""

from __future__ import annotations

import csv
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exogym_toys import run_threads
from torch import nn
from torch.utils.data import TensorDataset

from exogym import FitSettings, LocalTrainer, SettingError, Trainer, info
from exogym.settings import fit_settings
from exogym.strategy import (
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    communicate,
)
from exogym.strategy.diloco import DiLoCoCommunicator
from exogym.strategy.optim import ensure_optim_spec
from exogym.strategy.sparta import (
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
    SparseCommunicator,
)

PROJECT = Path(__file__).parents[2]
STRATEGIES = "CommunicateOptimizeStrategy DeMoStrategy DiLoCoStrategy FedAvgStrategy OptimSpec SPARTAStrategy Strategy"
PLACES = {  # what scripts import from where
    "exogym": "LocalTrainer TrainNode Trainer",
    "exogym.trainer": "LocalTrainer Trainer Strategy TrainNode",
    "exogym.train_node": "TrainNode",
    "exogym.logger": "CSVLogger Logger WandbLogger",
    "exogym.aux": "CSVLogger Logger WandbLogger",
    "exogym.aux.logger": "CSVLogger Logger WandbLogger",
    "exogym.aux.utils": "get_device",
    "exogym.strategy": f"{STRATEGIES} DiLoCoCommunicator SPARTADiLoCoStrategy",
    "exogym.strategy.communicate": "all_gather all_reduce broadcast",
    "exogym.strategy.communicate_optimize_strategy": "CommunicateOptimizeStrategy CommunicationModule Strategy",
    "exogym.strategy.demo": "DeMoStrategy",
    "exogym.strategy.diloco": "DiLoCoCommunicator DiLoCoStrategy",
    "exogym.strategy.federated_averaging": "AveragingCommunicator FedAvgStrategy",
    "exogym.strategy.optim": "OptimSpec ensure_optim_spec",
    "exogym.strategy.sparta": "IndexSelector PartitionedIndexSelector RandomIndexSelector SPARTAStrategy "
    "ShuffledSequentialIndexSelector SparseCommunicator",
    "exogym.strategy.sparta_diloco": "SPARTADiLoCoStrategy SparseCommunicator ensure_optim_spec DiLoCoCommunicator",
    "exogym.strategy.strategy": "SimpleReduceStrategy Strategy",
    "distributed": "NetworkTrainer WhisperModelWrapper",
}
REFUSED = {  # and what to write is said
    "exogym.aux": "CheckpointMixin CorrelationMixin LogModule create_config extract_config log_model_summary "
    "safe_log_dict",
    "exogym.aux.checkpointing": "CheckpointMixin",
    "exogym.common": "TrainConfig",
    "exogym.minibatch_probe": "find_minibatch_size_isolated",
    "exogym.strategy.demo_impl": "DeMo",
    "exogym.strategy.demo_impl.demo": "DeMo",
    "exogym.utils": "LogModule create_config init_process_group_portsafe",
    "exogym": "launch_distributed_training",
    "exogym.launch": "launch_distributed_training",
    "distributed": "DistributedLauncher",
}


@pytest.mark.parametrize("module", PLACES)
def test_names_are_where_upstream_has_them(module):
    for name in PLACES[module].split():
        found: dict[str, Any] = {}
        exec(f"from {module} import {name}", found)
        assert callable(found[name]), name


@pytest.mark.parametrize("module", REFUSED)
def test_names_that_are_not_here_say_what_to_write(module):
    for name in REFUSED[module].split():
        with pytest.raises(ImportError, match=f"{name} of upstream exogym is not here: .+"):
            exec(f"from {module} import {name}", {})
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec(f"from {module} import nonsense", {})


def test_a_module_that_neither_has_is_missing():
    with pytest.raises(ModuleNotFoundError, match=r"exogym\.nonsense"):
        __import__("exogym.nonsense")


ADAMW = OptimSpec(torch.optim.AdamW, lr=0.5)
COSINE = {"lr_scheduler": "lambda_cosine", "lr_scheduler_kwargs": {"warmup_steps": 7, "cosine_anneal": True}}


@pytest.mark.parametrize(
    ("strategy", "settings", "wanted"),
    [
        (SimpleReduceStrategy, {"optim_spec": ADAMW, "max_norm": None}, {"inner_optim": ADAMW, "max_norm": None}),
        (DiLoCoStrategy, {"inner_optim_spec": ADAMW, "outer_optim_spec": None}, {"inner_optim": ADAMW}),
        (FedAvgStrategy, {"inner_optim_spec": "AdamW", "H": 3}, {"inner_optim": "adamw", "H": 3}),
        (FedAvgStrategy, {"optim_spec": None}, {"inner_optim": "adamw"}),
        (SPARTADiLoCoStrategy, {"inner_optim_spec": ADAMW, "outer_optim_spec": ADAMW}, {"outer_optim": ADAMW}),
        (SPARTAStrategy, {"optim_spec": ADAMW, "async_sparta_delay": 0}, {"inner_optim": ADAMW}),
        (SimpleReduceStrategy, COSINE, {"schedule": "cosine", "warmup_steps": 7, "min_lr_ratio": 0.1}),
        (
            SimpleReduceStrategy,
            {"lr_scheduler": "lambda_cosine", "lr_scheduler_kwargs": None},
            {"schedule": "constant", "warmup_steps": 0},
        ),
        (SimpleReduceStrategy, {"lr_scheduler": None, "lr_scheduler_kwargs": None}, {"schedule": "constant"}),
    ],
)
def test_settings_of_strategies(strategy, settings, wanted):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = strategy(**settings).config
    assert {name: getattr(config, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: SPARTAStrategy(H=20, p=0.05), "SPARTAStrategy: H, p has no effect, as at upstream"),
        (lambda: SimpleReduceStrategy(H=20), "H has no effect"),
        (lambda: DeMoStrategy(optim_spec=OptimSpec("adamw", lr=0.5)), "of optim_spec it takes lr$"),
        (lambda: fit_settings(settings(dataloader_kwargs={"num_workers": 2})), "dataloader_kwargs has no effect"),
    ],
)
def test_what_has_no_effect_is_told(make, told):
    with pytest.warns(UserWarning, match=told):
        make()


def settings(**given: Any) -> dict[str, Any]:
    return {"strategy": DiLoCoStrategy(H=5), "max_steps": 3, **given}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiLoCoStrategy(optim_spec=ADAMW, inner_optim="sgd"), "optim_spec is another name of inner_optim"),
        (lambda: DiLoCoStrategy(lr_scheduler_kwargs={"warmup_steps": 1}), "without lr_scheduler="),
        (lambda: DiLoCoStrategy(**COSINE, warmup_steps=1), "lr_scheduler_kwargs has it: warmup_steps"),
        (
            lambda: DiLoCoStrategy(lr_scheduler="lambda_cosine", lr_scheduler_kwargs={"max_steps": 9}),
            "lr_scheduler_kwargs has no setting 'max_steps'",
        ),
        (lambda: DiLoCoStrategy(optim_spec=OptimSpec("adamw", learning_rate=1)), "unexpected keyword argument"),
        (lambda: OptimSpec("adamaxx"), "unknown optimizer 'adamaxx'"),
        (lambda: SparseCommunicator("random"), "for places of your own write a CommunicationModule"),
        (lambda: fit_settings(settings(dataloader_kwargs={"drop_last": True})), "no setting 'drop_last'"),
        (lambda: fit_settings(settings(correlation_interval=2.5)), "correlation_interval must be a whole number"),
        (lambda: LocalTrainer(nn.Linear(1, 1), [1], port=5), "the trainer has no setting 'port'"),
        (lambda: fit_settings(settings(run_nam="a")), "no setting 'run_nam'"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(SettingError, match=message):
        make()


def test_optimizers():
    model = nn.Linear(2, 2)
    for spec, kind in [
        (OptimSpec.from_string("RMSprop", lr=0.5, alpha=0.9), torch.optim.RMSprop),
        (OptimSpec(torch.optim.Adagrad, lr=0.5), torch.optim.Adagrad),
        (OptimSpec(torch.optim.SGD, lr=0.5, momentum=0.9, dampening=0.1), torch.optim.SGD),
        (ensure_optim_spec("adagrad", lr=0.5), torch.optim.Adagrad),
        (ensure_optim_spec(OptimSpec(torch.optim.RMSprop), lr=0.5), torch.optim.RMSprop),
    ]:
        made = FedAvgStrategy(optim_spec=spec).config.inner_optim(model.parameters())
        assert type(made) is kind and made.param_groups[0]["lr"] == 0.5
    assert made.defaults["alpha"] == 0.99
    assert ensure_optim_spec(None) == OptimSpec() == ensure_optim_spec(None, OptimSpec())
    assert ensure_optim_spec(OptimSpec("sgd"), lr=0.5) == OptimSpec("sgd", lr=0.5)
    assert FedAvgStrategy(inner_optim="rmsprop").config.inner_optim.func is torch.optim.RMSprop


def test_demo_of_the_older_example():
    """It puts DeMo's numbers into the optimizer."""
    spec = OptimSpec(torch.optim.AdamW, lr=0.5, compression_topk=9, compression_decay=0.9, weight_decay=0.1)
    with pytest.warns(UserWarning, match="it takes lr, compression_topk, compression_decay, weight_decay"):
        config = DeMoStrategy(optim_spec=spec).config
    assert (config.lr, config.compression_topk, config.compression_decay, config.weight_decay) == (0.5, 9, 0.9, 0.1)


def test_modules_of_compositions():
    for selector, method in [
        (RandomIndexSelector(0.1), "random"),
        (ShuffledSequentialIndexSelector(p=0.1), "sequential"),
        (PartitionedIndexSelector(0.1), "partitioned"),
        (IndexSelector(0.1, "topk"), "topk"),
    ]:
        module = SparseCommunicator(selector)
        assert (module.sparsification_rate, module.compression_method) == (0.1, method)
        assert "index_selector" not in module.settings()
    outer = DiLoCoCommunicator(H=7, outer_optim_spec=OptimSpec(torch.optim.SGD, lr=0.7))
    assert (outer.interval, outer.config.outer_optim.lr) == (7, 0.7)
    assert (
        CommunicateOptimizeStrategy(communication_modules=[module, outer], optim_spec=ADAMW).config.inner_optim == ADAMW
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"num_epochs": 1, "max_steps": 300}, {"num_epochs": None, "max_steps": 300}),
        ({"num_epochs": 2, "max_steps": None}, {"num_epochs": 2}),
        ({"checkpoint_interval": None}, {"checkpoint_interval": 0}),
        ({"correlation_interval": 12}, {"log_correlation": 2}),
        ({"correlation_interval": 2}, {"log_correlation": 1}),
        ({"correlation_interval": None, "dataloader_kwargs": None}, {"log_correlation": 0}),
        ({"val_size": 0}, {"val_size": 0}),
    ],
)
def test_arguments_of_fit(given, wanted):
    found: FitSettings = fit_settings(settings(**given))
    assert {name: getattr(found, name) for name in wanted} == wanted


class Guess(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, batch):
        logits = self.layer(batch[0])
        right = (logits.argmax(1) == batch[1]).float().mean()
        return {"loss": nn.functional.cross_entropy(logits, batch[1]), "accuracy": right}


def test_run_name_makes_upstreams_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.eye(2).repeat(4, 1), torch.tensor([0, 1]).repeat(4))
    trainer = Trainer(Guess(), data, data, start_port=12355, device="")
    assert type(trainer) is LocalTrainer
    trainer.fit(
        num_epochs=1, max_steps=6, strategy=SPARTAStrategy(), num_nodes=1, batch_size=4, minibatch_size=2, val_size=4,
        val_interval=2, run_name="first", log_x_axis="step", wandb_project=None, kwargs={"dataset_name": "corners"},
    )  # fmt: skip
    folder = Path("logs", "first")
    rows = {name: list(csv.DictReader((folder / f"{name}.csv").open())) for name in ("train", "validation")}
    assert [row["step"] for row in rows["train"]] == [*"123456"] and rows["train"][-1]["examples_trained"] == "24"
    assert {"train_loss", "train_perplexity", "lr"} <= rows["train"][0].keys()
    assert [row["step"] for row in rows["validation"]] == [*"246"]
    assert all(float(row["global_loss"]) == float(row["local_loss"]) > 0 for row in rows["validation"])
    assert {float(row["accuracy"]) for row in rows["validation"]} <= {0.0, 0.5, 1.0}
    assert '"dataset_name": "corners"' in (folder / "config.json").read_text()
    trainer.fit(num_epochs=1, strategy=SPARTAStrategy(), num_nodes=1, val_size=0)
    assert trainer.result.val_loss is None
    with pytest.raises(SettingError, match="logger is given: run_name"):
        trainer.fit(num_epochs=1, strategy=SPARTAStrategy(), num_nodes=1, run_name="a", logger=print)


OPS = {
    **{"average": 2.0, "avg": 2.0, "mean": 2.0, "sum": 4.0, "min": 1.0, "max": 3.0, "product": 3.0},
    **{dist.ReduceOp.SUM: 4.0, dist.ReduceOp.AVG: 2.0, dist.ReduceOp.MIN: 1.0, dist.ReduceOp.PRODUCT: 3.0},
}


@pytest.mark.parametrize("as_given", [torch.tensor, np.array])
def test_collectives(as_given):
    def rank_main(comm):
        with communicate.use(comm):
            for op, wanted in OPS.items():
                value = as_given([1.0, 3.0][comm.rank])
                communicate.all_reduce(value, op=op)
                assert float(value) == wanted, op
            own = as_given([1.0 + comm.rank] * 4)
            assert communicate.reduce_scatter(own).tolist() == [3.0, 3.0]
            places = [torch.zeros(4), torch.zeros(4)]
            communicate.all_gather(places, own)
            assert [place[0] for place in places] == [1.0, 2.0] == [float(t[0]) for t in communicate.all_gather(own)]
            communicate.broadcast(own, src=1)
            assert own.tolist() == [2.0] * 4
            with pytest.raises(SettingError, match="3 rows are not 2 equal parts"):
                communicate.reduce_scatter(as_given([1.0, 2.0, 3.0]))
            with pytest.raises(SettingError, match="unknown op 'band'"):
                communicate.all_reduce(own, op=dist.ReduceOp.BAND)
            return info()["world_size"], info()["rank"]

    assert run_threads(2, rank_main) == [(2, 0), (2, 1)]


def test_exogym_is_installed_by_itself():
    """It has upstream's extras, and the versions that the whole project asks for."""
    own, whole = (
        tomllib.loads((PROJECT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in ("gym", ".")
    )
    extras = own["optional-dependencies"]
    assert {"wandb", "gpt", "demo", "examples", "all", "dev"} <= extras.keys()
    asked = {*whole["dependencies"], *(each for group in whole["optional-dependencies"].values() for each in group)}
    needed = [*own["dependencies"], *extras["wandb"], *extras["tensorboard"], *extras["dev"][1:]]
    assert {each for each in needed if not each.startswith("torch")} <= asked
