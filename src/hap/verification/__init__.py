"""Verification proves by running it that a pruned model does on an example what its plan says.

The pruned model is compared with the dense one that has zeros in place of what was removed. An example must tell
something for that: inputs and weights that would hide a difference get random values in both models.

May be imported from elsewhere: `verify.verify_plan` (the check of `hap.apply_`), `verify.check_by_running` with
`comparison.Comparison` (a round of a trial), and the functions of `informative_values` and
`indistinguishable_heads`. Start reading at `verify.verify_plan`; `comparison` builds both models.
"""
