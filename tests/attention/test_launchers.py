"""Kept launchers of calls under a mask and of calls with gradients: what they are given, when there is none, who sees them."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.test_direct import MODES, Kernel, Mode, Sub, call, kernel, plain, twice
from warploom import masks
from warploom.attention import bounds, hopper
from warploom.attention.ops import attention_op
from warploom.attention.problem import AttentionArgs
from warploom.bias import ALiBi
from warploom.masks.intervals import ResolvedMask
from warploom.masks.tiles import column_bounds

__all__ = ["kernel"]


class Prepared:
    """Counts and remembers the bounds that are computed."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def __call__(self, *vectors_and_band: Any) -> Tensor:
        lts, lte, uts, ute, left, right, seqlen_q, _ = vectors_and_band
        mask = ResolvedMask(left, right, lts, lte, uts, ute)
        some = lts if lts is not None else ute
        self.made.append(column_bounds(mask, seqlen_q, some.shape[2], bounds.BLOCK, "cpu"))
        return self.made[-1]


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    found = Prepared()
    monkeypatch.setattr(bounds, "_column_bounds", found)
    monkeypatch.setattr(bounds, "_kept", bounds.OrderedDict())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return found


class Backward:
    """In the place of Hopper's backward pass: dq is dout times the scale, and what it was bound for."""

    def __init__(self) -> None:
        self.bound = 0
        self.given: list[tuple[Any, ...]] = []

    def bind(self, args: AttentionArgs, *gradients: Any) -> Callable[..., tuple[Tensor, ...]]:
        self.bound += 1
        scale = args.scale

        def launch(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
            self.given.append(tensors)
            return dout * scale, 0 * dout, 0 * dout, dout.new_empty(0)

        return launch

    def plain(self, args: AttentionArgs, dout: Tensor, *_: object) -> tuple[Tensor, ...]:
        self.given.append(())
        return dout * args.scale, 0 * dout, 0 * dout, dout.new_empty(0)


@pytest.fixture
def backward(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Backward:
    found = Backward()
    monkeypatch.setattr(hopper.BACKEND, "bind_backward", found.bind)
    monkeypatch.setattr(hopper.BACKEND, "backward", found.plain)
    return found


@pytest.fixture
def given(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor | None, ...]]:
    """What launchers are given behind sink."""
    found: list[tuple[Tensor | None, ...]] = []
    bind = kernel.bind

    def noted(args: AttentionArgs) -> Callable[..., Any]:
        launch = bind(args)

        def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *others: Tensor | None) -> Any:
            found.append(others)
            return launch(q, k, v, sink, *others)

        return run

    monkeypatch.setattr(hopper.BACKEND, "bind", noted)
    return found


def lengths(*each: int) -> Tensor:
    return torch.tensor(each, dtype=torch.int32)


def test_a_new_mask_in_every_step_only_launches(
    kernel: Kernel, given: list[tuple[Tensor | None, ...]], prepared: Prepared
) -> None:
    """With its own vectors and bounds, made once for all layers of a step."""
    q = plain()
    for step in range(4):
        documents = lengths(1 + step % 2, 2 - step % 2)
        mask = masks.Document(documents)
        for _ in range(3):
            call(q, mask=mask)
        assert len(prepared.made) == step + 1
        if step:
            lts, lte, uts, ute, found = given[-1]
            assert lts is not None and lts.flatten().tolist() == [documents[0]] * documents[0] + [3] * documents[1]
            assert lte is uts is ute is None and found is prepared.made[-1]
    assert kernel.ways() == ["checked"] * 2 + ["bound"] * 10


def test_masks_are_part_of_the_kind(kernel: Kernel) -> None:
    q, n = plain(), 3
    rows = torch.ones(1, 1, n, dtype=torch.int32)
    different: list[masks.Mask] = [
        masks.Causal(),
        masks.SlidingWindow(1),
        masks.SlidingWindow(0),
        masks.Document(lengths(1, 2)),
        masks.Document(lengths(1, 2), causal=False),
        masks.ColumnMask(rows),
        masks.ColumnMask(rows, rows, causal=True),
        masks.ColumnMask(None, ute=rows),
        masks.ColumnMask(rows.expand(1, 2, n)),
    ]
    for mask in different:
        for way in ("checked", "checked", "bound"):
            call(q, mask=mask)
            assert kernel.ways() == [way], mask
    for _ in range(2):
        call(q, mask=different[0])
    call(q, mask=different[0], causal=True)
    assert kernel.ways() == ["bound", "bound", "checked"]


