"""Several processes, one run: who we are, and the few things that processes tell each other.

Every process holds the model, or its share of it (``sharding.py``), and the whole plan of an iteration, samples and
judges its own cells of the batch (``cells.py``), and makes the same update from the same sums. With one process every
function here is trivial.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from stepcredit.errors import UserError

TIMEOUT = timedelta(minutes=60)
"""How long a process waits for another: a slow reward is no failure, and one that dies is noticed at once."""
GRACE = 5.0
"""Seconds that a process with an error gives the others to end by the same, before the launcher ends them."""
FOREIGN = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")
"""What `accelerate launch` sets for engines that are not supported."""

_store: Any = None


class PeerLostError(RuntimeError):
    """Another process of the run has ended while this one waited for it."""


# ----------------------------------------------------------------------------------------------------------- who we are


def joined() -> bool:
    """Whether this is one of several processes."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if joined() else 0


def world() -> int:
    """Number of processes."""
    return dist.get_world_size() if joined() else 1


def leads() -> bool:
    """Whether this is the process that writes and speaks."""
    return rank() == 0


@contextmanager
def processes() -> Iterator[None]:
    """Join the processes that a launcher has started, if any; process 0 alone speaks, and an error is told once.

    Raises UserError if the environment names several processes that cannot be joined.
    """
    global _store
    _store = _join()
    if _store is None:
        yield
        return
    streams, silence = (sys.stdout, sys.stderr), open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, until the end
    if not leads():
        sys.stdout = sys.stderr = silence
        warnings.simplefilter("ignore")
    try:
        yield
    except Exception as error:
        if isinstance(error, PeerLostError) or _from_backend(error):
            if _first("a process was lost"):
                print(f"process {rank()} ends: {_lost(error)}", file=streams[1])
            raise SystemExit(1) from None
        first = _first(str(error) or type(error).__name__)
        sys.stdout, sys.stderr = streams if first else (silence, silence)
        _meet()
        raise
    dist.destroy_process_group()
    sys.stdout, sys.stderr = streams


def _join() -> Any:
    """The launcher's store, with the process group made; None for one process. Raises UserError."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return None
    remedy = "start processes with `torchrun --nproc_per_node N -m stepcredit train ...`, or unset WORLD_SIZE for one"
    needed = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if not size.isdecimal() or needed:
        wrong = f"{needed[0]} is not set" if needed else "that is no number"
        raise UserError(f"the environment has WORLD_SIZE = {size}, but {wrong}: {remedy}")
    for name in FOREIGN:
        if os.environ.get(name, "").lower() in ("1", "true"):
            raise UserError(f"{name} is set, but DeepSpeed, Megatron and accelerate's FSDP are not supported: {remedy}")
    if not dist.is_available() or not dist.is_gloo_available():
        raise UserError(f"WORLD_SIZE is {size}, but this torch is built without torch.distributed and gloo: {remedy}")
    backend = "gloo"
    if torch.cuda.is_available():
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise UserError(
                f"process {local} of this machine has no GPU of its own, there are {torch.cuda.device_count()}: set "
                f"--nproc_per_node to that, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        store, number, count = next(rendezvous("env://", timeout=TIMEOUT))
        dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=TIMEOUT)
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{size} processes could not join by {backend} ({reason}): {remedy}") from error
    return store


def _first(message: str) -> bool:
    """Whether this process is the first to report this message."""
    try:
        return bool(_store.add(f"stepcredit/{message}", 1) == 1)
    except RuntimeError:  # the store has gone with its host: better told twice than never
        return True


def _meet() -> None:
    """Wait a little for the others to fail as well, so that each ends with its own exit code."""
    with contextlib.suppress(ValueError):  # outside the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, on the way out
    end = time.monotonic() + GRACE
    try:
        failed = _store.add("stepcredit-failed", 1)
        while failed < world() and time.monotonic() < end:
            time.sleep(0.05)
            failed = _store.add("stepcredit-failed", 0)
    except RuntimeError:
        return


# ---------------------------------------------------------------------------------------------- what is told and agreed


@contextmanager
def peers() -> Iterator[None]:
    """Within the block processes tell each other something; one that is gone is a PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: Exception) -> PeerLostError:
    if isinstance(error, PeerLostError):
        return error
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return PeerLostError(f"another process has ended, and its own error tells why ({reason})")


def _from_backend(error: Exception) -> bool:
    """Whether this is nccl's or gloo's complaint, out of a sharded model: gloo's has no type of its own."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "/gloo/" in str(error))


def gather(rows: Tensor) -> Tensor:
    """Rows ``[n, ...]`` of all processes in their order, on the CPU; n may differ. Raises PeerLostError."""
    if not joined():
        return rows
    rows = rows.detach().cpu()
    with peers():
        counts = [torch.zeros(1, dtype=torch.long) for _ in range(world())]
        dist.all_gather(counts, torch.tensor([len(rows)]))
        padded = rows.new_zeros(max(int(n) for n in counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        every = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(every, padded)
    return torch.cat([part[: int(n)] for part, n in zip(every, counts, strict=True)])


def add(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes, in place; every process has the same bits. Raises PeerLostError."""
    if joined():
        with peers():
            dist.all_reduce(tensor)
    return tensor


def largest(value: float) -> float:
    """The largest of the processes' values. Raises PeerLostError."""
    return float(gather(torch.tensor([value], dtype=torch.float64)).max()) if joined() else value


def from_leader(text: str) -> str:
    """The text of process 0. Raises PeerLostError."""
    return _texts(text)[0]


def barrier() -> None:
    """Wait until all processes are here. Raises PeerLostError."""
    gather(torch.zeros(1))


@contextmanager
def leader_first() -> Iterator[None]:
    """Process 0 does this before the others, which then find its files."""
    if not leads():
        barrier()
    try:
        yield
    finally:
        if leads():
            barrier()


@contextmanager
def together(*kinds: type[Exception]) -> Iterator[None]:
    """What is done here succeeds on all processes or on none: UserError (or ``kinds``) of one is raised by all.

    Raises the process's own error if it has one, else a UserError with the first message of the others; PeerLostError.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        if not isinstance(error, (UserError, *kinds)):
            raise
        own = error
    told = [text for text in _texts("" if own is None else str(own)) if text]
    if own is not None:
        raise own
    if told:
        raise UserError(told[0])


def same(value: float, what: str) -> None:
    """Raises UserError unless a number is the same on all processes; ``what`` says what it is the number of."""
    values = gather(torch.tensor([value], dtype=torch.float64))
    if joined() and bool((values != values[0]).any()):
        raise UserError(f"the processes have different {what}: {values.tolist()}; they must see the same files")


def _texts(text: str) -> list[str]:
    """One text of each process, in their order."""
    if not joined():
        return [text]
    raw = text.encode("utf-8", "replace")
    sizes = gather(torch.tensor([len(raw)])).tolist()
    parts = gather(torch.tensor(list(raw), dtype=torch.uint8)).split(sizes)
    return [bytes(part.tolist()).decode("utf-8", "replace") for part in parts]
