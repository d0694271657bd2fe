"""The one exception type that users need to catch, and the one that `prune_` answers by itself."""


class HapError(ValueError):
    """Something the caller can mend. The message names the value seen, what was expected and what to do."""


class CaptureError(HapError):
    """torch.export cannot capture the model as a whole; perhaps it can capture parts of it, see `hap.parts`."""
