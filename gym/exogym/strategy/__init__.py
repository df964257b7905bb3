"""Strategies: when ranks talk, and what they make of what they hear."""

from exogym.strategy.all_reduce import AllReduceStrategy, SimpleReduceStrategy
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.strategy import StepResult, Strategy

__all__ = ["AllReduceStrategy", "DiLoCoStrategy", "SimpleReduceStrategy", "StepResult", "Strategy"]
