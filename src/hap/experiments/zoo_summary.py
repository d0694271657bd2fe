"""What a sweep comes to: how many of each family, whose seconds, how many go on to ONNX and torch.export."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from hap.experiments.zoo_models import DETECTORS, SEGMENTERS

Record = dict[str, Any]
PEER = "torch_pruning"
EXPORT = "exported"
ENDINGS = (".pt2", ".onnx")
EQUAL = 1e-3
"""Outputs that differ by less, relative to the largest, are equal: float32 in another order of summation."""
MANY_EXPORTS, LONG = 3, 60
KINDS = ("torchvision classifiers", "torchvision detectors and segmenters", "timm", "Hugging Face", "hap")


def kind(spec: str) -> str:
    family, _, name = spec.partition(":")
    if family == "tv":
        return KINDS[1 if name.startswith(DETECTORS + SEGMENTERS) else 0]
    return {"timm": "timm", "hf": "Hugging Face"}.get(family, "hap")


def own_seconds(record: Record, limit: float) -> float:
    """Of pruning, without what torch.export takes alone; a process that died counts as one at the limit."""
    seconds = record.get("seconds")
    return limit if seconds is None else sum(s for name, s in seconds.items() if name != "export")


def peer_seconds(record: Record, limit: float) -> float:
    return record[PEER].get("seconds", limit)


def equal(record: Record, endings: Sequence[str] = ENDINGS) -> bool:
    """Whether the pruned model does the same after export."""
    gaps = (record.get(EXPORT) or {}).get
    return all(isinstance(gap := gaps(ending), float) and gap <= EQUAL for ending in endings)


def times_export(record: Record) -> float | None:
    """Pruning against torch.export alone; none where torch.export did not come to an end."""
    alone = (record.get("seconds") or {}).get("export")
    return own_seconds(record, 0.0) / alone if alone and record["verified"] else None


def summary(records: Sequence[Record], limit: float) -> Record:
    """All of it from the records alone. Models that the installed libraries do not have are listed, and not counted."""
    missing, records = [r["model"] for r in records if r.get("missing")], [r for r in records if not r.get("missing")]
    both = [r for r in records if PEER in r]
    won = [r for r in both if r["verified"] and r[PEER]["verified"]]
    ratios = {r["model"]: ratio for r in records if (ratio := times_export(r)) is not None}
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
        "times_export": {
            "median": median(ratios.values()) if ratios else None,
            f"above_{MANY_EXPORTS}": {m: ratio for m, ratio in ratios.items() if ratio > MANY_EXPORTS},
        },
        "missing": missing,
        f"above_{LONG}_seconds": {m: s for m, s in own.items() if s > LONG},
    }


def _family(records: Sequence[Record]) -> Record:
    beside = [r for r in records if PEER in r]
    pruned = [r for r in beside if r[PEER]["verified"]]
    reached = sum(r[PEER]["macs"][1] <= r["flops"] * r[PEER]["macs"][0] for r in pruned)
    return {
        "models": len(records), "verified": sum(r["verified"] for r in records),
        "torch_pruning": {"models": len(beside), "verified": len(pruned), "reached": reached},
        "exported": {"models": sum(EXPORT in r for r in records), "equal": sum(equal(r) for r in records)}
        | {ending: sum(equal(r, [ending]) for r in records) for ending in ENDINGS},
    }  # fmt: skip


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
    seconds, ratios, long = found["seconds"], found["times_export"], found[f"above_{LONG}_seconds"]
    said = [f"{seconds['all']['hap']:,.0f} s of pruning for {seconds['all']['models']} models; "
            f"torch.export alone takes {seconds['torch_export_alone']:,.0f} s."]  # fmt: skip
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
    many = sorted(ratios[f"above_{MANY_EXPORTS}"].items(), key=lambda item: -item[1])
    if ratios["median"] is not None:
        more = f": {_names([f'{m} ({ratio:.1f})' for m, ratio in many])}" if many else ""
        said.append(
            f"Pruning takes {ratios['median']:.1f} times what torch.export takes alone in the median, "
            f"and more than {MANY_EXPORTS} times on {len(many)}{more}."
        )
    slow = [f"{m} ({s:.0f} s)" for m, s in sorted(long.items(), key=lambda item: -item[1])]
    said.append(f"Longer than {LONG} s: {_names(slow)}." if slow else f"None took longer than {LONG} s.")
    if found["missing"]:
        said.append(f"Not counted, since the installed libraries do not have them: {_names(found['missing'])}.")
    return said


def failures(records: Sequence[Record]) -> list[str]:
    """Why a model was not pruned, and which were pruned but are not the same after export."""
    said = [f"`{r['model']}` was not pruned: {r['why']}" for r in records if not (r["verified"] or r.get("missing"))]
    for record in records:
        for ending in ENDINGS:
            gap = (record.get(EXPORT) or {}).get(ending)
            if isinstance(gap, str):
                too = isinstance((record.get("exported_dense") or {}).get(ending), str)
                said.append(f"`{record['model']}` to {ending}{', pruned or dense' * too}: {gap}")
            elif gap is not None and gap > EQUAL:
                said.append(f"`{record['model']}` to {ending}: outputs differ by {gap:.1e}")
    return said


def _names(names: Sequence[str], most: int = 12) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
