"""What a model hears in the clips of a manifest, beside their transcripts: for the check that compares them."""

from __future__ import annotations

from whisper_tuner.data.checks.material import Heard
from whisper_tuner.eval.evaluation import Evaluation

UNKNOWN = -10.0  # log-probability of a text of which it is not known: it counts for next to nothing


def heard_in(part: str, found: Evaluation) -> dict[tuple[str, int], Heard]:
    """Sort texts by part and line. Clips without a transcript are left out: silence contradicts nothing."""
    return {
        (part, row.sample.line): Heard(
            row.hypothesis, row.rates.cer, UNKNOWN if row.logprob is None else round(row.logprob, 3)
        )
        for row in found.rows
        if row.normalized[0].strip()
    }
