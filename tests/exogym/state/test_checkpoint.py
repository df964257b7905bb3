import threading

import pytest
import torch
from exogym_toys import Line, Points, Resumable, Steps, Tokens, run_threads, token_batch, train_node
from torch import nn

from exogym import AllReduceStrategy, Checkpoints, DiLoCoStrategy, LocalTrainer, SingleComm
from exogym.errors import CheckpointError
from exogym.samplers.batches import DatasetBatches
from exogym.state import checkpoint as files

STATE = {
    "steps": 3,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "name": "é",
    "none": None,
    "optimizer": {0: {"exp_avg": torch.tensor([1.5, -0.0])}, 1: [torch.tensor(3), True]},
}


def test_a_state_comes_back_as_it_was(tmp_path):
    kept = Checkpoints(tmp_path, "rank0")
    kept.save(4, STATE)
    back = kept.load(4)
    assert torch.equal(back["optimizer"][0].pop("exp_avg"), torch.tensor([1.5, -0.0]))
    assert torch.equal(back["optimizer"][1].pop(0), torch.tensor(3))
    assert back == {**STATE, "optimizer": {0: {}, 1: [True]}} and isinstance(back["betas"], tuple)


def test_only_the_last_ones_are_kept_and_each_rank_has_its_own(tmp_path):
    first, second = Checkpoints(tmp_path, "rank0", keep=2), Checkpoints(tmp_path, "rank1", keep=2)
    for number in (1, 2, 3):
        first.save(number, STATE)
    second.save(1, STATE)
    assert list(first.good()) == [2, 3] and list(second.good()) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000001", "0000002", "0000003"]


