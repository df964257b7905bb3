"""Strategies: when ranks talk, and what they make of what they hear."""

from exogym.config import OptimSpec
from exogym.strategy.all_reduce import AllReduceStrategy, SimpleReduceStrategy
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, CommunicationModule
from exogym.strategy.demo import DeMoStrategy
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.federated_averaging import FedAvgStrategy
from exogym.strategy.parameter_server import ParameterServerStrategy
from exogym.strategy.sparta import SPARTAStrategy
from exogym.strategy.sparta_diloco import SPARTADiLoCoStrategy
from exogym.strategy.strategy import StepResult, Strategy

__all__ = [
    "AllReduceStrategy",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "DeMoStrategy",
    "DiLoCoStrategy",
    "FedAvgStrategy",
    "OptimSpec",
    "ParameterServerStrategy",
    "SPARTADiLoCoStrategy",
    "SPARTAStrategy",
    "SimpleReduceStrategy",
    "StepResult",
    "Strategy",
]
