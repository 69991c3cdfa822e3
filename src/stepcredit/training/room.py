"""Memory that is free on this machine, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available(device: torch.device) -> int | None:
    """Bytes that may still be taken: of a GPU what is free, of the CPU what is available to this process; None where
    that cannot be found out."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for what comes next
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if device.type != "cpu":
        return None
    known = [size for size in (_of_the_machine(), _of_the_container()) if size is not None]
    return min(known, default=None)


def _of_the_machine() -> int | None:
    """Linux's own estimate of what a new process can have without swapping."""
    for line in _text(MEMINFO).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _of_the_container() -> int | None:
    """What the control group of this process leaves; page cache that can be dropped counts as free."""
    limit, used = _text(CGROUP / "memory.max").strip(), _text(CGROUP / "memory.current").strip()
    if not (limit.isdigit() and used.isdigit()):
        return None
    words = dict(line.split() for line in _text(CGROUP / "memory.stat").splitlines() if len(line.split()) == 2)
    return max(0, int(limit) - int(used) + int(words.get("inactive_file", 0)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
