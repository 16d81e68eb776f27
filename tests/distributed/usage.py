"""What else a training step asks for: meshes, subgroups, checkpoints, compilation, seeds, equal bits."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import warploom
from tests.distributed.harness import Sharded
from tests.distributed.registry import case
from warploom import distributed, masks
from warploom.distributed import gather, groups
from warploom.distributed.choice import METHODS
from warploom.distributed.plan import planned


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@case("shard and unshard")
def there_and_back(rank: int, world: int, seed: int) -> None:
    plan = distributed.shard_plan(37, None, causal=True)
    for t, dim in (
        (torch.arange(37), 0),
        (seeded(seed, 2, 37, 3), 1),
        (seeded(seed, 2, 37), -1),
        (seeded(seed, 37, 2).bfloat16(), 0),
        (seeded(seed, 2, 37) > 0, 1),
    ):
        part = plan.shard(t, dim)
        assert torch.equal(part, t.index_select(dim, plan.positions()))
        assert torch.equal(plan.unshard(part, dim), t)
    every = torch.cat([plan.positions(each) for each in range(world)])
    assert torch.equal(every.sort().values, torch.arange(37))
    leaf = seeded(seed, 1, 37).requires_grad_()
    factors = torch.arange(37.0)
    (plan.unshard(plan.shard(leaf, 1), 1) * factors * (rank + 1)).sum().backward()
    held = torch.zeros(37).index_fill_(0, plan.positions(), 1.0)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[0], factors * held * world * (world + 1) / 2)


@case("a gradient of lse on one rank alone")
def lse_of_one_rank(rank: int, world: int, seed: int) -> None:
    """What ranks send each other does not depend on what a loss is made of."""
    whole = [seeded(seed + n, 1, 40, 2 * world, 8) for n in range(4)]
    leaves = [t.clone().requires_grad_() for t in whole[:3]]
    out, lse = warploom.attention(*leaves, causal=True, return_lse=True, backend="reference")
    plans = [distributed.shard_plan(40, None, causal=True, method=method) for method in METHODS]
    of_first = torch.zeros(40).index_fill_(0, plans[0].positions(0), 1.0)
    want = torch.autograd.grad((out * whole[3]).sum() + (lse * of_first).sum(), leaves)
    for plan in plans:
        parts = [plan.shard(t, 1).requires_grad_() for t in whole[:3]]
        out, lse = distributed.attention(*parts, plan=plan, causal=True, return_lse=True)
        loss = (out * plan.shard(whole[3], 1)).sum()
        for t, gradient in zip(torch.autograd.grad(loss + lse.sum() if rank == 0 else loss, parts), want, strict=True):
            torch.testing.assert_close(plan.unshard(t, 1), gradient, atol=1e-4, rtol=1e-4)


@case("a dimension of a mesh")
def mesh_dimension(rank: int, world: int, seed: int) -> None:
    """Each row of the mesh is a sequence of its own."""
    shape = (2, world // 2) if world % 2 == 0 else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "context"))
    with pytest.raises(ValueError, match=r"DeviceMesh of 2 dimensions .*mesh\['context'\]"):
        distributed.shard_plan(40, mesh)
    plan = distributed.shard_plan(40, mesh["context"], causal=True)
    assert (plan.ranks, plan.rank) == (shape[1], rank % shape[1])
    whole = seeded(seed + rank // shape[1], 1, 40, 2, 8)
    part = plan.shard(whole, 1)
    out = plan.unshard(distributed.attention(part, part, part, plan=plan, causal=True), 1)
    torch.testing.assert_close(out, warploom.attention(whole, whole, whole, causal=True))


@case("some ranks of the world")
def subgroup(rank: int, world: int, seed: int) -> None:
    group = dist.new_group([world - 2, world - 1])
    if rank < world - 2:
        with pytest.raises(ValueError, match="no member of"):
            distributed.shard_plan(40, group)
        return
    Sharded(seed, 40, group=group, keywords={"causal": True}, sink=True).check()
    Sharded(seed, 40, group=group, keywords={"causal": True}, method="ring").check()


@case("groups of all after one of some", 3)
def groups_after(rank: int, world: int, seed: int) -> None:
    """As torch names groups since 2.14: by a count that goes up where one is made, which all have to agree on afterwards."""

    def hashed(ranks: Sequence[int]) -> str:
        return f"{'_'.join(map(str, ranks))} {c10d._world.group_count}"

    def named(ranks: Sequence[int], use_hashed_name: bool) -> str:
        found = hashed(ranks) if use_hashed_name else str(c10d._world.group_count)
        c10d._world.group_count += 1
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_hash_ranks_to_str", hashed)
        patch.setattr(c10d, "_process_group_name", named)
        some = dist.new_group([1, 2])
        for again in (some, dist.new_group([1, 2])):
            if rank:
                assert distributed.shard_plan(40, again).group is not again
        counts: list[Any] = [None] * world
        dist.all_gather_object(counts, c10d._world.group_count)
        assert len(set(counts)) == 1


@case("collectives have a group of their own")
def own_group(rank: int, world: int, seed: int) -> None:
    plan = distributed.shard_plan(40, None)
    assert plan.group is not dist.group.WORLD and plan.group is distributed.shard_plan(30, None).group
    limits = [group._get_backend(torch.device("cpu")).options._timeout for group in (plan.group, groups.of(None))]
    assert limits[0] == limits[1]


@case("activation checkpoints")
def checkpointed(rank: int, world: int, seed: int) -> None:
    plan = distributed.shard_plan(40, None, causal=True)
    part = plan.shard(seeded(seed, 1, 40, 2, 8), 1).requires_grad_()

    def layer(t: Tensor) -> Tensor:
        return distributed.attention(t, t, t, plan=plan, causal=True, dropout_p=0.2)

    gradients = []
    for run in (layer, lambda t: checkpoint(layer, t, use_reentrant=False)):
        torch.manual_seed(seed)
        gradients.append(torch.autograd.grad(run(part).square().sum(), part)[0])
    assert torch.equal(*gradients)


@case("gradients that one rank wants and another does not", 2)
def gradients_of_some(rank: int, world: int, seed: int) -> None:
    """A known kind of call is not compared again, so that no rank may choose, or compare, by what it alone wants.

    The models are those of a call that gather would be best for without gradients.
    """
    whole = seeded(seed, 1, 40, 2, 8)
    want = warploom.attention(whole, whole, whole, causal=True)
    models = {"_gather": lambda *_: (0.0, 9.0), "_heads": lambda *_: (1.0, 1.0), "_ring": lambda *_: (4.0, 4.0)}
    with patch.multiple("warploom.distributed.choice", **models):
        for seen in ((), (False,), (True,), (False, True)):
            plan = distributed.shard_plan(40, None, causal=True)
            part = plan.shard(whole, 1)

            def call(wanted: bool, plan: distributed.ShardPlan = plan, part: Tensor = part) -> tuple[Tensor, Tensor]:
                leaf = part.clone().requires_grad_(wanted)
                out = distributed.attention(leaf, leaf, leaf, plan=plan, causal=True)
                assert isinstance(out, Tensor) and out.requires_grad == wanted
                return out, leaf

            for wanted in seen:
                call(wanted)
            if seen:
                for one in (0, 1):
                    out, _ = call(rank == one)
                    torch.testing.assert_close(plan.unshard(out.detach(), 1), want)
                assert len(plan.kept) == 1
            else:
                with pytest.raises(ValueError, match="whether gradients are wanted differs"):
                    call(rank == 0)
            out, leaf = call(True)
            assert distributed.explain(leaf, leaf, leaf, plan=plan, causal=True).method == "heads"
            assert torch.autograd.grad(out.sum(), leaf)[0].shape == leaf.shape


@case("torch.compile around a call", 2)
def compiled(rank: int, world: int, seed: int) -> None:
    plan = distributed.shard_plan(40, None, causal=True)
    part = plan.shard(seeded(seed, 1, 40, 2, 8), 1).requires_grad_()

    def block(t: Tensor) -> Tensor:
        return distributed.attention(t * 2, t, t + 1, plan=plan, causal=True) * 3

    found = [torch.autograd.grad(run(part).square().sum(), part)[0] for run in (block, torch.compile(block, backend="eager"))]
    torch.testing.assert_close(*found)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: Tensor, plan: distributed.ShardPlan, mask: masks.Mask) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return x + self.out(distributed.attention(q, k, v, plan=plan, mask=mask).flatten(2))


@case("beside FSDP2", 4)
def fully_sharded(rank: int, world: int, seed: int) -> None:
    """Parameters are sharded over data and context together, or over context and held by each data rank; with checkpoints."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "context"))
    mask, rows = masks.Document([13, 20, 7]), seeded(seed, world // 2, 1, 40, 16)
    plan, alone = distributed.shard_plan(40, mesh["context"], mask=mask), planned(40, 1, 0)

    def stack() -> torch.nn.Sequential:
        torch.manual_seed(seed)
        return torch.nn.Sequential(Layer(), Layer())

    def run(model: torch.nn.Sequential, x: Tensor, plan: distributed.ShardPlan, saves: bool) -> Tensor:
        for layer in model:
            x = checkpoint(layer, x, plan, mask, use_reentrant=False) if saves else layer(x, plan, mask)
        return x.square().sum() / rows.numel()

    whole = stack()
    sum(run(whole, x, alone, False) for x in rows).backward()
    for over in (mesh._flatten("all"), mesh):
        model = stack()
        for part in (*model, model):
            fully_shard(part, mesh=over)
        part = plan.shard(rows[mesh["data"].get_local_rank()], 1)
        (run(model, part, plan, over is mesh) * world).backward()  # FSDP averages over all
        for found, want in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), want.grad)


