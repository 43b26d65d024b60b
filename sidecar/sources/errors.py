"""What the sources raise."""


class SourceError(Exception):
    """A source could not be read."""


class MalformedError(SourceError):
    """A kernel file does not have the form that its documentation gives."""
