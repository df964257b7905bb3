from pathlib import Path

from distributed.run_dir.events import UNNAMED
from distributed.run_dir.summary import RunSummary
from multimac.report.measured import card


def described(folder: Path, **about) -> str:
    run = RunSummary(id="mine", path=folder, state="finished", created=0.0, changed=0.0, **about)
    return card(run, language="fr", runtime="mlx-whisper", precision="float16", usage="")


def test_a_card_says_what_is_known_and_leaves_out_the_rest(tmp_path):
    usage = "    mlx_whisper x.wav\n"
    bare = card(None, language=None, runtime="mlx-whisper", precision="float16", usage=usage)
    assert bare.startswith("---\npipeline_tag:") and "| | |" not in bare and "WER" not in bare
    assert bare.endswith("## Use\n\n    mlx_whisper x.wav\n")
    whole = described(tmp_path, base_model="org/base", test="t.csv", wer_after=12.34, hosts=("a", "b"), steps=9)
    assert 'base_model: "org/base"' in whole and 'language: "fr"' in whole
    assert "| WER of this model | 12.3 |" in whole and "on the run's test clips" in whole and UNNAMED in whole
    assert "9 steps on 2 hosts" in whole and "WER of the base model" not in whole


def test_a_card_names_no_folder_of_this_machine(tmp_path):
    for base in ("/home/anna/models/small", "../models/small", "~/models/small"):
        told = described(tmp_path, base_model=base)
        assert "| trained from | `small` |" in told and "anna" not in told and "base_model" not in told
