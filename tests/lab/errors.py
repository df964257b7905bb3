"""What the lab raises."""


class LabError(RuntimeError):
    """A lab that cannot be built, found, or used; the message says what to do."""


class LabLacks(LabError):
    """This machine cannot do what is needed here; a test that meets it is skipped, and this is the reason."""


class LabWarning(UserWarning):
    """A lab that is up, but not in all as it should be."""