@case("DTensors", 2)
def foreign_parts(rank: int, world: int, seed: int) -> None:
    """Which tensor parallelism may give: the words say what to do."""
    from torch.distributed.tensor import DTensor, Shard

    heads = DTensor.from_local(torch.randn(1, 20, 2, 8), init_device_mesh("cpu", (world,)), [Shard(2)])
    plan, beta = planned(20, 1, 0), torch.ones(1, 20, 4)
    for call in (
        lambda: distributed.attention(heads, heads, heads, plan=plan),
        lambda: warploom.attention(heads, heads, heads),
        lambda: warploom.linear_attention(heads, heads, heads),
        lambda: warploom.gated_delta_rule(heads, heads, heads, beta),
    ):
        with pytest.raises(TypeError, match=r"q is a DTensor; give what this process holds .* q\.to_local\(\)"):
            call()


@case("a seed that nobody gave")
def drawn_seed(rank: int, world: int, seed: int) -> None:
    """Ranks draw together whatever their generators hold, and anew at every call."""
    plan = distributed.shard_plan(64, None)
    whole = seeded(seed, 1, 64, 2, 8)
    part, ones = plan.shard(whole, 1), plan.shard(torch.ones(1, 64, 2, 8), 1)
    torch.manual_seed(rank)
    outs = [plan.unshard(distributed.attention(part, part, ones, plan=plan, dropout_p=0.5), 1) for _ in range(2)]
    assert not torch.equal(*outs)
    torch.manual_seed(0)
    drawn = torch.randint(0, 2**63 - 1, (1,))
    expected = warploom.attention(whole, whole, torch.ones_like(whole), dropout_p=0.5, dropout_seed=drawn)
    torch.testing.assert_close(outs[0], expected)


