import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest
from small_run import CLIPS, MASTER, PAIR, PROJECT

from distributed.hosts.paths import STORE
from distributed.plan.automatic import Measured
from distributed.plan.job import OtherSet
from distributed.plan.launch import Launch, load_audio, load_items
from distributed.plan.on_hosts import for_host
from distributed.plan.prepare import prepare_run, rehost
from distributed.ssh.host import Host, Hosts
from exogym.strategy import DiLoCoConfig
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.data.formats.rows import AS_IT_IS
from whisper_tuner.errors import ConfigError, DataError
from whisper_tuner.model.memory import shape_of, trained_parameters


def names(items) -> set[str]:
    return {item.remote for item in items if not item.refuse_foreign}


def audio_of(items) -> set[Path]:
    return {item.local for item in items if item.local.suffix == ".ogg"}


def test_every_rank_is_told_the_run_that_the_profile_asks_for(job, run_dir, prepared):
    master, twin = (rank.spec for rank in prepared.launch.ranks)
    assert (prepared.steps_per_epoch, prepared.total_steps) == (6, 18)
    assert (master.rank, twin.rank, master.hosts) == (0, 1, ("127.0.0.1", "twin"))
    assert isinstance(master.strategy_settings, DiLoCoConfig)
    assert (master.strategy_settings.H, master.strategy_settings.warmup_steps) == (2, 2)
    assert dataclasses.replace(master.profile, train=twin.profile.train) != master.profile
    for spec in (master, twin):
        assert (spec.profile.epochs, spec.profile.batch_size, spec.profile.checkpoint_interval) == (3, 2, 13)


def test_how_the_user_is_told_stands_in_run_json_alone(folder, job, run_dir):
    token = "curl -H 'Authorization: Bearer tk_secret' -d"
    told = dataclasses.replace(job, distribution=dataclasses.replace(job.distribution, notify=token))
    launch = prepare_run(told, run_dir, hosts=PAIR).launch
    launch.save(run_dir)
    assert Launch.load(run_dir).notify == token and "secret" not in repr(launch)
    assert not any("secret" in rank.spec.to_json() for rank in launch.ranks)
    assert [path.name for path in run_dir.rglob("*") if path.is_file() and b"secret" in path.read_bytes()] == [
        "run.json"
    ]
    assert (run_dir / "run.json").stat().st_mode & 0o077 == 0


def test_the_master_reads_the_runs_own_lists_of_the_users_audio(folder, run_dir, prepared):
    spec = prepared.launch.ranks[0].spec
    assert (spec.profile.train, spec.profile.test) == (run_dir / "train.csv", None)
    assert spec.run_dir == str(run_dir) and spec.profile.base_model == f"{PROJECT}/bundled/model"
    for kind, count in list(CLIPS.items())[:2]:
        samples = load_manifest(run_dir / f"{kind}.csv").samples
        assert len(samples) == count and {sample.audio.parent for sample in samples} == {folder / kind}
    assert "127.0.0.1" not in prepared.items


def test_a_host_gets_model_lists_and_its_own_shard_and_names_them_from_its_project_folder(run_dir, prepared):
    spec, items = prepared.launch.ranks[1].spec, prepared.items["twin"]
    profile, sent = spec.profile, names(items)
    assert {str(profile.train), str(profile.validation), f"{profile.base_model}/config.json"} <= sent
    assert all(name.startswith(f"{STORE}/") for name in sent)
    assert (spec.run_dir, spec.cache_dir, profile.runs_dir) == ("runs/a-run", f"{STORE}/cache", Path("runs"))
    mine = {sample.audio for sample in prepared.shards[1]}
    assert {path for path in audio_of(items) if path.parent.name == "train"} == mine
    assert 0 < len(mine) < CLIPS["train"]
    assert any(item.refuse_foreign and item.remote == "distributed/worker/main.py" for item in items)


def test_the_list_on_a_host_names_the_audio_beside_it(run_dir, prepared):
    [listing] = [item for item in prepared.items["twin"] if item.remote.endswith("/train.csv")]
    rows = load_manifest(listing.local, check_audio=False).samples
    folder = listing.remote.rpartition("/")[0]
    there = {f"{folder}/{sample.audio.relative_to(run_dir)}" for sample in rows}
    assert len(rows) == CLIPS["train"] and names(i for i in prepared.items["twin"] if i.local.suffix == ".ogg") & there
    assert there <= set(load_audio(run_dir))


