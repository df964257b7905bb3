from multimac.view.model_card import About, Rate, card
from whisper_tuner.eval.intervals import Interval


def test_a_card_says_what_is_known_and_leaves_out_the_rest():
    bare = card(About(title="Mine", runtime="mlx-whisper", precision="float16", usage="    mlx_whisper x.wav\n"))
    assert bare.startswith("---\npipeline_tag:") and "| | |" not in bare and "WER" not in bare
    assert bare.endswith("## Use\n\n    mlx_whisper x.wav\n")
    rate = Rate(wer=12.34, interval=Interval(low=10.0, high=15.0))
    whole = card(About(title="Mine", base_model="org/base", language="fr", after=rate, test_clips=51, hosts=2, steps=9))
    assert 'base_model: "org/base"' in whole and 'language: "fr"' in whole
    assert "| WER of this model | 12.3 (10.0 to 15.0) |" in whole and "on 51 test clips" in whole
    assert "9 steps on 2 hosts" in whole


def test_a_card_names_no_folder_of_this_machine():
    for base in ("/home/anna/models/small", "../models/small", "~/models/small"):
        told = card(About(title="Mine", base_model=base))
        assert "| trained from | `small` |" in told and "anna" not in told and "base_model" not in told