@case("equal bits in every run")
def equal_bits(rank: int, world: int, seed: int) -> None:
    document = masks.Document([30, 20, 14])
    for method in METHODS:
        plan = distributed.shard_plan(64, None, mask=document, method=method)
        part = plan.shard(seeded(seed, 1, 64, world, 8), 1).requires_grad_()
        runs = []
        for _ in range(2):
            out = distributed.attention(part, part, part, plan=plan, mask=document)
            runs.append((out, *torch.autograd.grad(out.square().sum(), part)))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@case("equal bits with any number of ranks")
def bits_of_ranks(rank: int, world: int, seed: int) -> None:
    """Under batch_invariant, by the keyword and by the switch; the calls of one rank that has everything are the measure."""
    document = masks.Document([150, 90, 60])
    whole = seeded(seed, 1, 300, 2, 16)
    for dtype in (torch.float32, torch.bfloat16):
        for band in ({"causal": True}, {"window": (20, 2)}, {"mask": document}):
            outs = []
            for plan in (planned(300, 1, 0), distributed.shard_plan(300, None, **band)):
                part = plan.shard(whole.to(dtype), 1)
                given = distributed.attention(part, part, part, plan=plan, batch_invariant=True, **band)
                with warploom.batch_invariant():
                    switched = distributed.attention(part, part, part, plan=plan, **band)
                assert torch.equal(given, switched)
                outs.append(plan.unshard(given, 1))
            assert torch.equal(*outs)
    plan = distributed.shard_plan(300, None, causal=True)
    part = plan.shard(whole, 1)
    choice = distributed.explain(part, part, part, plan=plan, causal=True, batch_invariant=True)
    assert choice.method == "gather" and "number of ranks" in dict(choice.refused)["ring"]
    assert {rows for rows, *_ in choice.calls} <= {128, 300 - 256}  # which are the same on every rank