def test_what_hosts_need_is_remembered_without_the_code(run_dir, prepared):
    assert names(prepared.items["twin"]) == {item.remote for item in load_items(run_dir)["twin"]}
    assert len(load_audio(run_dir)) == CLIPS["train"] + CLIPS["validation"]


def test_audio_that_is_not_below_its_manifest_gets_a_name_on_hosts(folder, job, run_dir, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "a.ogg"
    (folder / "train/000.ogg").rename(elsewhere)
    listing = (folder / "train.csv").read_text()
    (folder / "train.csv").write_text(listing.replace("train/000.ogg", str(elsewhere)))
    prepare_run(job, run_dir, hosts=PAIR)
    [item] = [item for item in load_audio(run_dir).values() if item.local == elsewhere]
    assert "/elsewhere/" in item.remote and item.remote.endswith(".ogg")


def test_local_ranks_share_the_cores_and_are_told_how_many_they_are(job, run_dir, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    found = prepare_run(job, run_dir, local_ranks=3)
    assert [rank.label for rank in found.launch.ranks] == ["rank0", "rank1", "rank2"]
    assert {(rank.spec.machine_workers, rank.spec.profile.num_threads) for rank in found.launch.ranks} == {(3, 2)}
    assert {rank.spec.shares for rank in found.launch.ranks} == {"fixed"}  # their speeds do not count
    assert not found.items and not (run_dir / "shipment.json").exists()


def test_one_process_has_the_machine_for_itself_and_max_steps_end_its_run_sooner(job, run_dir):
    short = dataclasses.replace(job, profile=dataclasses.replace(job.profile, max_steps=4, checkpoint_interval=7))
    found = prepare_run(short, run_dir)
    [rank] = found.launch.ranks
    assert (rank.label, rank.spec.machine_workers, rank.spec.profile.num_threads) == ("localhost", 1, 0)
    assert rank.spec.shares == "fixed" and rank.spec.profile.checkpoint_interval == 7
    assert (found.steps_per_epoch, found.total_steps) == (6, 4)


def test_quick_steps_make_checkpoints_no_more_frequent_than_they_are_worth(job, run_dir):
    def interval(step_s: float | None, job=job, bytes_s: float = 1e12) -> int:
        about = {"hosts": PAIR, "measured": lambda: Measured(step_s=step_s, bytes_s=bytes_s)}
        return prepare_run(job, run_dir, **about).launch.ranks[0].spec.profile.checkpoint_interval

    assert interval(None) == interval(60.0) == 13  # 25 steps, in rounds of 2
    quick = interval(0.01)
    parameters = trained_parameters(shape_of(str(PROJECT / "bundled/model")), job.profile)
    copied_s = 28 * parameters / 0.5e9
    assert quick > 13 and quick * 2 * 0.01 == pytest.approx((2 * copied_s * 3600) ** 0.5, rel=0.01)
    assert interval(0.01, bytes_s=1e5) < quick / 5  # what hosts wait for a link counts
    asked = dataclasses.replace(job, profile=dataclasses.replace(job.profile, checkpoint_interval=7))
    assert interval(0.01, asked) == 7
    assert interval(0.01, job.with_strategy("allreduce")) == interval(None, job.with_strategy("allreduce"))


def test_shards_of_others_are_for_one_machine(job, run_dir):
    alone = dataclasses.replace(job, profile=dataclasses.replace(job.profile, shards=("a", "b")))
    assert len(prepare_run(alone, run_dir).shards) == 2
    with pytest.raises(ConfigError, match="one machine"):
        prepare_run(alone, run_dir, hosts=PAIR)


def test_a_manifest_without_a_usable_row_is_refused(folder, job, run_dir):
    for clip in (folder / "train").iterdir():
        clip.unlink()
    with pytest.raises(DataError, match=r"train\.csv: no usable row"):
        prepare_run(job, run_dir)


def test_a_host_trains_where_the_hosts_file_says(job, run_dir):
    workers = (Host(address="a", interface="en7", device="cpu"), Host(address="b", device="cuda:1"), Host(address="c"))
    launch = prepare_run(job, run_dir, hosts=Hosts(master=MASTER, workers=workers)).launch
    assert [rank.spec.interface for rank in launch.ranks] == ["", "en7", "", ""]
    assert [rank.spec.wanted_device for rank in launch.ranks] == [None, "cpu", "cuda:1", None]


def test_a_run_without_validation_sends_none(job, run_dir, prepared):
    spec = dataclasses.replace(prepared.launch.ranks[0].spec, rank=1)
    manifest = load_manifest(run_dir / "train.csv")
    told, items = for_host(spec, Host(address="twin"), {"train": manifest}, {"train": manifest.samples[:1]}, run_dir)
    assert told.profile.validation is None and len(audio_of(items)) == 1


# ---- Going on, on the same hosts or on others -------------------------------------------------------------------

THREE = Hosts(master=MASTER, workers=(Host(address="twin"), Host(address="other")))


def test_a_run_that_goes_on_as_it_was_is_told_the_same(run_dir, prepared):
    launch, items = rehost(prepared.launch, PAIR, run_dir, (1, 1))
    assert launch == prepared.launch and items == prepared.items


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"interface": "en7"}, lambda rank: rank.spec.interface == "en7"),
        ({"device": "cpu"}, lambda rank: rank.spec.wanted_device == "cpu"),
        ({"user": "eve"}, lambda rank: rank.host.user == "eve"),
        ({"port": 2222}, lambda rank: rank.host.port == 2222),
        ({"python_env": "/env"}, lambda rank: rank.host.python == "/env/bin/python"),
        ({"project_path": "/data/w"}, lambda rank: rank.host.project_path == "/data/w"),
    ],
)
def test_what_the_hosts_file_says_now_counts(run_dir, prepared, change, seen):
    changed = Hosts(master=MASTER, workers=(dataclasses.replace(PAIR.workers[0], **change),))
    launch, _ = rehost(prepared.launch, changed, run_dir, (1, 1))
    assert seen(launch.ranks[1]) and not seen(prepared.launch.ranks[1])
    assert rehost(launch, PAIR, run_dir, (1, 1))[0] == prepared.launch  # and again, once it says so no more


