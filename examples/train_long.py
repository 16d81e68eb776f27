"""A small language model learns Python from long packed rows, each row shared by several processes.

    torchrun --nproc-per-node 4 examples/train_long.py --context 2 [--steps 40] [--seqlen 4096] [--save state.pt]
    torchrun --nproc-per-node 2 examples/train_long.py --resume state.pt
    python examples/train_long.py --device cpu

Processes form a mesh, data × context: those of one context group hold parts of the same rows and attend across them, data
groups have rows of their own. Every process holds the whole model. The text is Python's own library, byte by byte, so that
nothing is downloaded. With any number of processes the losses are the same, up to rounding.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from warploom import distributed
from warploom.masks import Document

BYTES, DIM, HEADS, LAYERS = 256, 64, 4, 2
NO_LABEL = -100  # what cross_entropy leaves out
SHORTEST = 64  # bytes of a document, the last one of a row apart


class Layer(nn.Module):
    """Pre-norm: attention across the context group, then a perceptron on this process's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, mask: Document, plan: distributed.ShardPlan) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(distributed.attention(q, k, v, plan=plan, mask=mask).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    """Bytes (1, tokens) and their places in their documents to logits (1, tokens, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, BYTES)

    def forward(self, tokens: Tensor, places: Tensor, mask: Document, plan: distributed.ShardPlan) -> Tensor:
        angles = places[..., None] * 1000.0 ** -torch.linspace(0, 1, DIM // 2, device=places.device)
        x = self.bytes(tokens) + torch.cat([angles.sin(), angles.cos()], -1)
        for layer in self.layers:
            x = layer(x, mask, plan)
        return self.head(self.norm(x))


def library() -> list[bytes]:
    """The modules of Python's library, in an order that does not depend on the machine's."""
    return [path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))]


def row(documents: list[bytes], seqlen: int, seed: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """One packed row: bytes, labels, places in the documents, and the documents' lengths.

    Labels are shifted here, while the row is whole: a process does not hold the byte after each of its own.
    """
    draw = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    while sum(map(len, parts)) < seqlen:
        document = documents[int(torch.randint(len(documents), (), generator=draw))]
        wanted = int(torch.randint(SHORTEST, seqlen // 2, (), generator=draw))
        length = min(wanted, seqlen - sum(map(len, parts)), len(document))
        start = int(torch.randint(len(document) - length + 1, (), generator=draw))
        if length:
            parts.append(torch.tensor(list(document[start : start + length])))
    labels = torch.cat([torch.cat([part[1:], torch.tensor([NO_LABEL])]) for part in parts])
    places = torch.cat([torch.arange(len(part)) for part in parts])
    return torch.cat(parts), labels, places, [len(part) for part in parts]


def saved(path: str, device: str) -> dict[str, Any]:
    """What --save wrote."""
    try:
        state = torch.load(path, map_location=device)
        return {name: state[name] for name in ("model", "optimizer", "step")}
    except Exception as error:  # whatever a file may be instead
        raise SystemExit(f"--resume {path}: it is no file of --save ({type(error).__name__})") from None


def train(
    context: int, steps: int, seqlen: int, rows: int, seed: int, device: str, save: str | None = None, resume: str | None = None
) -> list[float]:
    """The loss of each step; every process of the world calls it."""
    world = dist.get_world_size()
    if world % context or rows % (world // context):
        raise SystemExit(f"--context must divide the {world} processes, and {world} / context the {rows} rows of a step")
    mesh = init_device_mesh(device, (world // context, context), mesh_dim_names=("data", "context"))
    torch.manual_seed(seed)
    bare = Model().to(device)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=3e-3)
    first = 0
    if resume is not None:
        state = saved(resume, device)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    model = DistributedDataParallel(bare)
    documents, losses = library(), []
    began = time.perf_counter()
    for step in range(first, steps):
        total = torch.zeros(2, device=device)  # of the loss, and of the tokens that have a label
        mine = range(mesh["data"].get_local_rank(), rows, world // context)
        batches = []
        for number in mine:
            tokens, labels, places, lengths = row(documents, seqlen, seed + 7919 * (step * rows + number))
            mask = Document(lengths)
            plan = distributed.shard_plan(seqlen, mesh["context"], mask=mask)
            local = [plan.shard(t, 0)[None].to(device) for t in (tokens, labels, places)]
            batches.append((local, mask, plan))
            total[1] += (local[1] != NO_LABEL).sum()
        counted = total[1].clone()
        dist.all_reduce(counted)
        optimizer.zero_grad()
        for number, ((tokens, labels, places), mask, plan) in enumerate(batches):
            model.require_backward_grad_sync = number == len(batches) - 1
            logits = model(tokens, places, mask, plan)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
            # The loss is the sum over all tokens of all processes, by their number. DDP, and FSDP unless told otherwise,
            # averages gradients over the world, where they should be summed: hence the factor.
            (loss * world / counted).backward()
            total[0] += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
        if dist.get_rank() == 0 and (step % 10 == 0 or step == steps - 1):
            speed = (step - first + 1) * rows * seqlen / (time.perf_counter() - began)
            place = "1 process" if world == 1 else f"{world} processes"
            print(f"step {step}: loss {losses[-1]:.4f}, {speed:.0f} tokens/s on {place}", flush=True)
    if save is not None and dist.get_rank() == 0:
        torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}, save)
    dist.barrier()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, help="processes that share a row (default: all)")
    parser.add_argument("--steps", type=int, default=40, help="of training (default: 40)")
    parser.add_argument("--seqlen", type=int, default=4096, help="tokens of a row (default: 4096)")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step, over all processes (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and rows (default: 0)")
    parser.add_argument("--save", help="where to save model, optimizer and step at the end")
    parser.add_argument("--resume", help="what --save wrote, with any number of processes")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where there is one",
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if args.resume is not None and not os.path.exists(args.resume):
        parser.error(f"--resume {args.resume}: there is no such file")
    if args.save is not None and not Path(args.save).parent.is_dir():  # said now, not when the training is done
        parser.error(f"--save {args.save}: there is no folder {Path(args.save).parent}")
    least = {"steps": 1, "seqlen": 2 * SHORTEST + 2, "rows": 1, "context": 1}
    for name, number in least.items():
        given = getattr(args, name)
        if given is not None and given < number:
            parser.error(f"--{name} takes {number} or more, got {given}")
    if args.device == "cuda" and int(os.environ.get("LOCAL_RANK", "0")) >= torch.cuda.device_count():
        parser.error(f"there are {torch.cuda.device_count()} CUDA devices, fewer than the processes of this host")
    backend = "nccl" if args.device == "cuda" else "gloo"
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    context = dist.get_world_size() if args.context is None else args.context
    losses = train(context, args.steps, args.seqlen, args.rows, args.seed, args.device, args.save, args.resume)
    if dist.get_rank() == 0:
        done = f"{args.resume} has {args.steps} steps or more"
        print(f"loss went from {losses[0]:.3f} to {losses[-1]:.3f}" if losses else done)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
