"""The distributed suite, under torchrun: context parallel calls on all ranks, beside one device's kernel on its share."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import warploom
from warploom import distributed as sharded
from warploom.bench import peers
from warploom.bench.calls import Shape, forward, gradients
from warploom.bench.harness import FEWEST, HEAD_START, SECONDS, Call, WrongResult, first_line, order_of
from warploom.bench.masks import document_lengths
from warploom.bench.patience import asked
from warploom.bench.ranks import Parts, contenders, of_fewer
from warploom.bench.reference import FURTHEST
from warploom.distributed import groups
from warploom.masks import Causal, Document, Mask, PrefixLM, SlidingWindow

# Tokens of a rank; 64 query heads and 8 key heads of 128.
TOKENS, QUICK_TOKENS = 8192, 128
# Tokens of all ranks, whose times by numbers of ranks are the table of strong scaling.
IN_ALL, QUICK_IN_ALL = 32768, 256
HEADS, QUICK_HEADS = (64, 8, 128), (8, 4, 16)
# Tokens of all ranks in one forward and one backward pass, which run where --only asks for them: seconds to minutes each.
IN_ONE_STEP, QUICK_IN_ONE_STEP = (2**20, 2**21), (512,)
CHECKED_ROWS = 8  # of a rank in one step, its last ones
WINDOW = 4096
CHECKED = 512  # tokens of a rank where results are held against one device's: the whole is there twice
IDEAL = "ideal"  # one device's own kernel, over the number of ranks

MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda seqlen: Causal(),
    f"window {WINDOW}": lambda seqlen: SlidingWindow(min(WINDOW, seqlen // 4) - 1),
    "causal documents": lambda seqlen: Document(document_lengths(seqlen)),
    "prefix LM": lambda seqlen: PrefixLM(seqlen // 4),
}


@dataclass(frozen=True)
class Case:
    name: str
    mask: str
    tokens: int  # of a rank
    heads: int
    heads_kv: int
    head_dim: int
    in_all: bool = False  # tokens are those of all ranks
    one_step: bool = False  # they are, and nothing is beside it: ours alone, each pass once

    @property
    def share(self) -> int:
        """Tokens of a rank."""
        return self.tokens // dist.get_world_size() if self.in_all or self.one_step else self.tokens

    def shape(self, tokens: int) -> Shape:
        return Shape(1, tokens * dist.get_world_size(), self.heads, self.head_dim, heads_kv=self.heads_kv)


def distributed_cases(quick: bool) -> list[Case]:
    """Every mask at a number of tokens a rank; two of them at a number of tokens in all; long sequences in one step."""
    tokens, in_all, heads = (QUICK_TOKENS, QUICK_IN_ALL, QUICK_HEADS) if quick else (TOKENS, IN_ALL, HEADS)
    long = QUICK_IN_ONE_STEP if quick else IN_ONE_STEP
    scaling = "causal", "causal documents"
    return [
        *(Case(f"{name}, {tokens} tokens a rank", name, tokens, *heads) for name in MASKS),
        *(Case(f"{name}, {in_all} tokens in all", name, in_all, *heads, in_all=True) for name in scaling),
        *(Case(f"causal, {each} tokens in one step", "causal", each, *heads, one_step=True) for each in long),
    ]


def begin(device: str) -> torch.device:
    """The process group that torchrun describes, or one of this process alone; and this rank's device.

    Raises:
        ValueError: there are fewer devices than processes on this host.
        ImportError: NumPy is not installed, by which torch.distributed sends what ranks tell each other.
    """
    groups.needs_numpy()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda" and local >= torch.cuda.device_count():
        raise ValueError(f"there are {torch.cuda.device_count()} CUDA devices, and torchrun started process {local} here")
    place = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        backend = "nccl" if place.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return place


def rows_of(case: Case, device: torch.device, against: list[str] | None, most: int) -> Iterator[dict[str, Any]]:
    """Results of the forward and of the backward pass, the same on every rank. A collective, to be gone through to its end."""
    if case.one_step:
        yield from _one_step(case, device)
        return
    make = {name: each for name, each in contenders().items() if asked(name, against)}
    kind = MASKS[case.mask]
    found: dict[str, dict[str, Any]] = {}
    errors: dict[str, tuple[float, float]] = {}
    small = case.shape(min(case.share, CHECKED))
    inputs = _drawn(small, device)
    out, want = _on_one(kind(small.seqlen), inputs)
    for name, each in make.items():
        why = None
        try:
            errors[name] = _checked(each(kind(small.seqlen), small.seqlen, device), inputs, out, want)
        except WrongResult as error:
            why = "wrong", str(error)
        except Exception as error:  # a peer may fail in any way
            why = "refused", str(error) if isinstance(error, peers.NotHere) else first_line(error)
        kind_of, words = _agreed(why) or ("", "")
        if words:
            found[name] = {kind_of: words}
    del inputs, out, want

    shape, mask = case.shape(case.share), kind(case.shape(case.share).seqlen)
    whole = _drawn(shape, device)
    parts = {name: each(mask, shape.seqlen, device) for name, each in make.items() if name not in found}
    flops = shape.flops(mask.density(shape.seqlen, shape.seqlen)) / dist.get_world_size()
    parts[IDEAL] = Parts(_same, _same, partial(_alone, mask))
    fewer = [2**n for n in range(1, dist.get_world_size().bit_length()) if 2**n < dist.get_world_size()] if case.in_all else []
    parts |= {_by(count): of_fewer(count, mask, shape.seqlen, device) for count in fewer}
    for at, measure in enumerate(("forward", "backward")):
        results = {name: dict(why) for name, why in found.items()}
        calls: dict[str, Call] = {}
        peaks: dict[str, int] = {}
        for name, part in parts.items():
            why = None
            try:
                calls[name] = _call(part, [part.shard(t) for t in whole], measure)
                with part.around():
                    peaks[name] = _peak(calls[name], device)
            except Exception as error:  # out of memory, say
                why = "refused", first_line(error)
            told = _agreed(why)
            if told is not None:
                calls.pop(name, None)
                results[name] = {told[0]: told[1]}
        most_bytes = dict(zip(calls, _most([float(peaks[name]) for name in calls], device), strict=True))
        times = _timed(calls, parts, device, most)
        strong = {str(count): statistics.median(times.pop(_by(count))) for count in fewer if _by(count) in times}
        if IDEAL in times:
            strong["1"] = statistics.median(times[IDEAL])
            times[IDEAL] = [ms / dist.get_world_size() for ms in times[IDEAL]]
        work = flops * (2.5 if at else 1.0)
        for name, ms in times.items():
            cuts, median = statistics.quantiles(ms, n=5), statistics.median(ms)
            results[name] = {"ms": median, "p20": cuts[0], "p80": cuts[3], "rounds": len(ms), "tflops": work / median / 1e9}
            if name != IDEAL:
                share = statistics.median(times[IDEAL]) / median if IDEAL in times else None
                of_memory = int(most_bytes[name]) if device.type == "cuda" else None
                results[name] |= {"of_ideal": share, "peak_bytes": of_memory, "error": errors[name][at], **parts[name].more}
        yield {
            **{"suite": "distributed", "case": case.name, "measure": measure, "ranks": dist.get_world_size()},
            **{"backend": dist.get_backend(), **shape.__dict__, "flops": work},
            "contenders": {name: results[name] for name in (*make, IDEAL) if name in results},
            **(_strong(strong, results) if case.in_all else {}),
        }


def _one_step(case: Case, device: torch.device) -> Iterator[dict[str, Any]]:
    """A forward and a backward pass of a sequence that one device has no room for: each rank draws its own part.

    Bytes are all that the rank holds. Its last rows of one head are compared with softmax in fp64 over everybody's keys.
    """
    shape, mask = case.shape(case.share), MASKS[case.mask](case.share * dist.get_world_size())
    plan = sharded.shard_plan(shape.seqlen, None, mask=mask)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def drawn(heads: int) -> Tensor:
        size = 1, plan.tokens[plan.rank], heads, case.head_dim
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    leaves = [drawn(heads).requires_grad_() for heads in (case.heads, case.heads_kv, case.heads_kv)]
    upstream = drawn(case.heads)
    work = shape.flops(mask.density(shape.seqlen, shape.seqlen)) / dist.get_world_size()
    kept: dict[str, Any] = {}
    distance = 0.0
    passes = {
        "forward": lambda: kept.update(out=sharded.attention(*leaves, plan=plan, mask=mask)),
        "backward": lambda: kept.update(gradients=torch.autograd.grad(kept.pop("out"), leaves, upstream)),
    }
    for measure, call in passes.items():
        why, took, held = None, 0.0, 0.0
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            took = (_on_gpu if device.type == "cuda" else _on_cpu)(call, device)
            held = float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0.0
            if measure == "forward":
                distance = _last_rows(plan, leaves, kept["out"])
            elif not all(bool(t.isfinite().all()) for t in kept["gradients"]):
                raise WrongResult("gradients are not finite")
        except WrongResult as error:
            why = "wrong", str(error)
        except Exception as error:  # out of memory, say
            why = "refused", first_line(error)
        told = _agreed(why)
        amount = work * (1.0 if measure == "forward" else 2.5)
        if told is not None:
            ours: dict[str, Any] = {told[0]: told[1]}
        else:
            ms, peak, furthest = _most([took, held, distance], device)
            ours = {"ms": ms, "p20": ms, "p80": ms, "rounds": 1, "tflops": amount / ms / 1e9, "error": furthest}
            ours |= {"imbalance": plan.imbalance, **({"peak_bytes": int(peak)} if device.type == "cuda" else {})}
        yield {
            **{"suite": "distributed", "case": case.name, "measure": measure, "ranks": dist.get_world_size()},
            **{"backend": dist.get_backend(), **shape.__dict__, "flops": amount},
            "contenders": {"warploom": ours},
        }
        if told is not None:
            return


def _last_rows(plan: sharded.ShardPlan, leaves: list[Tensor], out: Tensor) -> float:
    """The error of the rank's last rows of the first head, of a causal call; WrongResult where it is too large."""
    keys, values = (plan.unshard(t.detach()[:, :, :1].contiguous(), 1)[0, :, 0].double() for t in leaves[1:])
    places = plan.positions()[-CHECKED_ROWS:].to(keys.device)
    scores = leaves[0].detach()[0, -CHECKED_ROWS:, 0].double() @ keys.T * keys.shape[1] ** -0.5
    hidden = torch.arange(len(keys), device=keys.device) > places[:, None]
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    error = float((out.detach()[0, -CHECKED_ROWS:, 0].double() - want).norm() / want.norm())
    if not error <= FURTHEST["out"]:
        raise WrongResult(f"out is {error:.2g} of its norm away from softmax in fp64, more than {FURTHEST['out']:g}")
    return error