def test_vectors_changed_in_place_are_prepared_anew(
    kernel: Kernel, given: list[tuple[Tensor | None, ...]], prepared: Prepared
) -> None:
    q, rows = plain(), torch.full((1, 1, 3), 2, dtype=torch.int32)
    mask, documents = masks.ColumnMask(rows, causal=True), lengths(1, 2)
    packed = masks.Document(documents)
    for each in (mask, packed):
        for _ in range(3):
            call(q, mask=each)
    assert len(prepared.made) == 2
    rows.fill_(1)
    documents.copy_(lengths(2, 1))
    call(q, mask=mask)
    assert given[-1][4] is prepared.made[2]
    call(q, mask=packed)
    lts = given[-1][0]
    assert lts is not None and lts.flatten().tolist() == [2, 2, 3] and given[-1][4] is prepared.made[3]
    assert kernel.ways() == ["checked"] * 2 + ["bound"] * 6  # both are a vector under the same band


def test_each_vector_changed_in_place_is_prepared_anew(kernel: Kernel, prepared: Prepared) -> None:
    q = plain()
    lts, lte, uts, ute = (torch.full((1, 1, 3), n, dtype=torch.int32) for n in (2, 3, 0, 1))
    mask = masks.ColumnMask(lts, lte, uts, ute)
    for _ in range(4):
        call(q, mask=mask)
    assert len(prepared.made) == 1
    for n, vector in enumerate((lts, lte, uts, ute)):
        vector.fill_(n)
        for _ in range(2):
            call(q, mask=mask)
        assert len(prepared.made) == 2 + n
    assert kernel.ways() == ["checked"] * 2 + ["bound"] * 10


def test_a_mask_holds_no_bounds_beyond_the_few_that_are_kept(kernel: Kernel, prepared: Prepared) -> None:
    q, mask = plain(), masks.Document(lengths(1, 2))
    for _ in range(3):
        call(q, mask=mask)
    found = weakref.ref(prepared.made.pop())
    assert found() is not None
    for _ in range(8):
        call(q, mask=masks.Document(lengths(1, 2)))
    prepared.made.clear()
    assert found() is None
    for _ in range(2):
        call(q, mask=mask)
    assert len(prepared.made) == 1


def packed(q: Tensor, cu: Tensor, mask: masks.Mask, **keywords: Any) -> Any:
    return warploom.attention_varlen(q, q, q, cu, mask=mask, backend="hopper", **keywords)


