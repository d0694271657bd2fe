"""The library's messages in the words of the command line: options instead of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable

ARGUMENTS = (
    "params",
    "flops",
    "channels",
    "activations",
    "per_layer",
    "round_to",
    "leave",
    "probes",
    "coupling",
    "criterion",
    "implant",
    "calibration",
    "latency",
    "threads",
)
FIELDS = ("epochs", "lr", "batch", "distill", "seed")


def option(name: str) -> str:
    """How a command spells an argument."""
    return f"--{name.replace('_', '-')}"


def in_words_of(command: str | None, text: str) -> str:
    """A message for who typed `hap COMMAND`. `run` reads a file, whose keys are the arguments' own names."""
    file = command == "run"
    spelled: Callable[[str], str] = str if file else option
    text = _without_python(text, spelled)
    for name in ARGUMENTS:
        text = re.sub(rf"\b(?:Limits\.){name}\b|(?<![\w.-]){name}=(?![^\s,;:)])", spelled(name), text)
        text = re.sub(rf"(?<![\w.-]){name}=(?=\S)", f"{spelled(name)}{' = ' if file else ' '}", text)
    if not file:
        text = re.sub(rf"recipe field ({'|'.join(FIELDS)}) is\b", lambda m: f"{option(m[1])} is", text)
        text = re.sub(r"(?<![\w-])(criterion|coupling|device) is '", r"--\1 is '", text)
        text = re.sub(r"\bgive as root\b", "give as --data-root", text)
    return text


def _without_python(text: str, spelled: Callable[[str], str]) -> str:
    """Advice that only a program could follow, turned into what can be typed."""
    text = re.sub(r"\bminimum=\d+, (round_to=-?\d+; expected at least 1) for both", r"\1", text)
    text = re.sub(r",? or look at print\(groups\)[^.;]*", f" or {spelled('leave')} fewer layers alone", text)
    text = re.sub(r"; print\(groups\)[^.;]*", "", text)
    text = re.sub(r"trace with ignore=\([^)]*\) or use another criterion", f"use another {spelled('criterion')}", text)
    text = re.sub(r"[Uu]se HessianTrace\(method=\"hutchinson\"\)", f"Give {spelled('probes')}, such as 300", text)
    text = re.sub(r"pass dynamic_batch=False", "give --batch", text)
    text = text.replace(", or a hap criterion", "").replace(", reversed-NAME", " or reversed-NAME")
    text = re.sub(r"\bimplant ratio is\b", f"{spelled('implant')} is", text)
    text = re.sub(r"\bimplant kind is\b", f"{spelled('implant_kind')} is", text)
    return re.sub(r"(?<![\w-])init is '", f"{spelled('implant_init')} is '", text)
