"""Weight initialisation shared by the zoo."""

from torch import nn


def kaiming_(model: nn.Module, batchnorm_weight: float = 1.0) -> None:
    """He-normal convolutions (fan out), BatchNorm weights at one constant and biases at zero, in place.

    Linear layers keep PyTorch's own initialisation.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, batchnorm_weight)
            nn.init.zeros_(module.bias)
