"""Context parallel: one sequence on many devices, over torch.distributed, under any mask of `warploom.masks`."""

from warploom.distributed.api import attention, explain
from warploom.distributed.choice import Choice
from warploom.distributed.plan import ShardPlan, shard_plan

__all__ = ["Choice", "ShardPlan", "attention", "explain", "shard_plan"]
