"""Process groups: the user's, and our own beside it, on which only this package's collectives run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from warploom.runtime import arguments

# A group of ours for each of the user's, by the name that torch gives it; names come again after destroy_process_group().
_own: dict[str, tuple[Any, Any]] = {}
# Those that were made, by their processes, backend and timeout, of the world of `_world`.
_made: dict[tuple[Any, ...], Any] = {}
_world: Any = None


def of(group_or_mesh: Any) -> Any:
    """The process group that the user means.

    Args:
        group_or_mesh: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.

    Raises:
        RuntimeError: torch.distributed is not there or not initialised.
        TypeError, ValueError: something else, a mesh of several dimensions, or a group without this process.
    """
    if not dist.is_available():
        raise RuntimeError("this torch is built without torch.distributed, which warploom.distributed runs on")
    if not dist.is_initialized():
        raise RuntimeError(
            "call torch.distributed.init_process_group() first, or init_device_mesh(); torchrun sets what it reads"
        )
    if group_or_mesh is None:
        return dist.group.WORLD
    if group_or_mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group_or_mesh is a group that this process is no member of")
    if isinstance(group_or_mesh, dist.ProcessGroup):
        if dist.get_rank(group_or_mesh) < 0:
            raise ValueError("group_or_mesh is a group that this process is no member of")
        return group_or_mesh
    if hasattr(group_or_mesh, "get_group") and hasattr(group_or_mesh, "mesh_dim_names"):
        if group_or_mesh.ndim != 1:
            names = group_or_mesh.mesh_dim_names
            raise ValueError(
                f"group_or_mesh is a DeviceMesh of {group_or_mesh.ndim} dimensions{f' {names}' if names else ''}; "
                f"give the one that sequences are sharded over, such as mesh[{names[-1] if names else 'context'!r}]"
            )
        return group_or_mesh.get_group()
    raise TypeError(f"group_or_mesh must be a ProcessGroup, a DeviceMesh or None, got {arguments.describe(group_or_mesh)}")


def own(parent: Any) -> Any:
    """A group of the same processes for our collectives, so that the order of others beside them does not matter.

    A collective of ``parent``, once; groups of the same processes share one. torch names a group that only its members make by
    a number of each: members whose numbers differ would wait for each other under different names. Their collectives run on
    ``parent`` itself.
    """
    global _world
    name = parent.group_name
    kept = _own.get(name)
    if kept is None or kept[0] is not parent:
        needs_numpy()
        if _world is not dist.group.WORLD:
            _made.clear()
            _world = dist.group.WORLD
        options: dict[str, Any] = {"backend": dist.get_backend(parent)}
        with suppress(AttributeError, RuntimeError):  # a backend without a timeout of its own
            device = torch.device("cuda" if "nccl" in options["backend"] else "cpu")
            options["timeout"] = parent._get_backend(device).options._timeout
        ranks = dist.get_process_group_ranks(parent)
        key = (*ranks, *options.values())
        number = sum(made[: len(ranks)] == tuple(ranks) for made in _made)
        names: list[Any] = [None] * len(ranks)  # and whether there is such a group
        dist.all_gather_object(names, (key in _made, _name(ranks, number)), group=parent)
        found = parent
        sorts = ranks == sorted(ranks)  # as torch does with those of a new group
        if len(set(names)) == 1 and names[0][1] is not None and sorts:
            if key not in _made:
                with _apart(number):
                    _made[key] = dist.new_group(ranks, use_local_synchronization=True, **options)
            found = _made[key]
        kept = _own[name] = parent, found
    return kept[1]


def needs_numpy() -> None:
    """ImportError where NumPy is not installed: torch's collectives of Python objects convert tensors by it."""
    if find_spec("numpy") is None:
        raise ImportError("comparing ranks needs NumPy, by which torch.distributed sends Python objects: pip install numpy")


def _name(ranks: list[int], number: int) -> str | None:
    """What torch would call a new group of ours; None where it cannot be asked."""
    named = getattr(dist.distributed_c10d, "_hash_ranks_to_str", None)
    with _apart(number):
        return None if named is None else str(named(ranks))


@contextmanager
def _apart(number: int) -> Iterator[None]:
    """While a group is made that others do not make: torch's count of groups, which names the next one on every rank, stays.

    From torch 2.14 on the count is in the name of such a group and goes up where one is made, so that ranks beside would name
    their next common group otherwise and wait for ever.
    """
    world = dist.distributed_c10d._world
    before = world.group_count
    world.group_count = -1 - number  # in a name that no group of the user's has
    try:
        yield
    finally:
        world.group_count = before


def compared(group: Any, facts: dict[str, Any], error: Exception | None, what: str) -> None:
    """Raise on every rank where one has other facts than the first, or failed before it could tell.

    Args:
        facts: of this rank, by the name of an argument; values compare by their repr.
        error: what this rank failed with; it is raised here.
        what: that was being made, for the message.
    """
    mine = None if error is None else f"{type(error).__name__}: {error}"
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (mine, {name: repr(value) for name, value in facts.items()}), group=group)
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(told):
        if failure is not None:
            raise RuntimeError(f"rank {rank} of the group could not make {what}: {failure}")
    _, first = told[0]
    for name in first:
        for rank, (_, theirs) in enumerate(told):
            if theirs.get(name) != first[name]:
                raise ValueError(
                    f"{name} differs between ranks of the group: rank 0 has {first[name]}, rank {rank} has {theirs.get(name)}; "
                    f"{what} must be the same on all of them"
                )
