"""What knows neither graphs nor pruning, and may be imported from everywhere.

`atomic_files.py`: files that are whole or not there. `distributed.py`: sums over processes, and what only the first
does. `module_tree.py`: the tensors of a model, and whether modules are equal. `gc_pause.py`: work without the garbage
collector. `plain_mapping.py`: mappings as dicts. Each stands by itself; start with the one that you need.
"""
