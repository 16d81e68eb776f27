"""All cases in processes of one world, over gloo: `python -m tests.distributed.worker WORLD SEED FOLDER`.

The processes fork when torch is imported and nothing has run. Each writes what failed on it to FOLDER/rank.json, by case.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed import cases, drawn, faults, usage  # noqa: F401  (they fill CASES)
from tests.distributed.registry import of_world


def main() -> None:
    world, seed, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                run(rank, world, seed, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


def run(rank: int, world: int, seed: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    failures: dict[str, str | None] = {}
    for number, (name, case) in enumerate(of_world(world).items()):
        torch.manual_seed(seed + number)
        try:
            case(rank, world, seed + number)
            failures[name] = None
        except AssertionError:
            failures[name] = traceback.format_exc()
        except Exception:
            # The others may wait for this one in the middle of a collective: nothing after it means anything.
            failures[name] = traceback.format_exc()
            break
    else:
        (folder / f"{rank}.json").write_text(json.dumps(failures))  # before the last of them dies
        dist.barrier()
        try:
            faults.death(rank, world, seed)
            failures["a rank that dies"] = None
        except Exception:
            failures["a rank that dies"] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(failures))
    os._exit(0)  # destroying a group that has lost a rank waits for it


if __name__ == "__main__":
    main()
