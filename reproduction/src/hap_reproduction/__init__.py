"""The experiments behind HAP's claims. They use the library and add the commands reproduce, glue and zoo to `hap`.

`cifar10` has the paper's CIFAR-10 experiments, `glue` those on attention heads, `zoo_sweep` the sweep over other
libraries' models, `pages` the pages of results, `cli` the commands, and `files.py` what several of them do with files.
The library never imports this package.
Start with `cifar10/jobs.py`: all runs of the campaign, the most telling first.
"""
