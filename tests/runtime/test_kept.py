"""What launchers are kept by, and what they are given: kinds of calls, whose memory a call reads, addresses of rooms."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from warploom.runtime import dispatch, kept
from warploom.runtime.room import Room


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor says that it is on one."""
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    dispatch.strict(False)  # forgets what was bound


def rows(*shape: int) -> Tensor:
    return torch.ones(shape or (2, 3, 4))


def key(*tensors: Any, others: tuple[Any, ...] = (), options: tuple[Any, ...] = ()) -> Any:
    return kept.find("f", tensors, others, options)[0]


def test_equal_kinds_have_equal_keys() -> None:
    want = key(rows(), rows(), rows(), None, others=(None,), options=(1.0, True, None))
    assert want is not None
    assert key(rows() * 2, rows(), rows(), None, others=(None,), options=(1.0, True, None)) == want
    assert kept.find("g", (rows(), rows(), rows(), None), (None,), (1.0, True, None))[0] != want


DIFFERENT: dict[str, tuple[Any, ...]] = {
    "shape": (rows(2, 3, 5),),
    "strides": (rows(2, 4, 3).mT,),
    "none": (None,),
    "dtype": (rows().half(),),
    "a gradient": (rows().requires_grad_(),),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_tensors_make_other_kinds(name: str) -> None:
    found = key(rows(), rows(), rows(), *DIFFERENT[name])
    assert found is not None and found != key(rows(), rows(), rows(), rows())


def test_who_asks_for_gradients_makes_a_kind_while_they_are_recorded() -> None:
    asks = [key(*(rows().requires_grad_(n == m) for m in range(3))) for n in range(3)]
    assert len(set(asks)) == 3
    with torch.no_grad():
        assert len({key(*(rows().requires_grad_(n == m) for m in range(3))) for n in range(3)}) == 1


@pytest.mark.parametrize("one,other", [(1, 1.0), (1, True), (0, False), (0.0, False), (None, False)], ids=str)
def test_options_of_other_types_make_other_kinds(one: Any, other: Any) -> None:
    assert key(rows(), rows(), rows(), options=(one,)) != key(rows(), rows(), rows(), options=(other,))


class Number(float):
    pass


@pytest.mark.parametrize("option", [Number(1.0), (1, 2), [1], torch.tensor(1.0), torch.relu], ids=lambda x: type(x).__name__)
def test_options_of_no_plain_type_make_none(option: Any) -> None:
    assert kept.find("f", (rows(), rows(), rows()), (), (option,)) == kept.NOTHING


@pytest.mark.parametrize("bad", ["keys", 3, object()], ids=lambda bad: type(bad).__name__)
def test_what_is_no_plain_tensor_makes_none(bad: Any) -> None:
    for tensors in ((bad, rows(), rows()), (rows(), rows(), rows(), bad)):
        assert kept.find("f", tensors, (), ()) == kept.NOTHING
    assert kept.find("f", (rows(), rows(), rows()), (bad,), ()) == kept.NOTHING


def test_strides_that_nothing_is_multiplied_by_make_no_kind() -> None:
    odd = torch.ones(24).as_strided((1, 3, 4), (7, 4, 1))
    assert key(odd, odd, odd) == key(*[rows(1, 3, 4)] * 3)


def test_a_launcher_is_kept_for_a_settled_choice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(dispatch, "settle", lambda key, *rest: asked.append(rest) or None)
    found = key(rows(), rows(), rows())
    kept.bind(None, "problem", "chosen", "family", True, lambda: asked.append)
    assert not asked
    kept.bind(found, "problem", "chosen", "family", True, lambda: asked.append)
    assert asked == [("chosen", "family", True, "problem")] and found not in dispatch._bound
    dispatch._settled[found] = "chosen"
    for want in (None, asked.append):
        kept.bind(found, "problem", "chosen", "family", True, lambda: asked.append)
        assert dispatch.bound(found) == want
    assert kept.find("f", (rows(), rows(), rows()), (), ())[1] == asked.append


SAME: list[tuple[Callable[[Tensor], Tensor], bool]] = [
    (lambda t: t, True),
    (lambda t: t.unsqueeze(0), True),
    (lambda t: t.clone(), False),
    (lambda t: t.view(torch.int32), False),
    (lambda t: t[:, :2], False),
    (lambda t: t.mT, False),
    (lambda t: t.unsqueeze(0)[:, :1], False),
]


@pytest.mark.parametrize("number", range(len(SAME)))
def test_whose_memory_a_call_reads(number: int) -> None:
    read, want = SAME[number]
    t = rows(3, 4, 5)
    assert kept.same((None, t), (None, read(t))) == want


def test_none_and_a_tensor_are_not_the_same() -> None:
    assert not kept.same((None,), (rows(),)) and not kept.same((rows(),), (None,))


def test_a_room_holds_its_pieces_side_by_side() -> None:
    pieces = [((3, 5), torch.bfloat16), None, ((7,), torch.float32), ((0, 4), torch.float32), ((2, 2, 2), torch.float32)]
    room = Room(torch.device("cpu"), *pieces)
    memory = room.new()
    assert memory.is_contiguous() and memory.dtype == torch.uint8
    tensors, addresses = room.tensors(memory), room.addresses(memory)
    assert tensors[1] is None and addresses[1] is None
    end = memory.data_ptr()
    for piece, t, address in zip(pieces, tensors, addresses, strict=True):
        if piece is None:
            continue
        assert (tuple(t.shape), t.dtype) == piece and t.is_contiguous() and address >= end
        assert (address - memory.data_ptr()) % 128 == 0 and (not t.numel() or t.data_ptr() == address)
        end = address + t.numel() * t.element_size()
        t.fill_(float("nan"))
    assert end <= memory.data_ptr() + memory.numel()


class Launch:
    """In the place of a kernel's: compiled on devices that it was launched on."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name, self.devices = log, name, set[int]()

    def kept(self, grid: tuple[int, int], rest: tuple[Any, ...]) -> Callable[..., None]:
        def launch(*first: Any) -> None:
            self.devices.add(torch._C._cuda_getDevice())
            self.log.append((self.name, "kept", first))

        return launch

    def raw(self) -> Any:
        device = torch._C._cuda_getDevice()
        if device not in self.devices:
            return None
        found = type("Raw", (), {})()
        found.bound = lambda grid, rest: lambda *first: self.log.append((self.name, f"raw {device}", first, grid, rest))
        return found


def test_a_chain_takes_addresses_where_all_of_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_module = pytest.importorskip("warploom.runtime.triton_launch")
    log: list[Any] = []
    one, other = Launch(log, "one"), Launch(log, "other")
    chain = launch_module.Chain((one, (1, 1), (5,)), (other, (2, 1), (6, 7)))

    def ways() -> list[Any]:
        (a, b), short = chain.launches()
        a(1), b(2)
        found, log[:] = list(log), []
        assert short == found[0][1].startswith("raw")
        return [each[:2] for each in found]

    kept_ways = [("one", "kept"), ("other", "kept")]
    for device in (0, 1):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda device=device: device, raising=False)
        assert ways() == kept_ways and ways() == kept_ways
        assert ways() == [("one", f"raw {device}"), ("other", f"raw {device}")]
    monkeypatch.setattr(launch_module, "watched", lambda: True)
    assert ways() == kept_ways
    monkeypatch.setattr(launch_module, "watched", lambda: False)
    (_, b), _ = chain.launches()
    b(3)
    assert log == [("other", "raw 1", (3,), (2, 1), (6, 7))]


def test_kept_calls_launch_as_little_as_can_be() -> None:
    """In a process of its own: a GPU is pretended there."""
    command = [sys.executable, "-m", "tests.runtime.host_counts"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "as few as can be" in done.stdout, done.stderr
