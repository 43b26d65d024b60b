"""The command line."""


def main() -> int:
    """Not built yet."""
    return 1
