"""Rewards: ``get("ocr")`` builds one by name, ``score`` calls it and holds it to its contract."""

from stepcredit.rewards.base import Reward, RewardError, RewardInfo, SelfTest, score
from stepcredit.rewards.registry import FunctionReward, factory, get, names, register

__all__ = [
    "FunctionReward",
    "Reward",
    "RewardError",
    "RewardInfo",
    "SelfTest",
    "factory",
    "get",
    "names",
    "register",
    "score",
]