def test_the_masters_interface_and_device_may_change(run_dir, prepared):
    master = dataclasses.replace(MASTER, interface="en7", device="cpu")
    launch, _ = rehost(prepared.launch, dataclasses.replace(PAIR, master=master), run_dir, (1, 1))
    assert (launch.ranks[0].spec.interface, launch.ranks[0].spec.wanted_device) == ("en7", "cpu")
    assert launch.ranks[1].spec.wanted_device is None and launch.master == master


def test_other_hosts_share_the_work_anew(run_dir, prepared):
    launch, items = rehost(prepared.launch, THREE, run_dir, (2, 2, 1))
    assert [rank.label for rank in launch.ranks] == ["127.0.0.1", "twin", "other"]
    assert [rank.spec.machine_workers for rank in launch.ranks] == [2, 2, 1]
    assert {rank.spec.world_size for rank in launch.ranks} == {3}
    assert set(items) == {"twin", "other"} and audio_of(items["other"])
    assert Launch.load(run_dir) == prepared.launch  # nothing has changed yet


@pytest.mark.parametrize(("before", "after"), [((1, 1), (2, 2)), ((2, 2), (1, 1))])
def test_other_hosts_decide_anew_whether_speeds_count(job, run_dir, before, after):
    def shares(launch):
        [found] = {rank.spec.shares for rank in launch.ranks}
        return found

    def goes_on(job):
        run_dir.mkdir(exist_ok=True)
        launch = prepare_run(job, run_dir, hosts=PAIR, machine_workers=before).launch
        return shares(launch), shares(rehost(launch, PAIR, run_dir, after)[0])

    by_workers = {(1, 1): "auto", (2, 2): "fixed"}
    assert goes_on(job) == (by_workers[before], by_workers[after])
    for asked in ("auto", "fixed"):
        distribution = dataclasses.replace(job.distribution, shares=asked)
        origin = job.origin | {"shares": "config.ini:9"}
        assert goes_on(dataclasses.replace(job, distribution=distribution, origin=origin)) == (asked, asked)


def test_hosts_that_a_run_had_keep_their_files_in_mind(run_dir, prepared):
    """The run goes on with them if the change of hosts fails on its way."""
    rehost(prepared.launch, Hosts(master=MASTER, workers=(Host(address="other"),)), run_dir, (1, 1))
    assert set(load_items(run_dir)) == {"twin", "other"}


