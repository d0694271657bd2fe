"""What all tests and examples in docstrings share: one thread and fixed seeds, so the same numbers on every run."""

import gc
import sys
from functools import cache
from typing import Any, Callable  # noqa: UP035 (see pytest_collectstart)

import pytest

gc.disable()  # until the tests begin: what is imported stays


def pytest_collectstart() -> None:
    """torch is imported here and below alone: the process that hands tests out runs none, and does without."""
    import torch

    torch.set_num_threads(1)
    torch._ops.Callable = Callable  # for annotations, read 5,000 times in an export to ONNX: this one remembers them
    if not _cuda():
        torch.manual_seed = _seed


ON_THE_WHOLE_TABLE = (
    *("tests/execution/test_masked_execution.py", "tests/implants/", "tests/io/test_checkpoint.py", "tests/planning/"),
    *("tests/pruning/test_apply.py", "tests/refit/", "tests/tracing/test_trace.py"),
)
"""Tests that trace all networks of tests/cases.py."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with much work come first, so that the processes end at about the same time."""
    folders = ("reproduction/", "tests/", "src/")

    def place(item: pytest.Item) -> int:
        on_table = item.nodeid.startswith(ON_THE_WHOLE_TABLE)
        return -1 if on_table else next((i for i, x in enumerate(folders) if item.nodeid.startswith(x)), 3)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs all tests of a file, and one all tests on the whole table: what they share, they share there."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "table" if nodeid.startswith(ON_THE_WHOLE_TABLE) else nodeid.partition("::")[0]

    return ByFile(config, log)


@cache
def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="module")
def _nothing_old_to_collect() -> None:
    """The garbage collector does not look again at what torch and other libraries have made by now: millions of objects
    that stay, which took a fifth of the time of all tests. What it has kept twice already stays as well."""
    gc.collect(1)
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def _seed(seed: int) -> Any:
    """As torch.manual_seed, which without a GPU notes down the whole stack, for the day on which there is one."""
    import torch

    return torch.default_generator.manual_seed(int(seed))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)


def pytest_runtest_setup() -> None:
    """What torch reads anew for each export to ONNX, more than half of the time of a small one: its table of
    translations, here once, and the list of all operators in C++, here once in each test."""
    module = sys.modules.get("torch.onnx._internal.exporter._registration")
    registry = getattr(module, "ONNXRegistry", None)
    if hasattr(registry, "from_torchlib") and not hasattr(registry.from_torchlib, "cache_info"):
        registry.from_torchlib = staticmethod(cache(registry.from_torchlib))
    module = sys.modules.get("torch._export.utils")
    if hasattr(module, "_materialize_cpp_cia_ops"):
        if not hasattr(module._materialize_cpp_cia_ops, "cache_clear"):
            module._materialize_cpp_cia_ops = cache(module._materialize_cpp_cia_ops)
        module._materialize_cpp_cia_ops.cache_clear()


@pytest.fixture(autouse=True, scope="session")
def _names_in_examples(doctest_namespace: dict[str, Any]) -> None:
    """An example in a docstring of hap starts from these names, as the docs do."""
    import torch
    from torch import nn

    import hap

    doctest_namespace.update(hap=hap, torch=torch, nn=nn)