def _by(count: int) -> str:
    return f"{count} ranks"


def _strong(ms: dict[str, float], results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Milliseconds by numbers of ranks, ascending: one device's own kernel, then ours on the first ones, then on all."""
    if dist.get_world_size() > 1 and "ms" in results.get("warploom", {}):
        ms = {**ms, str(dist.get_world_size()): results["warploom"]["ms"]}
    return {"strong": {count: ms[count] for count in sorted(ms, key=int)}}


def _same(t: Tensor) -> Tensor:
    return t


def _alone(mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = warploom.attention(q, k, v, mask=mask)
    assert isinstance(out, Tensor)
    return out


def _drawn(shape: Shape, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of out, whole, and the same on every rank."""
    found = shape.draw(device)
    for t in found:
        dist.broadcast(t, 0)
    return found


def _on_one(mask: Mask, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Out and gradients by one device."""
    leaves = [t.float().requires_grad_() for t in inputs[:3]]
    out = _alone(mask, *leaves)
    return out.detach(), list(torch.autograd.grad(out, leaves, inputs[3].float()))


def _checked(parts: Parts, inputs: list[Tensor], out: Tensor, want: list[Tensor]) -> tuple[float, float]:
    """How far out and gradients are from one device's, of their norm; WrongResult where that is too far."""
    own = [parts.shard(t) for t in inputs]
    leaves = [t.detach().requires_grad_() for t in own[:3]]
    with parts.around():
        local = parts.attend(*leaves)
        found = torch.autograd.grad(local, leaves, own[3])
    errors = []
    for names, got, exact, furthest in (
        (("out",), [local], [out], FURTHEST["out"]),
        (("dq", "dk", "dv"), found, want, FURTHEST["gradient"]),
    ):
        distances = [float((parts.unshard(a.detach()).float() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)]
        for name, distance in zip(names, distances, strict=True):
            if not distance <= furthest:
                raise WrongResult(f"{name} is {distance:.2g} of its norm away from one device's, more than {furthest:g}")
        errors.append(max(distances))
    return errors[0], errors[1]


def _call(parts: Parts, inputs: list[Tensor], measure: str) -> Call:
    """The call of a pass, to be made within ``parts.around()``."""
    if measure == "backward":
        with parts.around():
            return gradients(parts.attend, inputs)
    return partial(forward, parts.attend, *inputs[:3])


def _agreed(why: tuple[str, str] | None) -> tuple[str, str] | None:
    """Why a contender is left out, as the first rank has it that leaves it out: then all do."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, why)
    return next((each for each in told if each is not None), None)


def _peak(call: Call, device: torch.device) -> int:
    """Bytes that a call allocates beyond those held before; 0 where nobody counts them."""
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _most(numbers: list[float], device: torch.device) -> list[float]:
    """Of each number the greatest of all ranks."""
    found = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    most: list[float] = found.tolist()
    return most


def _timed(calls: dict[str, Call], parts: dict[str, Parts], device: torch.device, most: int) -> dict[str, list[float]]:
    """Milliseconds of interleaved calls, each on the rank where it takes longest; all ranks begin it together."""
    names = list(calls)

    def clock(name: str) -> float:
        with parts[name].around():
            return (_on_gpu if device.type == "cuda" else _on_cpu)(calls[name], device)

    first = _most([clock(name) for name in names], device)
    rounds = min(max(int(SECONDS * 1e3 / max(sum(first), 1e-6)), FEWEST), max(most, 2))
    times = [[0.0] * rounds for _ in names]
    for turn in range(rounds):
        for at in order_of(turn, len(names)):
            times[at][turn] = clock(names[at])
    return {name: _most(each, device) for name, each in zip(names, times, strict=True)}


def _on_cpu(call: Call, device: torch.device) -> float:
    dist.barrier()
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e3


def _on_gpu(call: Call, device: torch.device) -> float:
    """By events, after a collective that no rank passes before all are there; the host has queued the call by then."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    meeting = torch.zeros(1, device=device)
    torch.cuda._sleep(8 * HEAD_START)  # a sharded call queues some twenty kernels and collectives
    dist.all_reduce(meeting)
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


HEAD = f"{'case':<40}{'pass':<10}{'contender':<40}{'ms':>10}{'TFLOP/s':>10}{'of ideal':>10}{'MiB':>10}"


def lines(row: dict[str, Any]) -> list[str]:
    """The row as lines of the table that HEAD begins; rates and memory are a rank's."""
    found = []
    for name, each in row["contenders"].items():
        begins = f"{row['case']:<40}{row['measure']:<10}{name:<40}"
        if "ms" not in each:
            found.append(begins + ("wrong: " + each["wrong"] if "wrong" in each else "refused: " + each["refused"]))
            continue
        share = f"{each['of_ideal']:.2f}" if each.get("of_ideal") is not None else ""
        memory = f"{each['peak_bytes'] / 2**20:.0f}" if each.get("peak_bytes") is not None else ""
        found.append(f"{begins}{each['ms']:>10.4g}{each['tflops']:>10.3g}{share:>10}{memory:>10}")
    if "strong" in row:
        words = [f"{count}: {ms:.4g} ms ({row['strong']['1'] / ms:.2f})" for count, ms in row["strong"].items()]
        found.append(f"{row['case']:<40}{row['measure']:<10}by ranks, and times one's: {', '.join(words)}")
    return found
