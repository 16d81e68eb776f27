"""Random calls against one device's: any method, mask, packing, dtype and option; some of their bits against those of one rank.

CI draws a few. `python -m tests.distributed.drawn WORLD COUNT [SEED] [--device cuda]` draws as many as asked in processes of
its own, on a GPU each longer ones for the kernels there, and prints each with the seed that repeats it as it ends.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import traceback
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.cases import BY_HEADS, columns, lengths_of, starts_of
from tests.distributed.harness import Sharded
from tests.distributed.registry import case
from tests.masks import samples
from warploom import masks
from warploom.distributed import by_heads, collectives, documents, groups
from warploom.distributed.choice import METHODS
from warploom.distributed.plan import planned

LEAST = 40  # tokens: of the few roundings of fewer in half precision the norm says little


def draw(seed: int, world: int, device: str = "cpu") -> Sharded:
    """A problem; the same of every rank that gives the same seed.

    On a GPU the kernels are those of modules, which can be built before: what goes to Triton compiles for seconds as it runs,
    in each process. So there are no builders' samples, which are short and then in fp32, no dropout, and no scale below 0.
    """
    rng = random.Random(seed)
    least, longest = (1, 150) if device == "cpu" else (LEAST, 1500)
    method = rng.choice([*METHODS, "auto"])
    heads_kv = world * rng.randint(1, 2) if method in BY_HEADS or rng.random() < 0.2 else rng.choice([1, 2, 3, 4, 5])
    call: dict[str, Any] = {"heads_kv": heads_kv, "heads_q": heads_kv * rng.choice([1, 1, 2, 3, 7])}
    call["batch"] = rng.choice([1, 1, 2, 3])
    keywords: dict[str, Any] = {}
    if rng.random() < 0.35 and device == "cpu":
        call |= _sampled(rng, method, keywords, call)
    elif rng.random() < 0.3:
        total = rng.randint(least, longest)
        call |= {"batch": 1, "seqlen_q": total, "cu_seqlens": starts_of(rng, total)}
        _band(rng, keywords)
        if rng.random() < 0.4:
            keywords["mask"] = columns(rng, 25, total, (1, 1), rng.choice(["lts", "ute", "lts ute", "lts lte uts ute"]))
    else:
        call |= {"seqlen_q": rng.randint(least, longest)}
        call |= {} if rng.random() < 0.7 else {"seqlen_k": rng.randint(least, longest)}
        _band(rng, keywords)
        if rng.random() < 0.6:
            keywords["mask"] = _mask(rng, call)
    if rng.random() < 0.3:
        keywords["softcap"] = rng.choice([0.7, 5.0])
    if rng.random() < 0.2:
        keywords["scale"] = rng.choice([-0.4 if device == "cpu" else 0.4, 1.0])
    if rng.random() < 0.2 and method != "ring" and "cu_seqlens" not in call and device == "cpu":
        keywords |= {"dropout_p": 0.3, "dropout_seed": seed}
    if rng.random() < 0.35:
        keywords["batch_invariant"] = True
    if rng.random() < 0.2:
        call["plan_mask"] = rng.choice([{}, {"causal": True}, {"window": (5, 0)}])
    short = min(call["seqlen_q"], call.get("seqlen_k", LEAST)) < LEAST
    if device == "cpu":
        dtypes, head_dims = [torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16], [8, 16]
        dtypes = dtypes[:3] if short else dtypes
    else:
        # Few modules: kernels have tests of their own, and which one runs changes nothing of what ranks send each other.
        dtypes, head_dims = [torch.bfloat16], [64]
    return Sharded(
        seed,
        head_dim=rng.choice(head_dims),
        head_dim_v=rng.choice(head_dims),
        dtype=rng.choice(dtypes),
        method=method,
        keywords=keywords,
        sink=rng.random() < 0.3,
        chunk=rng.choice([512, 512, rng.randint(1, 40)]),
        device=device,
        **call,
    )


def _sampled(rng: random.Random, method: str, keywords: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    """A builder's mask with the lengths, batch and heads that it drew, by its predicate."""
    make = rng.choice(list(samples.SAMPLERS.values()))
    sample = make(rng)
    while not (sample.seqlen_q and sample.seqlen_k) or (method in BY_HEADS and sample.heads > 1):
        sample = make(rng)
    keywords["mask"] = sample.mask
    found: dict[str, Any] = {"seqlen_q": sample.seqlen_q, "seqlen_k": sample.seqlen_k, "seen": sample.dense()}
    found["batch"] = max(sample.batch, call["batch"] if sample.batch == 1 else 1)
    return found if sample.heads == 1 else found | {"heads_kv": sample.heads, "heads_q": 2 * sample.heads}