@pytest.fixture
def packed_bounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What bounds of packed masks are computed of, and themselves, last."""
    found: list[tuple[Any, ...]] = []

    def made(*given: Any) -> Tensor:
        found.append((*given, torch.zeros(1, 1, 1, 8, dtype=torch.int32)))
        return found[-1][-1]

    monkeypatch.setattr(bounds, "_packed_bounds", made)
    return found


def test_a_new_packed_mask_in_every_step_only_launches(
    kernel: Kernel, given: list[tuple[Tensor | None, ...]], packed_bounds: list[tuple[Any, ...]]
) -> None:
    """Behind what says where sequences are come its own vectors and their bounds, made once for all layers of a step."""
    q = plain()[0]
    for step in range(4):
        cu, used = lengths(0, 1 + step % 2, 3), lengths(1, 1)
        mask = masks.ColumnMask(torch.full((1, 1, 3), step, dtype=torch.int32), causal=True)
        for _ in range(3):
            packed(q, cu, mask, seqused_k=used)
        assert len(packed_bounds) == step + 1
        if step:
            starts, starts_k, counted, lts, *others, found = given[-1]
            assert starts is cu and starts_k is None and counted is used and others == [None] * 3
            assert lts is not None and lts.flatten().tolist() == [step] * 3 and found is packed_bounds[-1][-1]
            assert packed_bounds[-1][1:7] == (None, None, None, None, 0, 3) and packed_bounds[-1][0] is lts
            assert packed_bounds[-1][7] is cu and packed_bounds[-1][8] is None and packed_bounds[-1][9] is used
    assert kernel.ways() == ["checked"] * 2 + ["bound"] * 10
    packed(q, cu, masks.ColumnMask(None, ute=lengths(1, 1, 1)[None, None]), seqused_k=used)
    packed(q, cu, masks.Causal(), seqused_k=used)
    assert kernel.ways() == ["checked"] * 2
    with pytest.raises(ValueError, match="takes a band"):
        packed(q, cu, masks.Document(lengths(1, 2)))


def test_packed_starts_changed_in_place_are_prepared_anew(kernel: Kernel, packed_bounds: list[tuple[Any, ...]]) -> None:
    q, cu, mask = plain()[0], lengths(0, 1, 3), masks.ColumnMask(torch.ones(1, 1, 3, dtype=torch.int32))
    for _ in range(4):
        packed(q, cu, mask)
    assert len(packed_bounds) == 1
    cu.copy_(lengths(0, 2, 3))
    packed(q, cu, mask)
    packed(q, cu, mask)
    assert len(packed_bounds) == 2 and kernel.ways() == ["checked"] * 2 + ["bound"] * 4


def test_packed_masked_calls_with_gradients_only_launch_too(
    kernel: Kernel, backward: Backward, packed_bounds: list[tuple[Any, ...]]
) -> None:
    q, cu = plain()[0].requires_grad_(), lengths(0, 1, 3)
    for way in ("checked", "checked", "bound", "bound"):
        mask = masks.ColumnMask(torch.ones(1, 1, 3, dtype=torch.int32))
        out = packed(q, cu, mask, deterministic=False)
        assert kernel.ways() == [way]
        (found,) = torch.autograd.grad(out.sum(), q)
        assert torch.equal(found, plain()[0] / 4)
    assert backward.bound == 1 and len(backward.given[-1]) == 12 and backward.given[-1][11] is packed_bounds[-1][-1]


def test_bounds_of_inference_serve_training(prepared: Prepared) -> None:
    resolved = masks.ColumnMask(torch.full((1, 1, 3), 2, dtype=torch.int32)).resolve(3, 3)
    with torch.inference_mode():
        found = bounds.prepared_bounds(resolved, 3, 3)
    assert bounds.prepared_bounds(resolved, 3, 3) is found and len(prepared.made) == 1
    assert not found.is_inference()


def test_a_wrong_mask_is_named_as_before(kernel: Kernel) -> None:
    q = plain()
    twice(q, mask=masks.Document(lengths(1, 2)))
    wrong: list[tuple[Any, str]] = [
        (masks.Document(lengths(1, 3)), "lengths sum to 4"),
        (masks.ColumnMask(torch.zeros(1, 1, 4, dtype=torch.int32)), "has length 4"),
        (masks.ColumnMask(torch.zeros(2, 1, 3, dtype=torch.int32)), "mask has batch 2"),
        (torch.ones(3, 3, dtype=torch.bool), "from_dense"),
        ("causal", "mask must be a builder"),
    ]
    for mask, words in wrong:
        with pytest.raises((TypeError, ValueError), match=words):
            call(q, mask=mask)
        with pytest.raises((TypeError, ValueError), match="q must have 4 dimensions"):
            warploom.attention(q[0], q, q, mask=mask)


def test_calls_with_gradients_only_launch_too(kernel: Kernel, backward: Backward) -> None:
    q = plain().requires_grad_()
    for n, way in enumerate(("checked", "checked", "bound", "bound")):
        out = call(q, mask=masks.Document(lengths(1, 2)))
        assert kernel.ways() == [way] and out.grad_fn.name() == "_AttentionBackward"
        (found,) = torch.autograd.grad(out.sum(), q)
        assert torch.equal(found, plain() / 4) and len(backward.given) == n + 1
    assert backward.bound == 1
    tensors = backward.given[-1]
    assert len(tensors) == 9 and tensors[0] is not None and tensors[0].data_ptr() == q.data_ptr()
    torch.autograd.grad(call(q, mask=masks.Document(lengths(1, 2))), q, plain().mT.contiguous().mT)
    assert backward.bound == 2  # other strides


def test_calls_that_drop_only_launch_too(kernel: Kernel, given: list[tuple[Tensor | None, ...]]) -> None:
    """With the seed of each call, drawn as the checks draw it, the last of what a launcher takes."""
    q, mask = plain(), masks.Document(lengths(1, 2))
    torch.manual_seed(5)
    want = [int(torch.randint(0, 2**63 - 1, (1,))) for _ in range(4)]
    for options in ({}, {"mask": mask}):
        torch.manual_seed(5)
        for _ in range(4):
            call(q, dropout_p=0.5, **options)
        assert kernel.ways() == ["checked"] * 2 + ["bound"] * 2
        assert [int(others[-1]) for others in given[-2:]] == want[2:]  # type: ignore[arg-type]
    assert [len(others) for others in given] == [1, 1, 6, 6]
    for seed in (7, torch.tensor([8]), torch.tensor(9, dtype=torch.int32)):
        call(q, dropout_p=0.5, dropout_seed=seed)
        found = given[-1][-1]
        assert found is not None and found.dtype == torch.int64 and int(found) == int(seed)
    call(q, dropout_p=0.25)
    assert kernel.ways() == ["bound"] * 3 + ["checked"]


def test_a_wrong_seed_is_named_as_before(kernel: Kernel) -> None:
    q = plain()
    wrong = [0.5, "x", 2**70, torch.tensor([1, 2]), torch.tensor([0.5])]
    for dropout_p in (0.0, 0.5):
        twice(q, dropout_p=dropout_p, dropout_seed=3)
        for seed in wrong:
            with pytest.raises((TypeError, ValueError), match="dropout_seed"):
                call(q, dropout_p=dropout_p, dropout_seed=seed)
        state = torch.get_rng_state()
        call(q, dropout_p=dropout_p, dropout_seed=4)
        assert torch.equal(torch.get_rng_state(), state)
    assert kernel.ways() == ["checked", "checked", "bound"] * 2


def test_packed_calls_that_drop_only_launch_too(
    kernel: Kernel, given: list[tuple[Tensor | None, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "_packed_bounds", lambda *_: torch.zeros(1))
    q, starts = plain()[0], lengths(0, 1, 3)
    for _ in range(3):
        warploom.attention_varlen(q, q, q, starts, backend="hopper", dropout_p=0.5, dropout_seed=6)
    assert kernel.ways() == ["checked", "checked", "bound"]
    first, keys, used, seed = given[-1]
    assert first is starts and keys is used is None and seed is not None and int(seed) == 6
    mask = masks.ColumnMask(torch.ones(1, 1, 3, dtype=torch.int32))
    for _ in range(3):
        warploom.attention_varlen(q, q, q, starts, mask=mask, backend="hopper", dropout_p=0.5, dropout_seed=7)
    assert kernel.ways() == ["checked", "checked", "bound"]
    first, _, _, lts, _, _, _, found, seed = given[-1]
    assert first is starts and lts is mask.lts and found is not None and seed is not None and int(seed) == 7


def test_gradients_of_calls_that_drop_have_their_seeds(
    kernel: Kernel, backward: Backward, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, mask = plain().requires_grad_(), masks.Document(lengths(1, 2))
    for options in ({}, {"mask": mask}):
        outs = [call(q, dropout_p=0.5, dropout_seed=seed, **options) for seed in range(4)]
        assert kernel.ways() == ["checked"] * 2 + ["bound"] * 2
        for seed in (3, 2):
            torch.autograd.grad(outs[seed].sum(), q, retain_graph=True)
            found = backward.given[-1][-1]
            assert found is not None and int(found) == seed
        seeds: list[Tensor | None] = []

        def noted(args: AttentionArgs, *gradients: Any, seeds: list[Tensor | None] = seeds) -> tuple[Tensor, ...]:
            seeds.append(args.dropout_seed)
            return backward.plain(args, *gradients)

        with Mode(), monkeypatch.context() as patched:  # who watches sees the op with its seed
            patched.setattr(hopper.BACKEND, "backward", noted)
            torch.autograd.grad(call(q, dropout_p=0.5, dropout_seed=9, **options).sum() + outs[3].sum(), q)
        kernel.ways()
        assert sorted(int(seed) for seed in seeds if seed is not None) == [3, 9]


def test_lse_has_a_gradient_too(kernel: Kernel, backward: Backward) -> None:
    q = plain().requires_grad_()
    for n in range(4):
        out, lse = call(q, causal=True, return_lse=True)
        (found,) = torch.autograd.grad(out.sum() + lse.sum(), q, retain_graph=True)
        assert torch.equal(found, plain() / 4)
        (found,) = torch.autograd.grad(lse.sum(), q)
        assert not found.any() and backward.bound == (n >= 2)  # out has none, which none is bound for
    assert kernel.ways()[-1] == "bound"


def test_grad_mode_and_who_asks_are_part_of_the_kind(kernel: Kernel, backward: Backward) -> None:
    q = plain().requires_grad_()
    twice(q)
    with torch.no_grad():
        out = call(q)
    assert not out.requires_grad and kernel.ways() == ["checked"] * 3
    assert call(q).requires_grad and not call(q.detach()).requires_grad
    assert kernel.ways() == ["bound", "checked"]


def seen_by(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the ops that run, whoever sees them."""
    found: set[str] = set()
    for name in ("op", "backward_op"):
        op = getattr(attention_op, name)

        def noted(*arguments: Any, name: str = name, op: Any = op) -> Any:
            found.add(name)
            return op(*arguments)

        monkeypatch.setattr(attention_op, name, noted)
    return found


