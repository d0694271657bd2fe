"""What stays whole that a user would expect to shrink, and why.

Not counted are what a model gives out, such as the classes of a classifier; the residual stream, unless it was asked
for; what is left alone as asked; and what the example does not reach, or training alone does.
"""

import numpy as np
from torch import fx

from hap.graph.index import GraphIndex
from hap.graph.nodes import is_pointwise, schema_name, short_name
from hap.groups.components import occurring
from hap.groups.types import Frozen, Ints
from hap.groups.unprunable_summary import layer_of
from hap.tracing.context import NormFindings
from hap.tracing.labels import LabelStore, concatenated, long_axes
from hap.tracing.rules.registry import NO_RULE, RULES
from hap.tracing.rules.structural import structural
from hap.tracing.training_branches import ALONE

OUTPUT = "an output of the model"
STREAM = "the residual stream; ask for it with stream=True"
ASKED = "left alone as asked"
EXPECTED = frozenset((OUTPUT, STREAM, ASKED, ALONE))
"""Why something stays that nobody expects to go."""
NEVER_CUT = "meets something that is never cut"
NOT_KNOWN = "uses a weight in a way that is not understood"


def find_untouched(
    index: GraphIndex, store: LabelStore, norms: NormFindings | None, axes: dict[tuple[str, int], Ints]
) -> dict[str, Frozen]:
    """The parameters that no class of `axes` cuts though one could expect it, each with a reason.

    All that is frozen is one class. So labels are joined here once more without that class. `norms` tell what the
    residual stream is; None if it was asked for.
    """
    root = store.bonded()
    reason = np.full(len(root), len(store.causes))
    for number, (labels, _) in enumerate(store.causes):
        reason[root[labels]] = np.minimum(reason[root[labels]], number)
    expected = occurring(len(root), (root[labels] for labels, cause in store.causes if cause.why in EXPECTED))
    expected[0] = True
    if norms is not None:
        expected[norms.stream(root)] = True
    cut = {name for (name, _), classes in axes.items() if classes.any()}
    readers: dict[str, list[fx.Node]] = {}
    for node, name in index.parameters.items():
        readers.setdefault(name, []).extend(node.users)
    found = {}
    for name in sorted(n for n in index.trainable - cut if readers.get(n)):
        dims = long_axes(index.shapes[name])
        seen = [(name, d) for d in dims if (name, d) in store.axes and store.axes[name, d].any()]
        stays = {key: x[~expected[x]] for key in seen if not expected[x := root[store.axes[key]]].all()}
        first = reason[concatenated([*stays.values()])].min(initial=len(store.causes))
        if first < len(store.causes):
            found[name] = store.causes[first][1]
        elif any(store.roles[key] == "out" for key in stays):
            found[name] = Frozen(layer_of(name), NEVER_CUT)
        elif dims and not seen and all(store.roles.get((name, d), "free") == "free" for d in dims):
            found[name] = _unknown_use(readers[name])
    return found


def _unknown_use(readers: list[fx.Node]) -> Frozen:
    """The first operator that computes with a weight, which may be moved before, and has no rule; or else the first."""
    computing = []
    for node in readers:
        while RULES.get(schema_name(node)) is structural and node.users:
            node = next(iter(node.users))
        computing.append(node)
    unknown = [n for n in computing if schema_name(n) not in RULES and not is_pointwise(n)]
    return Frozen(short_name((unknown or computing)[0]), NO_RULE if unknown else NOT_KNOWN)
