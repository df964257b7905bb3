"""What the lab raises."""


class LabError(RuntimeError):
    """A lab that cannot be built, found, or used; the message says what to do."""