@case("a mask changed in place")
def changed_mask(rank: int, world: int, seed: int) -> None:
    """The next call sees the new values, as on one device; without gradients too, where tensors have no version."""
    plan = distributed.shard_plan(40, None)
    whole = seeded(seed, 1, 40, 2, 8)
    part = plan.shard(whole, 1)
    for inference in (False, True):
        with torch.inference_mode(inference):
            vector = torch.full((1, 1, 40), 30, dtype=torch.int32)
            mask = masks.ColumnMask(vector)
            for end in (30, 10):
                vector.fill_(end)
                out = plan.unshard(distributed.attention(part, part, part, plan=plan, mask=mask), 1)
                torch.testing.assert_close(out, warploom.attention(whole, whole, whole, mask=mask))


@case("explain")
def explained(rank: int, world: int, seed: int) -> None:
    plan = distributed.shard_plan(4096, None, causal=True)
    part = torch.empty(1, plan.tokens[rank], 8, 64)
    choice = distributed.explain(part, part, part, plan=plan, causal=True)
    text = str(choice)
    assert choice.method in METHODS and f"method    {choice.method}: leaves least to wait for" in text
    assert sum(queries for queries, *_ in choice.calls) == plan.tokens[rank] or choice.method != "gather"
    one = torch.empty(1, plan.tokens[rank], 1, 64)
    assert dict(distributed.explain(one, one, one, plan=plan, causal=True).refused)["heads"].startswith("needs heads in")
    refused = dict(distributed.explain(part, part, part, plan=plan, dropout_p=0.1).refused)
    assert "dropout counts keys" in refused.pop("ring")
    assert refused.keys() == ({"heads", "gather-heads"} if 8 % world else set())
    # It takes what a call takes: neither a bias, nor what the call behind it takes beside.
    for other in ({"bias": torch.zeros(1, 1, 1, 1)}, {"resolved": None}):
        with pytest.raises(TypeError, match=r"explain\(\) got an unexpected keyword argument"):
            distributed.explain(part, part, part, plan=plan, **other)
    with pytest.raises(TypeError, match="return_lse must be True or False"):
        distributed.explain(part, part, part, plan=plan, return_lse=1)  # type: ignore[arg-type]


@case("what a backward pass finds is kept alone")
def kept_alone(rank: int, world: int, seed: int) -> None:
    """Of packed documents, whose others' keys arrive beside own ones: no more is held than twice what is needed."""
    starts = [0, 20, 20 * world + 30, 64 * world]
    call: dict[str, Any] = {"causal": True}
    with patch.multiple(gather, HIDDEN=0, KEPT=0):
        plan = distributed.shard_plan(64 * world, None, cu_seqlens=starts, chunk=4, method="gather", **call)
        parts = [plan.shard(seeded(seed + n, 64 * world, 2, 8), 0).requires_grad_() for n in range(3)]
        kept: list[Tensor] = []

        def keep(t: Tensor) -> Tensor:
            kept.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = distributed.attention(*parts, plan=plan, **call)
        others = [t for t in kept if t.shape[-1] == 16]  # keys and values side by side
        assert len(others) == 1, [t.shape for t in kept]
        for t in kept:
            assert t.untyped_storage().nbytes() <= 2 * t.numel() * t.element_size(), t.shape
        whole = [plan.unshard(t.detach(), 0).requires_grad_() for t in parts]
        lengths = torch.tensor(starts, dtype=torch.int32)
        want = warploom.attention_varlen(whole[0], whole[1], whole[2], lengths, lengths, 64 * world, 64 * world, causal=True)
        assert isinstance(out, Tensor) and isinstance(want, Tensor)
        gradients = (torch.autograd.grad(t.square().sum(), leaves) for t, leaves in ((out, parts), (want, whole)))
        for found, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(found, plan.shard(expected, 0))


