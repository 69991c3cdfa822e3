"""What a run writes of itself: JSON that any reader takes, and the machine it was made on."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from stepcredit.untrusted import visible_json


def machine() -> dict[str, Any]:
    """Where a run was made, for its summary."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text; numbers that JSON cannot hold (NaN, infinities) become null, control characters escapes."""
    return visible_json(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent))


def _finite(value: Any) -> Any:
    """Numbers that JSON cannot hold become null."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
