"""Why groups do not fit, in words that `print(groups)` shows."""

from __future__ import annotations

from collections.abc import Sequence

from hap.execution.calling import draws_random_numbers
from hap.execution.compare_outputs import difference, output_tensors
from hap.trials.removal_rounds import kind_of
from hap.trials.run_round import RoundEnd, RoundRunner
from hap.verification.comparison import COUNTED, UNLIKE


def reasons(runner: RoundRunner, misfits: Sequence[str]) -> dict[str, str]:
    """Why these groups do not fit: what was seen where one of them, or one of its kind, lost units by itself."""
    seen: dict[str, tuple[str, str]] = {}
    for (_, cut), ends in runner.ends.items():
        alone = cut.intersection(misfits)
        if len(alone) == 1:
            seen |= {name: end.why for end in sorted(ends, key=_how_telling) for name in alone if end.why is not None}
    of_kind = {kind_of(n): n for n in reversed(misfits) if n in seen}
    unlike = _about_differences(runner) if any(why == UNLIKE for why, _ in seen.values()) else ""
    found = {}
    for name in misfits:
        one = name if name in seen else of_kind.get(kind_of(name))
        if one is None:
            found[name] = COUNTED
            continue
        why, what = seen[one]
        like = "" if one == name else f", like {one}"
        found[name] = f"{why}{like}: {what}" + (f"; {unlike}" if why == UNLIKE else "")
    return found


def _how_telling(end: RoundEnd) -> tuple[bool, int]:
    """What is raised tells more than values; the more attributes follow, the further a forward gets."""
    return end.why is not None and end.why[0] == COUNTED, len(end.followers)


def _about_differences(runner: RoundRunner) -> str:
    """Where other values may come from: two runs of the model may differ by themselves."""
    try:
        if draws_random_numbers(runner.model, runner.example):
            return "its forward draws at random"
        first, second = (output_tensors(runner.model, runner.example) for _ in range(2))
        if difference(first, second) is not None:
            return "two runs of the model itself differ too"
    except Exception:  # it ran before, but whoever does not return the same twice may also fail
        return "the model itself does not always run"
    return "it counts on its size, or a rule is wrong"
