"""`python -m hap` is `hap`; `torchrun --nproc-per-node N -m hap` runs it in N processes that share the work."""

from hap.cli import main

main()