@pytest.mark.parametrize("name", ["rank0.safetensors", "rank0.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "empty"])
def test_a_damaged_one_does_not_count(tmp_path, name, damage):
    kept = Checkpoints(tmp_path, "rank0")
    kept.save(1, STATE)
    kept.save(2, STATE)
    file = tmp_path / "0000002" / name
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data if damage == "flip" else data[: len(data) // 2] if damage == "cut" else b"")
    assert list(kept.good()) == [1]
    with pytest.raises(CheckpointError, match="damaged"):
        kept.load(2)
    kept.save(2, STATE)
    assert list(kept.good()) == [1, 2]


@pytest.mark.parametrize("left", [["rank0.json.part"], ["rank0.safetensors.part"], ["rank0.safetensors"]])
@pytest.mark.parametrize("number", [2, 3, 9])
def test_what_a_killed_process_left_half_done_goes_with_the_next_write(tmp_path, left, number):
    kept, other = Checkpoints(tmp_path, "rank0"), Checkpoints(tmp_path, "rank1")
    kept.save(2, STATE)
    other.save(number, STATE)
    whole = {path for path in tmp_path.rglob("*") if path.is_file()}
    for name in left:
        (tmp_path / f"{number:07d}" / name).touch()
    kept.save(4, STATE)
    assert list(kept.good()) == [2, 4] and list(other.good()) == [number]
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert files - whole == {tmp_path / "0000004" / f"rank0.{kind}" for kind in ("json", "safetensors")}


@pytest.mark.parametrize("full_at", [1, 2])
def test_one_that_cannot_be_written_again_stays_as_it_was(tmp_path, monkeypatch, full_at):
    kept, synced, sync = Checkpoints(tmp_path, "rank0"), [], files.sync
    kept.save(3, STATE)

    def sync_until_it_is_full(path):
        synced.append(path)
        if len(synced) == full_at:
            raise OSError("No space left on device")
        sync(path)

    monkeypatch.setattr(files, "sync", sync_until_it_is_full)
    with pytest.raises(CheckpointError, match="No space left"):
        kept.save(3, {"steps": 4})
    assert list(kept.good()) == [3] and kept.load(3)["steps"] == STATE["steps"]
    assert len(list((tmp_path / "0000003").iterdir())) == 2


@pytest.mark.parametrize("keep", [1, 2])
def test_an_earlier_one_makes_later_ones_void(tmp_path, keep):
    kept, other = Checkpoints(tmp_path, "rank0", keep=keep), Checkpoints(tmp_path, "rank1")
    for number in (2, 4, 6, 8):
        kept.save(number, STATE)
    other.save(8, STATE)
    kept.save_in_background(5, STATE).result()
    assert list(kept.good()) == [5] and list(other.good()) == [8]
    kept.save(6, STATE)
    assert list(kept.good()) == [5, 6][-keep:]


def test_the_agreement_before_a_state_inside_a_round_can_be_saved_beside_it(tmp_path):
    kept = Checkpoints(tmp_path, "rank0", keep=1)
    kept.save(9, STATE)
    kept.save(8, STATE)
    assert list(kept.good()) == [8, 9]


def test_one_that_cannot_be_written_leaves_the_older_ones_and_a_warning(tmp_path):
    """Where a folder should be there is a file: root too cannot write below it."""
    (tmp_path / "0000006").write_text("in the way")
    events = []
    source = Steps([[(torch.ones(2, 4), torch.ones(2, 1))]] * 4)
    strategy = DiLoCoStrategy(H=1, lr=0.01)
    kept = Checkpoints(tmp_path, "rank0")
    node = train_node(
        Line(), SingleComm(), strategy, source, epochs=1, device="cpu", events=events.append,
        checkpoints=kept, checkpoint_interval=1,
    )  # fmt: skip
    assert node.run().steps == 4
    warnings = [event["what"] for event in events if event["type"] == "warning"]
    assert len(warnings) == 1 and "0000006: cannot be written" in warnings[0]
    assert list(kept.good()) == [2, 4]


def test_a_rank_that_has_begun_does_not_read_its_checkpoints_again(tmp_path):
    node = train_node(
        Line(), SingleComm(), DiLoCoStrategy(H=1, lr=0.01), Steps([[(torch.ones(2, 4), torch.ones(2, 1))]] * 4),
        epochs=1, device="cpu", checkpoints=Checkpoints(tmp_path, "rank0"), checkpoint_interval=1, resume=True,
    )  # fmt: skip
    node.run()
    assert node.saved.checkpoints.good() and node.saved.offers() == ([], False)


def test_while_checkpoints_are_read_others_are_told_that_it_goes_on(tmp_path):
    class Told(SingleComm):
        signs = 0

        def alive(self):
            self.signs += 1

    source, comm = DatasetBatches(Points(8), batch_size=2), Told()
    about = {"epochs": 1, "device": "cpu", "checkpoint_interval": 1}
    kept = Checkpoints(tmp_path, "rank0")
    train_node(Line(), SingleComm(), DiLoCoStrategy(H=1, lr=0.01), source, checkpoints=kept, **about).run()
    there = len(kept.good())
    train_node(Line(), comm, DiLoCoStrategy(H=1, lr=0.01), source, checkpoints=kept, resume=True, **about).run()
    assert comm.signs == there > 1


STRATEGIES = {
    "allreduce": lambda: AllReduceStrategy(lr=0.02, schedule="cosine", warmup_steps=3),
    "diloco": lambda: DiLoCoStrategy(lr=0.02, H=5, schedule="cosine", outer_momentum=0.9),
    "diloco, plain average": lambda: DiLoCoStrategy(lr=0.02, H=4, warmup_steps=3, outer_momentum=0),
}
SOURCES = [Steps([[token_batch(2 + rank, seed=10 * rank + i)] for i in range(6)]) for rank in range(2)]


def dies(forwards):
    """A hook that ends the rank in its forward pass number `forwards`."""
    left = [forwards]

    def hook(*_):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("died")

    return hook


def two_ranks(make_strategy, folder=None, *, stop_at=(None, None), interval=0, resume=False, die_at=None):
    """Weights, validation loss, digest and this part's losses of both ranks. A rank asks to stop after `stop_at`."""

    def rank_main(comm):
        events = []
        model = Tokens()
        if die_at is not None and comm.rank == 1:
            model.register_forward_pre_hook(dies(die_at))
        kept = Checkpoints(folder, f"rank{comm.rank}") if folder else None
        node = train_node(
            model, comm, make_strategy(), Resumable(SOURCES[comm.rank].steps), epochs=4, device="cpu",
            val=Steps([[token_batch(3, seed=99)]]), val_interval=4, events=events.append,
            should_stop=lambda: stop_at[comm.rank] is not None and node.state.now.step + 1 >= stop_at[comm.rank],
            checkpoints=kept, checkpoint_interval=interval, resume=resume,
        )  # fmt: skip
        try:
            result = node.run()
        finally:
            if kept:
                kept._writer.shutdown()  # whoever resumes finds nobody who still writes, as after the end of a process
        losses = {e["step"]: e["loss"] for e in events if e["type"] == "step"}
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        return weights, losses, result

    return run_threads(2, rank_main)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("stop_at", [(1, None), (None, 9), (8, 10), (10, 10), (23, None)])
def test_a_stopped_and_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, name, stop_at):
    whole = two_ranks(STRATEGIES[name])
    stopped = two_ranks(STRATEGIES[name], tmp_path, stop_at=stop_at)
    assert all(result.stopped for _, _, result in stopped)
    assert torch.equal(stopped[0][0], stopped[1][0])  # they still agreed, on the way out
    resumed = two_ranks(STRATEGIES[name], tmp_path, resume=True)
    for (weights, losses, result), (_, before, _), (again, rest, end) in zip(whole, stopped, resumed, strict=True):
        assert torch.equal(weights, again)
        assert before | rest == losses and not before.keys() & rest.keys()
        assert (result.digest, result.val_loss, result.train_loss) == (end.digest, end.val_loss, end.train_loss)
        assert (result.steps, result.samples, result.rounds) == (end.steps, end.samples, end.rounds)


@pytest.mark.parametrize("name", STRATEGIES)
def test_stopped_twice_and_resumed_twice(tmp_path, name):
    whole = two_ranks(STRATEGIES[name])
    two_ranks(STRATEGIES[name], tmp_path, stop_at=(7, None))
    two_ranks(STRATEGIES[name], tmp_path, stop_at=(None, 8), resume=True)
    resumed = two_ranks(STRATEGIES[name], tmp_path, resume=True)
    assert all(torch.equal(a[0], b[0]) and a[2].digest == b[2].digest for a, b in zip(whole, resumed, strict=True))


@pytest.mark.parametrize(
    "name", [name if name == "diloco" else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
)
def test_after_a_crash_it_goes_on_from_the_newest_that_all_ranks_have(tmp_path, name):
    whole = two_ranks(STRATEGIES[name], tmp_path / "whole", interval=1)
    tmp_path /= "run"
    with pytest.raises(Exception, match="died"):
        two_ranks(STRATEGIES[name], tmp_path, interval=1, die_at=17)
    newest = max(Checkpoints(tmp_path, "rank1").good())
    (tmp_path / f"{newest:07d}" / "rank1.json").unlink()
    resumed = two_ranks(STRATEGIES[name], tmp_path, interval=1, resume=True)
    assert 0 < len(resumed[0][1]) < 24
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole, resumed, strict=True))


def test_without_any_checkpoint_a_resumed_run_starts_anew(tmp_path):
    whole, resumed = two_ranks(STRATEGIES["diloco"]), two_ranks(STRATEGIES["diloco"], tmp_path, resume=True)
    assert torch.equal(whole[0][0], resumed[0][0]) and len(resumed[0][1]) == 24


def test_a_rank_without_a_checkpoint_is_given_what_the_others_agreed_on(tmp_path):
    two_ranks(STRATEGIES["diloco"], tmp_path, stop_at=(12, None))
    for file in tmp_path.rglob("rank1.*"):
        file.unlink()
    resumed = two_ranks(STRATEGIES["diloco"], tmp_path, resume=True)
    assert torch.equal(resumed[0][0], resumed[1][0])
    assert sorted(resumed[1][1]) == list(range(11, 25))  # from the last round on: inside it only rank 0 knew


def test_if_all_are_damaged_it_does_not_start_anew(tmp_path):
    two_ranks(STRATEGIES["diloco"], tmp_path, stop_at=(7, None))
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="all checkpoints are damaged: rank0, rank1"):
        two_ranks(STRATEGIES["diloco"], tmp_path, resume=True)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    two_ranks(STRATEGIES["diloco"], tmp_path, stop_at=(7, None))
    with pytest.raises(CheckpointError, match="strategy was DiLoCoStrategy, and is AllReduceStrategy"):
        two_ranks(STRATEGIES["allreduce"], tmp_path, resume=True)


