"""What a sweep comes to: how many of each family, whose seconds, how many go on to ONNX and torch.export."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hap_reproduction.zoo_sweep.models import DETECTORS, SEGMENTERS

Record = dict[str, Any]
PEER = "torch_pruning"
EXPORT = "exported"
ENDINGS = (".pt2", ".onnx")
EQUAL = 1e-3
"""Outputs that differ by less, relative to the largest, are equal: float32 in another order of summation."""
MANY_EXPORTS, LONG = 3, 60
BRIEF, TRIALS = 5, 3
"""Models that are pruned in fewer seconds are pruned so many times: in so short a time, whatever else runs tells."""
KINDS = ("torchvision classifiers", "torchvision detectors and segmenters", "timm", "Hugging Face", "hap")


def kind(spec: str) -> str:
    family, _, name = spec.partition(":")
    if family == "tv":
        return KINDS[1 if name.startswith(DETECTORS + SEGMENTERS) else 0]
    return {"timm": "timm", "hf": "Hugging Face"}.get(family, "hap")


ALONE = ("forward", "export")
"""Seconds to compare with, no part of pruning."""
SURGERY = ("parts", "trace", "plan", "apply")
"""What is held against torch.export: all but the scores, which have as many ways as there are criteria."""


def own_seconds(record: Record, limit: float) -> float:
    """Of pruning, without what only stands beside it; a process that died counts as one at the limit."""
    seconds = record.get("seconds")
    return limit if seconds is None else sum(s for name, s in seconds.items() if name not in (*ALONE, "check"))


def surgery_seconds(record: Record, check: bool = True) -> float:
    """Of trace, plan and apply, with the executed check or without."""
    seconds = record["seconds"]
    return sum(seconds.get(name, 0.0) for name in SURGERY) - (0.0 if check else seconds["check"])


def peer_seconds(record: Record, limit: float) -> float:
    return record[PEER].get("seconds", limit)


def equal(record: Record, endings: Sequence[str] = ENDINGS) -> bool:
    """Whether the pruned model does the same after export."""
    gaps = (record.get(EXPORT) or {}).get
    return all(isinstance(gap := gaps(ending), float) and gap <= EQUAL for ending in endings)


def _against_export(records: Sequence[Record]) -> Record:
    """Trace, plan and apply against torch.export alone, where that came to an end; also without the executed check.

    Older records do not say how long that took, nor what a forward takes.
    """
    known = [r for r in records if r["verified"] and (r.get("seconds") or {}).get("export")]
    times = {r["model"]: times_export(r) for r in known}
    bare = {r["model"]: times_export(r, check=False) for r in known if "check" in r["seconds"]}
    above = [r for r in known if times[r["model"]] > MANY_EXPORTS]
    return _within(times) | {
        "without_check": _within(bare),
        f"above_{MANY_EXPORTS}": {
            r["model"]: {"times": times[r["model"]], "seconds": surgery_seconds(r)}
            | ({"times_without_check": bare[r["model"]]} if r["model"] in bare else {})
            | {name: r["seconds"][name] for name in (*ALONE, "check") if name in r["seconds"]}
            for r in above
        },
    }


def times_export(record: Record, check: bool = True) -> float:
    """Trace, plan and apply, in times of what torch.export takes alone; 0 where that is not known."""
    alone = record["seconds"].get("export")
    return surgery_seconds(record, check) / alone if alone else 0.0


def _within(times: Mapping[str, float]) -> Record:
    return {
        "models": len(times),
        "median": median(times.values()) if times else None,
        f"within_{MANY_EXPORTS}": sum(t <= MANY_EXPORTS for t in times.values()),
    }


def summary(records: Sequence[Record], limit: float) -> Record:
    """All of it from the records alone. Models that the installed libraries do not have are listed, and not counted."""
    missing, records = [r["model"] for r in records if r.get("missing")], [r for r in records if not r.get("missing")]
    both = [r for r in records if PEER in r]
    won = [r for r in both if r["verified"] and r[PEER]["verified"]]
    own = {r["model"]: own_seconds(r, limit) for r in records}
    return {
        "families": {k: _family(of) for k in KINDS if (of := [r for r in records if kind(r["model"]) == k])},
        "all": _family(records),
        "seconds": {
            "all": {"models": len(records), "hap": sum(own.values())},
            "both": _seconds(both, limit),
            "both_verified": _seconds(won, limit),
            "torch_export_alone": sum((r.get("seconds") or {}).get("export", 0.0) for r in records),
        },
        "torch_pruning_timed_out": [r["model"] for r in both if "seconds" not in r[PEER] or r[PEER].get("timed_out")],
        "times_export": _against_export(records),
        "missing": missing,
        f"above_{LONG}_seconds": {m: s for m, s in own.items() if s > LONG},
    }


def _family(records: Sequence[Record]) -> Record:
    beside = [r for r in records if PEER in r]
    pruned = [r for r in beside if r[PEER]["verified"]]
    reached = sum(r[PEER]["macs"][1] <= r["flops"] * r[PEER]["macs"][0] for r in pruned)
    return {
        "models": len(records),
        "verified": sum(r["verified"] for r in records),
        "torch_pruning": {"models": len(beside), "verified": len(pruned), "reached": reached},
        "exported": {"models": sum(EXPORT in r for r in records), "equal": sum(equal(r) for r in records)}
        | {ending: sum(equal(r, [ending]) for r in records) for ending in ENDINGS},
    }


def _seconds(records: Sequence[Record], limit: float) -> Record:
    own, theirs = [own_seconds(r, limit) for r in records], [peer_seconds(r, limit) for r in records]
    return {"models": len(records), "hap": sum(own), PEER: sum(theirs)} | (
        {"medians": {"hap": median(own), PEER: median(theirs)}} if records else {}
    )


# ---- in words -----------------------------------------------------------------------------------------------

FAMILY_HEADS = ["family", "pruned and verified", "torch-pruning", "equal in torch.export", "equal in ONNX"]


def family_rows(found: Record) -> list[list[str]]:
    """A row for each family, and one for all."""
    return [_family_row(name, of) for name, of in (found["families"] | {"all": found["all"]}).items()]


def _family_row(name: str, of: Record) -> list[str]:
    exports = of[EXPORT]
    peer = _of(of[PEER]["verified"], of[PEER]["models"])
    return [name, _of(of["verified"], of["models"]), peer, *(_of(exports[e], exports["models"]) for e in ENDINGS)]


def _of(some: int, total: int) -> str:
    return f"{some} of {total}" if total else "not run"


def sentences(found: Record) -> list[str]:
    """Seconds, in words."""
    seconds, long = found["seconds"], found[f"above_{LONG}_seconds"]
    said = [
        f"{seconds['all']['hap']:,.0f} s of pruning for {seconds['all']['models']} models; "
        f"torch.export alone takes {seconds['torch_export_alone']:,.0f} s."
    ]
    for key, which in (("both", "that both were given"), ("both_verified", "that both pruned")):
        if (of := seconds[key])["models"]:
            said.append(
                f"On the {of['models']} models {which}: {of['hap']:,.0f} s, torch-pruning {of[PEER]:,.0f} s "
                f"(medians {of['medians']['hap']:.1f} s and {of['medians'][PEER]:.1f} s)."
            )
    if found["all"][PEER]["models"]:
        reached, pruned = (found["all"][PEER][key] for key in ("reached", "verified"))
        said.append(f"Of the {pruned} models that torch-pruning pruned, {reached} came down to the FLOPs asked for.")
    if late := found["torch_pruning_timed_out"]:
        said.append(f"torch-pruning came to no end on {len(late)}, counted at the limit of time: {_names(late)}.")
    said += _times_export(found["times_export"])
    slow = [f"{m} ({s:.0f} s)" for m, s in sorted(long.items(), key=lambda item: -item[1])]
    said.append(f"Longer than {LONG} s: {_names(slow)}." if slow else f"None took longer than {LONG} s.")
    if found["missing"]:
        said.append(f"Not counted, since the installed libraries do not have them: {_names(found['missing'])}.")
    return said


def _times_export(found: Record) -> list[str]:
    """How many models are within a few times torch.export alone."""
    if found["median"] is None:
        return []
    within, bare = f"within_{MANY_EXPORTS}", found["without_check"]
    said = [
        f"Trace with the search for parts, plan and apply, the executed check included and scores not, take "
        f"{found['median']:.1f} times what torch.export takes alone in the median, and at most {MANY_EXPORTS} times "
        f"that on {_of(found[within], found['models'])}."
    ]
    if bare["models"]:
        above = [of | {"model": m} for m, of in found[f"above_{MANY_EXPORTS}"].items() if _above_bare(of)]
        names = [f"{of['model']} ({of['times_without_check']:.1f} times; {_forward(of)})" for of in above]
        said.append(
            f"Without the check, which runs the dense and the pruned model, it is {bare['median']:.1f} times in the "
            f"median, and at most {MANY_EXPORTS} times on {_of(bare[within], bare['models'])}"
            + (f"; above are {_names(names)}." if names else ".")
        )
    return said


def _above_bare(of: Record) -> bool:
    return of.get("times_without_check", 0.0) > MANY_EXPORTS


def _forward(of: Record) -> str:
    if "forward" not in of:
        return "a forward was not timed"
    return f"one forward takes {of['forward']:.1f} s, torch.export {of['export']:.1f} s"


ABOVE_HEADS = [
    f"above {MANY_EXPORTS} times torch.export",
    "times without the check",
    "times with it",
    "seconds with it",
    "check",
    "torch.export",
    "forward",
]


def above_rows(found: Record) -> list[list[str]]:
    """The models above that, most times first, with the seconds that nobody can do without beside."""
    above = sorted(found["times_export"][f"above_{MANY_EXPORTS}"].items(), key=lambda item: -item[1]["times"])
    names = ("times_without_check", "times", "seconds", "check", "export", "forward")
    return [[model, *(f"{of[name]:.1f}" if name in of else "not timed" for name in names)] for model, of in above]


def failures(records: Sequence[Record]) -> list[str]:
    """Why a model was not pruned, and which were pruned but are not the same after export."""
    said = [f"`{r['model']}` was not pruned: {r['why']}" for r in records if not (r["verified"] or r.get("missing"))]
    for record in records:
        for ending in ENDINGS:
            gap = (record.get(EXPORT) or {}).get(ending)
            if gap is None or equal(record, [ending]):
                continue
            dense = record.get("exported_dense") or {}
            too = ending in dense and not equal({EXPORT: dense}, [ending])
            why = gap if isinstance(gap, str) else f"outputs differ by {gap:.1e}"
            said.append(f"`{record['model']}` to {ending}{', pruned or dense' * too}: {why}")
    return said


def _names(names: Sequence[str], most: int = 12) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
