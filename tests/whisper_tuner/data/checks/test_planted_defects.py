"""Each planted defect is found, in its row and by its kind; the set itself has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted import BUNDLED, DEFECTS, LINE, copy_of_bundled

from whisper_tuner.data.checks import gather, table
from whisper_tuner.data.checks.finding import Finding
from whisper_tuner.data.checks.material import Material
from whisper_tuner.data.labels import token_limit


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Facts of the clips that all copies share."""
    return tmp_path_factory.mktemp("store")


def found_in(paths, store) -> list[Finding]:
    manifests = {part: gather.read(path, store, max_duration_s=30.0) for part, path in paths.items()}
    model = str(BUNDLED / "model")
    material = Material(manifests=manifests, language="en", limit=token_limit(model, language="en"))
    material = replace(material, read_back=gather.reading_back(model))
    return table.findings(gather.decode(material, store, lambda done, total: None))


def test_a_clean_set_has_none(tmp_path, store):
    assert found_in(copy_of_bundled(tmp_path).write(), store) == []


@pytest.mark.parametrize("planted", DEFECTS)
def test_a_planted_defect_is_found(planted, tmp_path, store):
    copy, (kind, plant) = copy_of_bundled(tmp_path), DEFECTS[planted]
    plant(copy)
    found = found_in(copy.write(), store)
    assert (kind, "train", LINE) in [(one.kind.name, one.part, one.line) for one in found], found
    others = {one.line for one in found if one.part == "train"} - {LINE}
    assert not others, found  # and nothing is said of rows that have no part in it


def test_every_kind_is_planted():
    """But for those that another test plants: damage of the manifest itself, and what needs a model."""
    elsewhere = {"wrong columns", "bad quoting", "audio in iCloud only", "unknown language", "duplicate audio"}
    elsewhere |= {"duplicate row", "contradicted", "changed by the tokenizer"}
    assert {kind.name for kind in table.KINDS} - elsewhere == {kind for kind, _ in DEFECTS.values()}
    assert len(DEFECTS) >= 25
