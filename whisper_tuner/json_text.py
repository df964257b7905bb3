"""JSON that somebody else wrote, or that a disk has damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def parse_json(text: str | bytes, *, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse as json.loads does, but all that can be wrong with the text is a ValueError, in words for a user."""
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # Python's protection from numbers of many thousand digits
        raise ValueError("a number of too many digits") from None