def _band(rng: random.Random, keywords: dict[str, Any]) -> None:
    if rng.random() < 0.5:
        keywords["causal"] = True
    if rng.random() < 0.4:
        keywords["window"] = rng.choice([None, 0, 3, 20]), rng.choice([None, 0, 4, -2])


def _mask(rng: random.Random, call: dict[str, Any]) -> masks.Mask:
    rows = call["seqlen_q"]
    keys = call.get("seqlen_k", rows)
    if rows == keys and rng.random() < 0.4:
        return masks.Document(lengths_of(rng, rows), causal=rng.random() < 0.5)
    shape = rng.choice([1, call["batch"]]), rng.choice([1, call["heads_kv"], call["heads_q"]])
    return columns(rng, rows, keys, shape, rng.choice(["lts", "ute", "lts lte", "lts ute", "uts ute", "lts lte uts ute"]))


def played(ranks: int, count: int, seed: int) -> None:
    """Drawn calls of each rank on a GPU that is pretended, where nothing is sent: what they load is what counts."""
    nothing: Any = lambda *_, **__: None  # noqa: E731
    sends = (dist, "all_to_all_single"), (collectives, "all_gather"), (collectives, "reduce_scatter"), (groups, "compared")
    with ExitStack() as stack:
        for where, name in sends:
            stack.enter_context(patch.object(where, name, nothing))
        stack.enter_context(patch.object(by_heads, "Swap"))
        stack.enter_context(patch.object(documents, "Aside", lambda device: nullcontext()))
        for number, rank in product(range(seed, seed + count), range(ranks)):
            problem = replace(draw(number, ranks, "cuda"), device="cpu")
            problem.call(planned(ranks=ranks, rank=rank, group="a group", **problem.planning()))


@case("drawn calls")
def drawn(rank: int, world: int, seed: int) -> None:
    for number in range(8):
        draw(seed * 8 + number, world).check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("world", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=random.randrange(2**31))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    world, seed = args.world, args.seed
    print(f"{args.count} calls in {world} processes from seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            children.append(os.fork())
            if children[-1] == 0:
                failed = True
                try:
                    torch.set_num_threads(1)
                    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world}
                    if args.device == "cuda":
                        torch.cuda.set_device(rank)
                    dist.init_process_group("gloo" if args.device == "cpu" else "nccl", **where)
                    failed = _run(rank, world, args.count, seed, args.device)
                except BaseException:
                    traceback.print_exc()
                os._exit(failed)
        sys.exit(max([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))


def _run(rank: int, world: int, count: int, seed: int, device: str) -> bool:
    failures = 0
    for number in range(seed, seed + count):
        words = None
        try:
            draw(number, world, device).check()
        except AssertionError:
            words = traceback.format_exc(limit=-2)
        told: list[Any] = [None] * world
        dist.all_gather_object(told, words)  # the criterion may fail on one rank alone
        first = next((each for each in told if each is not None), None)
        failures += first is not None
        if rank == 0:
            print(f"seed {number}: {first or 'agrees'}", flush=True)
    if rank == 0:
        print(f"{count - failures} of {count} agree", flush=True)
    return bool(failures)


if __name__ == "__main__":
    main()
