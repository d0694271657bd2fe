"""What leaves the process, and comes back: checkpoints and exported programs.

`checkpoint.py` writes and reads one safetensors file with tensors, plans, recipe and metrics; nothing in it can name
code to run. `export.py` writes ONNX or torch.export programs, in which `fold_batchnorm.py` has folded BatchNorms.
Files are written whole or not at all (`hap.utils.atomic_files`).

Import `save`, `load`, `read` and `export` from their modules, or from `hap`. Start reading at `checkpoint.py`.
"""
