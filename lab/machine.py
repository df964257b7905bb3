"""What the lab asks this machine for: `wished` goes on where the machine says no, `needed` does not."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from lab.errors import LabError, LabLacks

lacking: dict[str, str] = {}  # what this machine has refused: what that means here, and what the machine said
_told: set[str] = set()


class LabWarning(UserWarning):
    """The lab is up, but is not in everything what it should be like."""


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
    except LabLacks:
        raise
    except (LabError, OSError) as error:
        raise LabLacks(f"this machine lacks {what}: {error}") from error


def require(*wishes: str) -> None:
    """Raise LabLacks if one of `wishes` was refused when the lab was built."""
    for what in wishes:
        if what in lacking:
            raise LabLacks(f"this machine lacks {what}: {lacking[what]}")


def tell() -> None:
    """Warn of what is lacking, all in one line, and of each once in a process."""
    new = [what for what in lacking if what not in _told]
    _told.update(new)
    if new:
        text = "; ".join(f"{what}: {lacking[what]}" for what in new)
        warnings.warn(f"this machine lacks {text}", LabWarning, stacklevel=2)
