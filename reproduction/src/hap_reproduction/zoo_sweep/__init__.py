"""A sweep over models of torchvision, timm and Hugging Face: pruned, checked and exported, beside Torch-Pruning.

`sweep` starts a process for each model (`worker`), `ours` measures HAP there and `peer` Torch-Pruning, `models` builds
models by name, `summary` adds up and `page` writes the page. Start with `sweep`.
"""