def test_a_clip_that_is_gone_changes_no_list(folder, run_dir, prepared):
    """Ranks with different lists could not go on together; the sync names what is gone."""
    before = (run_dir / "train-on-hosts.csv").read_text()
    (folder / "train/000.ogg").unlink()
    launch, _ = rehost(prepared.launch, THREE, run_dir, (1, 1, 1))
    assert (run_dir / "train-on-hosts.csv").read_text() == before and len(launch.ranks) == 3


def test_fewer_hosts_than_a_run_needs_at_least(run_dir, prepared):
    launch = dataclasses.replace(prepared.launch, min_hosts=2)
    assert rehost(launch, Hosts(master=MASTER, workers=()), run_dir, (1,))[0].min_hosts == 1


def test_a_share_of_another_set_is_trained_with_its_own_names_and_language(folder, job, run_dir):
    other = OtherSet(name="bundled", clips=PROJECT / "bundled/data/validation.csv", language="en", reading=AS_IT_IS)
    added = dataclasses.replace(other, share=0.2), dataclasses.replace(other, clips=job.profile.train)
    prepared = prepare_run(dataclasses.replace(job, added=added), run_dir, hosts=PAIR)
    samples = load_manifest(run_dir / "train.csv").samples
    more = samples[CLIPS["train"] :]
    assert len(more) == 6 and {sample.language for sample in more} == {"en"}  # the run's own clips are not added again
    assert all(sample.id.startswith("bundled-validation-") for sample in more)
    told = "bundled: 6 clips of 30 are trained as well (also_train), so that less is forgotten"
    assert told in prepared.manifests["train"].notes
    dealt = [sample.id for shard in prepared.shards for sample in shard]
    assert sorted(dealt) == sorted(sample.id for sample in samples)
    [listing] = [item for item in prepared.items["twin"] if item.remote.endswith("/train.csv")]
    assert [s.id for s in load_manifest(listing.local, check_audio=False).samples] == [s.id for s in samples]
    again = prepare_run(dataclasses.replace(job, added=added), run_dir, hosts=PAIR)
    assert again.manifests["train"].samples == prepared.manifests["train"].samples
    untold = dataclasses.replace(job, keeps=(dataclasses.replace(other, is_list=True),))
    [kept] = prepare_run(untold, run_dir).kept
    told = "bundled: its language is taken to be en, and none of it is trained, so it may be forgotten."
    assert any(note.startswith(told) for note in kept.notes)
    [kept] = prepare_run(dataclasses.replace(job, keeps=(other,)), run_dir).kept
    assert any("Give [dataset:bundled] a list of clips to train: train = ..." in note for note in kept.notes)
    assert prepare_run(dataclasses.replace(untold, origin=job.origin | {"also_train": ""}), run_dir).kept[0].notes == ()
    gone = dataclasses.replace(job, added=(dataclasses.replace(other, clips=run_dir / "gone.csv"),))
    notes = prepare_run(gone, run_dir).manifests["train"].notes  # nobody has asked for these clips
    assert any(note.startswith("bundled: none of it is trained, so it may be forgotten: ") for note in notes)
    with pytest.raises(DataError):
        prepare_run(dataclasses.replace(gone, origin=job.origin | {"also_train": ""}), run_dir)
    few = dataclasses.replace(job, added=(dataclasses.replace(other, most=0.05),))  # of the run's own clips
    assert len(prepare_run(few, run_dir).manifests["train"].samples) == CLIPS["train"] + math.ceil(CLIPS["train"] / 20)


def test_recordings_of_the_run_may_be_trained_for_another_task_as_well(folder, job, run_dir):
    """One model then transcribes and translates, each by its own prompt."""
    other = OtherSet(
        name="into-english", clips=job.profile.train, language="fr", task="translate", reading=AS_IT_IS, share=0.5
    )
    prepare_run(dataclasses.replace(job, added=(other,)), run_dir, hosts=PAIR)
    samples = load_manifest(run_dir / "train.csv", check_audio=False, repeats=True).samples
    more = samples[CLIPS["train"] :]
    assert {sample.way for sample in samples[: CLIPS["train"]]} == {("", "")}
    assert {sample.way for sample in more} == {("fr", "translate")} and len(more) == math.ceil(CLIPS["train"] / 2)
    assert other.profile(job.profile).task == "translate"
    same = dataclasses.replace(other, task=job.profile.task)  # its clips are the run's own
    prepare_run(dataclasses.replace(job, added=(same,)), run_dir, hosts=PAIR)
    assert len(load_manifest(run_dir / "train.csv").samples) == CLIPS["train"]


