"""From scores and a budget to a plan, and what a plan costs. Nothing here changes a model.

Start reading at `choose_units.py`: `plan` finds the fewest units to remove by bisection on the exact cost of a choice,
which `cost.py` predicts (and counts on a running model, with `mac_counter.py`). `budget.py` has what may be left and
how far a plan may go. `assemble.py` turns the choice into the steps of a plan. `plan.py` holds them, each with its
check against a model, and goes to JSON and back. `draft` makes a plan by hand. `order.py` keeps scores
for budgets to come.

Import from the modules.
"""
