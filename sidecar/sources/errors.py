"""What the sources raise."""


class SourceError(Exception):
    """A source could not be read."""


class MalformedError(SourceError):
    """A kernel file does not have the form that its documentation gives."""


class ExhaustedError(Exception):
    """The agent or the machine has no descriptor left: what was to be read is unknown, not gone.

    No SourceError, so that whoever leaves out a single file that fails does not leave out this:
    the round as a whole has failed.
    """