def test_clips_of_another_set_may_be_there_several_times_an_epoch(job, run_dir):
    """Each under a name of its own, so that the ledger counts each time; its file is sent once."""
    other = OtherSet(name="more", clips=PROJECT / "bundled/data/validation.csv", language="en", reading=AS_IT_IS)
    prepared = prepare_run(
        dataclasses.replace(job, added=(dataclasses.replace(other, share=2.5),)), run_dir, hosts=PAIR
    )
    samples = prepared.manifests["train"].samples
    more = samples[CLIPS["train"] :]
    assert Counter(Counter(sample.audio for sample in more).values()) == {2: 15, 3: 15}
    assert len({sample.id for sample in samples}) == len(samples)
    assert load_manifest(run_dir / "train.csv", check_audio=False, repeats=True).samples[-1].id == more[-1].id
    [listing] = [item for item in prepared.items["twin"] if item.remote.endswith("/train.csv")]
    assert len(load_manifest(listing.local, check_audio=False, repeats=True).samples) == len(samples)
    assert len({item.remote for item in prepared.items["twin"]}) == len(prepared.items["twin"])
    launch, items = rehost(prepared.launch, THREE, run_dir, (1, 1, 1))
    assert len(launch.ranks) == 3 and len({item.remote for item in items["twin"]}) == len(items["twin"])
    told = "more: 30 clips of 30 are trained as well, 2.5 times an epoch (also_train), so that less is forgotten"
    assert told in prepared.manifests["train"].notes


def test_what_is_both_trained_and_measured_is_told_by_the_launcher(job, run_dir):
    """So that it stands in the run's events, where the report finds it."""
    test = PROJECT / "bundled/data/test.csv"
    other = OtherSet(name="tested", clips=test, language="en", reading=AS_IT_IS)
    prepared = prepare_run(dataclasses.replace(job.with_profile(test=test), added=(other,)), run_dir)
    both = (other, dataclasses.replace(other, name="once more", task="translate"))
    twice = prepare_run(dataclasses.replace(job.with_profile(test=test), added=both), run_dir)
    assert twice.launch.added == {str(test): 120}
    [leak] = prepared.launch.leaks
    assert leak.startswith("data/test.csv shares 60 clips of 60 with data/test.csv")
    prepared.launch.save(run_dir)
    assert Launch.load(run_dir).leaks == (leak,) and prepared.launch.added == {str(test): 60}


def test_what_a_set_to_keep_has_of_other_lists_is_told_of_these(job, run_dir):
    test, trained = PROJECT / "bundled/data/test.csv", PROJECT / "bundled/data/validation.csv"
    added, kept = (OtherSet(name="more", clips=trained, language="en", reading=AS_IT_IS) for _ in range(2))
    prepared = prepare_run(dataclasses.replace(job.with_profile(test=test), added=(added,), keeps=(kept,)), run_dir)
    assert prepared.launch.leaks[-1].startswith("data/validation.csv shares 30 clips of 30 with data/validation.csv:")


def test_clips_of_rare_terms_are_there_several_times(folder, job, run_dir):
    """Those of a term that many clips have are not."""
    texts = [sample.text for sample in load_manifest(job.profile.train).samples]
    words = Counter(word for text in texts for word in {*text.lower().strip(".?!").split()})
    rare = next(word for word, count in words.items() if word.isalpha() and count == 1)
    usual = next(word for word, count in words.items() if word.isalpha() and count > 5)
    (folder / "terms.txt").write_text(f"{rare}\n{usual}\nnever said\n")
    prepared = prepare_run(job.with_profile(terms=folder / "terms.txt", terms_times=3), run_dir)
    manifest = prepared.manifests["train"]
    again = [sample for sample in manifest.samples if "*" in sample.id]
    assert [sample.id[-2:] for sample in again] == ["*2", "*3"] and len({sample.audio for sample in again}) == 1
    assert rare in again[0].text.lower()
    assert "terms: 1 clip of 1 rare term is trained 3 times an epoch (terms_times)" in manifest.notes