class Noisy(Line):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch):
        x, y = batch
        return super().forward((self.dropout(x), y))


def test_dropout_and_shuffled_data_go_on_too(tmp_path):
    settings = {"num_epochs": 3, "batch_size": 4, "device": "cpu"}

    def fit(**more):
        trainer = LocalTrainer(Noisy(), Points(80))
        trainer.fit(strategy=DiLoCoStrategy(lr=0.05, H=6), **settings, **more)
        return trainer

    whole = fit()
    kept, steps = str(tmp_path), []
    stopped = fit(save_dir=kept, logger=steps.append, should_stop=lambda: len(steps) > 27)
    assert stopped.result.stopped and 20 < stopped.result.steps < whole.result.steps
    torch.manual_seed(123)
    resumed = fit(save_dir=kept, resume=True)
    for ours, theirs in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert whole.result.digest == resumed.result.digest


def test_after_a_stop_inside_a_round_what_was_agreed_is_the_state_before_it():
    """Not the weights that the stop has forced, with what was done before: its clips would be trained twice."""
    asked = []
    node = train_node(
        Line(), SingleComm(), DiLoCoStrategy(lr=0.1, H=5), Resumable([[(torch.ones(2, 4), torch.ones(2, 1))]] * 20),
        epochs=1, device="cpu", should_stop=lambda: bool(asked),
        events=lambda event: asked.append(1) if event["type"] == "step" and event["step"] == 7 else None,
    )  # fmt: skip
    node.run()
    assert node.strategy.cut_short and node.strategy.steps == 8
    agreed = node.state.agreed_state()
    assert agreed["strategy"]["steps"] == agreed["now"]["step"] == 5
    node.state.revert_to_agreed()
    assert node.strategy.steps == node.state.now.step == 5 and not node.strategy.cut_short


def test_a_rescue_does_not_replace_what_is_just_being_written(tmp_path):
    """Its own part, the inner optimizer, would be lost."""
    kept = Checkpoints(tmp_path, "rank0")
    node = train_node(
        Line(), SingleComm(), DiLoCoStrategy(lr=0.1, H=2), Resumable([[(torch.ones(2, 4), torch.ones(2, 1))]] * 4),
        epochs=1, device="cpu", checkpoints=kept, checkpoint_interval=1,
    )  # fmt: skip
    in_background, rescues = kept.save_in_background, []

    def slowly(number, state, **options):
        """The rescue looks for a checkpoint before this one is handed to the writer, and writes after it."""
        waiting = threading.Event()
        kept.glance = lambda number: (waiting.set(), Checkpoints.glance(kept, number))[1]
        rescues.append(threading.Thread(target=node.save_agreed))
        rescues[-1].start()
        waiting.wait()
        writing = in_background(number, state, **options)
        rescues[-1].join()
        return writing

    kept.save_in_background = slowly
    node.run()
    assert len(rescues) == 1 and kept.load(2)["own"] is not None
