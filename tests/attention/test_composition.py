"""attention() inside the rest of torch: compilers, transforms, autocast, checkpointing, export, distributed."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

import warploom
from warploom import masks
from warploom.attention.arguments import dense_args, varlen_args


def qkv(seqlen: int = 16, requires_grad: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen)
    return [
        torch.randn(2, seqlen, heads, 8, generator=generator).to(dtype).requires_grad_(requires_grad) for heads in (4, 2, 2)
    ]


def op_arguments(case: str) -> tuple:
    q, k, v = qkv()
    sink = torch.randn(4, requires_grad=True)
    args = {
        "bare": lambda: dense_args(q, k, v),
        "two vectors": lambda: dense_args(q, k, v, mask=masks.Document([[6, 10], [3, 9]], causal=False)),
        "four vectors": lambda: dense_args(q, k, v, mask=masks.GlobalWindow(2, 4, 4)),
        "everything": lambda: dense_args(
            q, k, v, mask=masks.Document([6, 10]), window=(9, 0), sink=sink, softcap=3.0, dropout_p=0.1, dropout_seed=1
        ),
        "permuted": lambda: dense_args(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))),
        "packed": lambda: varlen_args(
            *(t.flatten(0, 1) for t in (q, k, v)), torch.tensor([0, 5, 5, 30], dtype=torch.int32), causal=True
        ),
    }[case]()
    return tuple(args._replace(backend="cpu"))


@pytest.mark.parametrize("case", ["bare", "two vectors", "four vectors", "everything", "permuted", "packed"])
def test_opcheck(case: str) -> None:
    torch.library.opcheck(torch.ops.warploom.attention.default, op_arguments(case))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole_without_recompiling_for_new_shapes_and_lengths(backend: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def loss(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return warploom.attention(q, k, v, mask=masks.Document(lengths), softcap=2.0).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counting)
    first = 0
    for seqlen in (16, 24, 40):
        inputs = qkv(seqlen)
        lengths = torch.tensor([seqlen // 2, seqlen - seqlen // 2])
        got, want = compiled(*inputs, lengths), loss(*inputs, lengths)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
            torch.testing.assert_close(a, b)
        first = first or len(graphs)
    assert len(graphs) == first


def test_compiles_the_reference_packed_calls_and_the_drop_in() -> None:
    q, k, v = qkv()
    cu = torch.tensor([0, 16, 32], dtype=torch.int32)

    def calls(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = (t.flatten(0, 1) for t in (q, k, v))
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return (
            warploom.attention(q, k, v, causal=True, backend="reference"),
            warploom.attention_varlen(*packed, cu, causal=True),
            warploom.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True),
        )

    got = torch.compile(calls, fullgraph=True, backend="aot_eager")(q, k, v)
    for a, b in zip(got, calls(q, k, v), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_casts_as_torch_does() -> None:
    q, k, v = qkv()
    sink = torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = warploom.attention(q, k.bfloat16(), v, sink=sink)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32 and sink.grad is not None
    with pytest.raises(TypeError, match=r"k has dtype torch\.bfloat16 but q has torch\.float32"):
        warploom.attention(q, k.bfloat16(), v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        doubles = [t.detach().double() for t in (q, k, v)]
        assert warploom.attention(*doubles).dtype == torch.float64


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_func_grad(backend: str) -> None:
    q, k, v = qkv()

    def loss(q: Tensor, k: Tensor) -> Tensor:
        return warploom.attention(q, k, v.detach(), causal=True, backend=backend).square().sum()

    got = torch.func.grad(loss, argnums=(0, 1))(q.detach(), k.detach())
    for a, b in zip(got, torch.autograd.grad(loss(q, k), (q, k)), strict=True):
        torch.testing.assert_close(a, b)


def double_backward(backend: str | None) -> Tensor:
    q, k, v = qkv()
    out = warploom.attention(q, k, v, backend=backend)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    return torch.autograd.grad(dq.square().sum(), q)[0]


def forward_ad(backend: str | None) -> Tensor:
    q, k, v = qkv(requires_grad=False)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        return torch.autograd.forward_ad.unpack_dual(warploom.attention(dual, k, v, backend=backend)).tangent


def func_jvp(backend: str | None) -> Tensor:
    q, k, v = qkv(requires_grad=False)
    return torch.func.jvp(lambda q: warploom.attention(q, k, v, backend=backend), (q,), (torch.ones_like(q),))[1]


def vmap(backend: str | None) -> Tensor:
    q, k, v = (torch.stack([t, 2 * t]) for t in qkv(requires_grad=False))
    return torch.func.vmap(lambda q, k, v: warploom.attention(q, k, v, backend=backend))(q, k, v)


@pytest.mark.parametrize("transform", [double_backward, forward_ad, func_jvp, vmap])
def test_the_reference_takes_every_transform_and_kernels_refuse_in_words(transform) -> None:
    result = transform("reference")
    assert torch.isfinite(result).all() and result.any()
    with pytest.raises(NotImplementedError, match=r"warploom\.attention.*backend='reference' supports it"):
        transform(None)


def test_checkpointing_replays_dropout() -> None:
    q, k, v = qkv(64)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return warploom.attention(q, k, v, dropout_p=0.5).square()

    torch.manual_seed(3)
    want = torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))
    torch.manual_seed(3)
    out = torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), want, strict=True):
        assert torch.equal(a, b)


class Layer(torch.nn.Module):
    """A projection and an attention over documents."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 3 * 16)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return warploom.attention(q, k, v, mask=masks.Document(lengths)).flatten(2)


def test_export_keeps_one_op_and_dynamic_lengths() -> None:
    layer, x = Layer(), torch.randn(2, 24, 16)
    seqlen = torch.export.Dim("seqlen", min=4, max=512)
    program = torch.export.export(layer, (x, torch.tensor([10, 14])), dynamic_shapes={"x": {1: seqlen}, "lengths": None})
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.warploom.attention.default) == 1
    longer, lengths = torch.randn(2, 40, 16), torch.tensor([1, 39])
    torch.testing.assert_close(program.module()(longer, lengths), layer(longer, lengths))


def _train(rank: int, port: int, wrap: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    alone, layer = Layer(), Layer()
    layer.load_state_dict(alone.state_dict())
    model: torch.nn.Module
    if wrap == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(layer)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    x, lengths = torch.randn(4, 24, 16), torch.tensor([10, 14])
    model(x[rank::2], lengths).square().mean().backward()
    alone(x, lengths).square().mean().backward()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        assert got.grad is not None
        gradient = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        torch.testing.assert_close(gradient, want.grad)
    dist.barrier()
    # gloo's threads, torn down with the interpreter, now and then abort the process.
    os._exit(0)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(wrap: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_train, args=(port, wrap), nprocs=2)
