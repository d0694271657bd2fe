"""Several processes, each with its share of the samples: sums over all of them, and what only the first one does.

Without torch.distributed, or with one process, these do nothing, so that there is one code path for both.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hap.errors import HapError
from hap.utils.plain_mapping import as_dict


def processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if processes() > 1 else 0


def is_first() -> bool:
    """Whether this process is the one that shows progress and keeps checkpoints."""
    return rank() == 0


_in_session = False


def may_write() -> bool:
    """Whether this process writes files: of those that `session` brings together only the first one does."""
    return is_first() or not _in_session


# ---- sums ---------------------------------------------------------------------------------------------------


def sum_(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over all processes, in place. All processes must call it with the same shapes."""
    if processes() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def total(count: int, device: torch.device) -> int:
    """The sum of a number over all processes."""
    number = torch.tensor(count, device=device)
    sum_([number])
    return int(number)


def least(count: int, device: torch.device) -> int:
    """The smallest of a number over all processes."""
    number = torch.tensor(count, device=device)
    if processes() > 1:
        dist.all_reduce(number, dist.ReduceOp.MIN)
    return int(number)


def mean(value: Tensor) -> Tensor:
    """The mean of a tensor over all processes."""
    value = value.detach().clone()
    sum_([value])
    return value / processes()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor lies in shards over the processes, as FSDP2's parameters do."""
    return hasattr(tensor, "full_tensor")


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor that may lie in shards over the processes."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return found


# ---- shares -------------------------------------------------------------------------------------------------


def shard(batches: Iterable[Any]) -> list[Any]:
    """This process's share of (input, target) batches that every process has: every n-th sample of each."""
    if processes() == 1:
        return list(batches)

    def mine(value: Any) -> Any:
        return value[rank() :: processes()] if isinstance(value, Tensor) and value.ndim else value

    parts = [pytree.tree_map(mine, (as_dict(x), target)) for x, target in batches]
    held = [part for part in parts if all(t.numel() for t in pytree.tree_leaves(part) if isinstance(t, Tensor))]
    if not held:
        raise HapError(f"process {rank()} of {processes()} has no sample; use more samples or fewer processes")
    return held


def from_first(make: Callable[[], str]) -> str:
    """A text that the first process makes and all get, as bytes: nothing is pickled. Its HapError is everyone's."""
    if processes() == 1:
        return make()
    text, device = "", _device()
    if is_first():
        try:
            text = f"+{make()}"
        except HapError as error:
            text = f"-{error}"
    data = torch.tensor([*text.encode()], dtype=torch.uint8, device=device)
    length = torch.tensor(len(data), device=device)
    dist.broadcast(length, 0)
    data = data if is_first() else data.new_empty(int(length))
    dist.broadcast(data, 0)
    text = bytes(data.tolist()).decode()
    if text[0] == "-":
        raise HapError(text[1:])
    return text[1:]


def broadcast_(model: nn.Module) -> None:
    """Give every process the first one's parameters and buffers."""
    if processes() > 1:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)


def agree(value: int, what: str) -> int:
    """Refuse to go on where the processes have different values, such as epochs read from different disks."""
    if processes() > 1:
        seen = torch.zeros(processes(), dtype=torch.int64, device=_device())
        seen[rank()] = value
        sum_([seen])
        if len(set(seen.tolist())) > 1:
            raise HapError(f"{what} differs between the processes: {seen.tolist()}; expected the same everywhere")
    return value


def _device() -> torch.device:
    """Where small messages travel: on the GPU if only NCCL is there."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


# ---- a run under torchrun -----------------------------------------------------------------------------------


@contextmanager
def session() -> Iterator[None]:
    """Inside, the processes that torchrun has started work together; started alone, nothing changes.

    Each process uses the GPU of its local rank. Only the first one prints results; any of them may report an error.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or "MASTER_ADDR" not in os.environ:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    global _in_session
    _in_session = True
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _terminated))
        if not is_first():
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        try:
            yield
        except SystemExit as ended:  # how a command ends, well or not; after a failure the others may not answer
            if not ended.code:
                dist.destroy_process_group()
            elif isinstance(ended.code, int):
                _leave(ended.code)
            raise
        except RuntimeError as error:
            if isinstance(error, HapError) or not _lost(error):
                raise
            sys.stderr.write(
                f"error: process {rank()} of {processes()} has lost another one, which died or cannot be reached; "
                "its own message says why. Nothing was written that is not complete.\n"
            )
            _leave(1)


def _leave(code: int) -> NoReturn:
    """End at once. Threads that still wait for others would abort the process while Python takes itself apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _terminated(*_: Any) -> None:
    """torchrun ends the others once a process has died: leave as after an error, so that temporary files go."""
    raise SystemExit(128 + signal.SIGTERM)


def _lost(error: RuntimeError) -> bool:
    """Whether a collective failed because another process has gone."""
    words = ("connection closed", "connection reset", "broken pipe", "gloo", "nccl", "timed out")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)