def test_a_watched_backward_pass_of_a_kept_launcher_runs_the_op(
    kernel: Kernel, backward: Backward, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = seen_by(monkeypatch)
    q = plain().requires_grad_()
    twice(q)
    outs = [call(q) for _ in range(3)]
    assert kernel.ways() == ["checked"] * 2 + ["bound"] * 3
    assert torch.equal(torch.autograd.grad(outs[0].sum(), q)[0], plain() / 4) and not ops
    with Mode():
        assert torch.equal(torch.autograd.grad(outs[1].sum(), q)[0], plain() / 4)
    assert ops == {"backward_op"}
    (first,) = torch.autograd.grad(outs[2].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(first.sum(), q)


@pytest.mark.parametrize("name", MODES)
def test_whoever_watches_sees_masked_calls_with_gradients(name: str, kernel: Kernel, backward: Backward) -> None:
    q, mask = plain().requires_grad_(), masks.Document(lengths(1, 2))
    twice(q, mask=mask)
    with MODES[name]():
        call(q, mask=mask)
    call(plain().as_subclass(Sub).requires_grad_(), mask=mask)
    with torch.autocast("cpu", torch.bfloat16):  # which casts q
        call(q, mask=mask)
    assert kernel.ways() == ["checked"] * 5
    call(q, mask=mask)
    assert kernel.ways() == ["bound"]


def test_autocast_that_casts_nothing_keeps_the_launcher(kernel: Kernel, backward: Backward) -> None:
    q = plain().bfloat16().requires_grad_()
    twice(q)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(q)
        assert kernel.ways() == ["checked", "checked", "bound"]
        torch.autograd.grad(out.sum(), q)
    assert backward.given == [()]  # an implementation's own arithmetic is none of autocast's
    with torch.autocast("cpu", torch.float16):
        call(q)
    assert kernel.ways() == ["checked"]


def test_what_a_backward_pass_needs_may_not_change(kernel: Kernel, backward: Backward) -> None:
    q, rows = plain().requires_grad_(), torch.full((1, 1, 3), 2, dtype=torch.int32)
    mask = masks.ColumnMask(rows)
    twice(q, mask=mask)
    out = call(q, mask=mask)
    rows.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert kernel.ways()[-1] == "bound"


def test_saved_tensors_may_come_back_with_other_strides(kernel: Kernel, backward: Backward) -> None:
    q = plain().requires_grad_()
    twice(q)
    call(q).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.mT.contiguous().mT if t.ndim == 4 else t):
        out = call(q)
        out.sum().backward()
    assert kernel.ways()[-1] == "bound" and backward.bound == 2


def test_checkpointing_runs_a_kept_launcher_again(kernel: Kernel, backward: Backward) -> None:
    q = plain().requires_grad_()
    twice(q)
    out = torch.utils.checkpoint.checkpoint(lambda q: call(q), q, use_reentrant=False)
    (found,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(found, plain() / 4) and kernel.ways() == ["checked", "checked", "bound", "bound"]


LAYERS: dict[str, Callable[[], dict[str, Any]]] = {
    "a mask and a sink": lambda: {"mask": masks.Document(lengths(1, 2)), "sink": torch.zeros(2)},
    "a mask, a sink and dropout": lambda: {"mask": masks.Document(lengths(1, 2)), "sink": torch.zeros(2), "dropout_p": 0.5},
    "packed": lambda: {"cu_seqlens_q": lengths(0, 1, 3), "sink": torch.zeros(2)},
    "packed under a mask": lambda: {"cu_seqlens_q": lengths(0, 1, 3), "mask": masks.ColumnMask(lengths(1, 1, 2).view(1, 1, 3))},
    "packed with dropout": lambda: {"cu_seqlens_q": lengths(0, 1, 3), "dropout_p": 0.5},
}


@pytest.mark.parametrize("name", LAYERS)
def test_checkpointed_layers_of_a_first_step_are_run_again_by_the_launcher_that_they_left(
    name: str, kernel: Kernel, backward: Backward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the checked way keeps for a backward pass has to come back in its order."""
    monkeypatch.setattr(bounds, "_packed_bounds", lambda *_: torch.zeros(1))
    options, q = LAYERS[name](), plain().requires_grad_()

    def layer(q: Tensor) -> Tensor:
        if "cu_seqlens_q" in options:
            return warploom.attention_varlen(q[0], q[0], q[0], backend="hopper", **options)
        return call(q, **options)

    outs = [torch.utils.checkpoint.checkpoint(layer, q, use_reentrant=False) for _ in range(3)]
    torch.autograd.grad(torch.stack(outs).sum(), q)
    assert kernel.ways() == ["checked"] * 2 + ["bound"] * 4


def test_launchers_keep_no_tensors_alive(kernel: Kernel, backward: Backward) -> None:
    def used() -> list[weakref.ref[Tensor]]:
        q, documents = plain().requires_grad_(), lengths(1, 2)
        mask = masks.Document(documents)
        for _ in range(3):
            call(q, mask=mask).sum().backward()
        return [weakref.ref(q), weakref.ref(documents)]

    found = used()
    backward.given.clear()
    gc.collect()
    assert [ref() for ref in found] == [None, None]


def test_a_step_under_a_new_mask_launches_as_little_as_can_be() -> None:
    """In a process of its own: a GPU is pretended there."""
    command = [sys.executable, "-m", "tests.attention.host_counts"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "as few as can be" in done.stdout, done.stderr


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_call_with_a_bias_took_the_launcher_of_one_without(
    packed: bool, requires_grad: bool, kernel: Kernel, backward: Backward
) -> None:
    """Nor does it leave one that a call without takes: another length of queries has none yet."""

    def run(rows: int, **keywords: Any) -> list[str]:
        q = torch.ones(1, rows, 2, 16, requires_grad=requires_grad)
        if packed:
            starts, longest = torch.tensor([0, rows], dtype=torch.int32), {"max_seqlen_q": rows, "max_seqlen_k": rows}
            tokens = q[0].detach().requires_grad_(requires_grad)
            warploom.attention_varlen(tokens, tokens, tokens, starts, backend="hopper", **longest, **keywords)
        else:
            call(q, **keywords)
        return kernel.ways()

    slopes = ALiBi(torch.ones(2, requires_grad=requires_grad))
    assert [run(3) for _ in range(3)] == [["checked"], ["checked"], ["bound"]]
    assert [run(3, bias=slopes) for _ in range(3)] == [["checked"]] * 3
    assert [run(4, bias=slopes) for _ in range(3)] == [["checked"]] * 3
    assert [run(4) for _ in range(3)] == [["checked"], ["checked"], ["bound"]]