@case("a ring sends only what is seen")
def ring_skips(rank: int, world: int, seed: int) -> None:
    """Of a short window neighbours need an edge of each other, and ranks farther apart nothing."""
    from warploom.distributed.api import _sharded, _whole

    plan = distributed.shard_plan(1024, None, window=(16, 0), chunk=16, method="ring")
    sharded = _sharded(plan, _whole(plan, None, False, (16, 0)), torch.device("cpu"))
    seen = masks.SlidingWindow(16, 0).dense(1024, 1024)[0, 0]
    for reader in range(world):
        keys = seen[plan.positions(reader)].any(0)
        for source in range(world):
            needed = torch.zeros(1024, dtype=torch.bool)
            for a, b in sharded.needed(reader, source):
                needed[a:b] = True
            held = torch.zeros(1024, dtype=torch.bool).index_fill_(0, plan.positions(source), True)
            assert not (needed & ~held).any()
            assert not (keys & held & ~needed).any()
            assert int(needed.sum()) <= int((keys & held).sum()) + 16 * (len(sharded.needed(reader, source)) + 1)


@case("the benchmark", 2)
def benchmark(rank: int, world: int, seed: int) -> None:
    """Every contender that runs here gives one device's result, and all ranks hold the same rows."""
    from warploom.bench import distributed as suite

    for one in suite.distributed_cases(quick=True):
        rows = list(suite.rows_of(one, torch.device("cpu"), ["all-gather + SDPA"], 2))
        assert [row["measure"] for row in rows] == ["forward", "backward"]
        for row in rows:
            found = row["contenders"]
            names = ["warploom", *[f"warploom, {method}" for method in METHODS], "all-gather + SDPA", "ideal"]
            if one.one_step:
                assert list(found) == names[:1] and row["ranks"] == world and row["seqlen"] == one.tokens
                assert found["warploom"]["ms"] > 0 and found["warploom"]["error"] < 1e-5
                continue
            assert list(found) == names and row["ranks"] == world and row["seqlen"] == one.share * world
            assert all(each["ms"] > 0 and each["rounds"] == 2 for each in found.values()), row
            assert found["warploom"]["imbalance"] < 1 and found["warploom"]["error"] < 0.01
            assert list(row.get("strong", {})) == (["1", "2"] if one.in_all else [])
        told: list[object] = [None] * world
        dist.all_gather_object(told, [str(row) for row in rows])
        assert told[0] == told[rank]


@case("the benchmark by numbers of ranks", 3, 4)
def strong_scaling(rank: int, world: int, seed: int) -> None:
    """One process, the first two, and all of them."""
    from warploom.bench import distributed as suite

    case_in_all = next(each for each in suite.distributed_cases(quick=True) if each.in_all)
    for row in suite.rows_of(case_in_all, torch.device("cpu"), [], 2):
        assert list(row["strong"]) == ["1", "2", str(world)] and all(ms > 0 for ms in row["strong"].values())
        assert row["strong"][str(world)] == row["contenders"]["warploom"]["ms"]
        assert not [name for name in row["contenders"] if "ranks" in name]
        assert "by ranks, and times one's: 1: " in suite.lines(row)[-1]


@case("the example's losses and resuming with other processes", 2, 4)
def example(rank: int, world: int, seed: int) -> None:
    """Sharded rows and whole ones, one after the other and through a checkpoint, teach the same."""
    train = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_long.py"))["train"]
    with tempfile.TemporaryDirectory() as folder:
        saved = [str(Path(folder) / "state.pt")]
        dist.broadcast_object_list(saved)
        call = {"seqlen": 160, "rows": 4, "seed": seed % 1000, "device": "cpu"}
        whole = train(1, 4, **call)
        for context in {2, world}:
            assert train(context, 4, **call) == pytest.approx(whole, rel=1e-4)
        first = train(world, 2, save=saved[0], **call)
        second = train(world // 2, 4, resume=saved[0], **call)
        assert [*first, *second] == pytest.approx(whole, rel=1e-4)
        dist.barrier()
