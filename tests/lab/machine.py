"""What the lab asks this machine for: `wished` goes on where the machine says no, `needed` does not."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from lab.errors import LabError, LabLacks, LabWarning

lacking: dict[str, str] = {}  # what this machine has refused: what the lab is like now, and what the machine said


@contextlib.contextmanager
def wished(what: str, without: str) -> Iterator[None]:
    """Go on if the machine refuses what is done here; `without` says what the lab is like then."""
    try:
        yield
    except (LabError, OSError) as error:
        lacking.setdefault(what, f"{without} ({error})")


@contextlib.contextmanager
def needed(what: str) -> Iterator[None]:
    """Raise LabLacks if the machine refuses what is done here."""
    try:
        yield
    except (LabError, OSError) as error:
        raise LabLacks(f"this machine lacks {what}: {error}") from error


def require(*wishes: str) -> None:
    """Raise LabLacks if one of them was refused when the lab was built."""
    if missing := [what for what in wishes if what in lacking]:
        raise LabLacks(f"this machine lacks {', '.join(missing)}")


def tell() -> None:
    """Warn of all that is lacking, in one line."""
    if lacking:
        text = "; ".join(f"{what}: {without}" for what, without in lacking.items())
        warnings.warn(f"this machine lacks {text}", LabWarning, stacklevel=2)
