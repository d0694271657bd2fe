"""The one exception type that users need to catch."""


class HapError(ValueError):
    """Something the caller can mend. The message names the value seen, what was expected and what to do."""
