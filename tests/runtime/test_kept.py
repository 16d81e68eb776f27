"""What launchers are kept by, and what they are given: kinds of calls, whose memory a call reads, addresses of rooms."""

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
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

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
    return kept.find("f", (*tensors, *others), len(tensors), options)[0]


def test_equal_kinds_have_equal_keys() -> None:
    want = key(rows(), rows(), rows(), None, others=(None,), options=(1.0, True, None))
    assert want is not None
    assert key(rows() * 2, rows(), rows(), None, others=(None,), options=(1.0, True, None)) == want
    assert kept.find("g", (rows(), rows(), rows(), None, None), 4, (1.0, True, None))[0] != want


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
    assert kept.find("f", (rows(), rows(), rows()), 3, (option,)) == kept.NOTHING


@pytest.mark.parametrize("bad", ["keys", 3, object()], ids=lambda bad: type(bad).__name__)
def test_what_is_no_plain_tensor_makes_none(bad: Any) -> None:
    for tensors in ((bad, rows(), rows()), (rows(), rows(), rows(), bad)):
        assert kept.find("f", tensors, len(tensors), ()) == kept.NOTHING
    assert kept.find("f", (rows(), rows(), rows(), bad), 3, ()) == kept.NOTHING


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
    assert kept.find("f", (rows(), rows(), rows()), 3, ())[1] == asked.append


def keep(given: tuple[Any, ...], options: tuple[Any, ...] = (1.0, True, None)) -> Callable[[], None]:
    """Bind a launcher to calls like this one, and make such a call, which is remembered."""

    def launch() -> None:
        """In the place of one."""

    found = kept.find("f", given, 3, options)[0]
    dispatch._settled[found] = "chosen"
    for _ in range(2):
        kept.bind(found, None, "chosen", "attention", True, lambda: launch)
    assert kept.find("f", given, 3, options)[1] is launch
    return launch


def given() -> tuple[Any, ...]:
    return rows(), rows(), rows(), None, torch.ones(2, 3)


def by_key(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Which calls were looked for by a key."""
    asked: list[Any] = []
    find = kept._find
    monkeypatch.setattr(kept, "_find", lambda *arguments: asked.append(arguments) or find(*arguments))
    return asked


def test_a_call_like_the_last_one_makes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = keep(given())
    asked = by_key(monkeypatch)
    for _ in range(3):
        key, found, records = kept.find("f", given(), 3, (1.0, True, None))
        assert key is not None and found is launch and not records
    assert not asked


UNLIKE: dict[str, tuple[Any, ...]] = {
    "shape": (rows(), rows(2, 3, 5), rows(), None, torch.ones(2, 3)),
    "strides": (rows(), rows(), rows(2, 4, 3).mT, None, torch.ones(2, 3)),
    "dtype": (rows(), rows(), rows(), None, torch.ones(2, 3).bfloat16()),
    "a tensor more": (rows(), rows(), rows(), rows(), torch.ones(2, 3)),
    "another place": (rows(), rows(), rows(), torch.ones(2, 3), None),
    "none": (rows(), rows(), rows(), None, None),
    "a parameter": (rows(), rows(), torch.nn.Parameter(rows(), requires_grad=False), None, torch.ones(2, 3)),
    "a gradient": (rows(), rows(), rows().requires_grad_(), None, torch.ones(2, 3)),
    "no tensor": (rows(), 3, rows(), None, torch.ones(2, 3)),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_call_unlike_the_last_one_gets_no_launcher_of_it(name: str) -> None:
    launch = keep(given())
    if name == "a parameter":  # of one kind, by the key
        assert kept.find("f", UNLIKE[name], 3, (1.0, True, None))[1] is launch
    else:
        assert kept.find("f", UNLIKE[name], 3, (1.0, True, None))[1] is None
    assert kept.find("f", given(), 3, (1.0, True, None))[1] is launch


@pytest.mark.parametrize("options", [(1, True, None), (1.0, 1, None), (1.0, True, False), (2.0, True, None)], ids=str)
def test_options_unlike_the_last_ones_get_no_launcher_of_them(options: tuple[Any, ...]) -> None:
    keep(given())
    assert kept.find("f", given(), 3, options)[1] is None


def test_a_call_like_the_last_one_is_seen_by_whoever_watches() -> None:
    launch = keep(given())
    seen: list[Any] = []

    def look(t: Tensor) -> Tensor:
        seen.append(kept.find("f", (t, rows(), rows(), None, torch.ones(2, 3)), 3, (1.0, True, None)))
        return t

    watchers = [FlopCounterMode(display=False), profile(), _Counter()]
    for watcher in watchers:
        with watcher:
            look(rows())
    torch.vmap(look)(rows(5, 2, 3, 4))
    torch.func.functionalize(look)(rows())
    with forward_ad.dual_level():
        look(rows())
    torch.jit.trace(look, rows(), check_trace=False)
    assert len(seen) == len(watchers) + 4 and set(seen) == {kept.NOTHING}
    with torch.device("cpu"):
        assert look(rows()) is not None and seen[-1][1] is launch


class _Counter(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_gradients_that_are_not_recorded_make_another_kind() -> None:
    asks = (rows().requires_grad_(), *given()[1:])
    with torch.no_grad():
        launch = keep(asks)
        assert kept.find("f", asks, 3, (1.0, True, None))[1:] == (launch, False)
        assert kept.find("f", given(), 3, (1.0, True, None))[1] is launch
    assert kept.find("f", asks, 3, (1.0, True, None))[1:] == (None, True)
    recorded = keep(asks)
    assert kept.find("f", asks, 3, (1.0, True, None))[1:] == (recorded, True)
    with torch.no_grad():
        assert kept.find("f", asks, 3, (1.0, True, None))[1:] == (launch, False)
    with torch.inference_mode():
        assert kept.find("f", given(), 3, (1.0, True, None))[1:] == (launch, False)


def test_autocast_that_would_cast_gets_no_launcher() -> None:
    launch = keep(given())
    with torch.autocast("cpu", torch.bfloat16):
        assert kept.find("f", given(), 3, (1.0, True, None)) == kept.NOTHING
    assert kept.find("f", given(), 3, (1.0, True, None))[1] is launch
    halves = (*[t.bfloat16() for t in given()[:3]], None, torch.ones(2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        launch = keep(halves)
    with torch.autocast("cpu", torch.float16):
        assert kept.find("f", halves, 3, (1.0, True, None)) == kept.NOTHING


def test_what_forgets_launchers_forgets_the_last_call() -> None:
    keep(given())
    dispatch.strict(False)
    assert kept.find("f", given(), 3, (1.0, True, None))[1] is None


def test_one_tensor_given_twice_is_looked_for_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    t = rows()
    launch = keep((t, t, t, None, None))
    asked = by_key(monkeypatch)
    assert kept.find("f", (t, t, t, None, None), 3, (1.0, True, None))[1] is launch and len(asked) == 1
    launch = keep(given())
    assert kept.find("f", (t, t, rows(), None, torch.ones(2, 3)), 3, (1.0, True, None))[1] is launch


def test_a_torch_without_the_test_of_tensors_looks_by_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_Guards", None)
    launch = keep(given())
    asked = by_key(monkeypatch)
    assert kept.find("f", given(), 3, (1.0, True, None))[1] is launch and len(asked) == 1


class Raising:
    """In the place of a torch's test of tensors that takes other arguments."""

    def __init__(self, *given: Any, **named: Any) -> None:
        raise TypeError("takes other arguments")


class RaisingCheck:
    def __init__(self, *given: Any, **named: Any) -> None:
        """Takes what it is given."""

    def check(self, *given: Any) -> bool:
        raise RuntimeError("takes other arguments")


@pytest.mark.parametrize("guards", [Raising, RaisingCheck])
def test_a_torch_whose_test_takes_other_arguments_looks_by_keys(guards: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_Guards", guards)
    launch = keep(given())
    asked = by_key(monkeypatch)
    for _ in range(10):
        assert kept.find("f", given(), 3, (1.0, True, None))[1] is launch
    assert len(asked) == 10


def test_kinds_of_one_shape_by_turns_make_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [(given(), (1.0, True, None)), (UNLIKE["none"], (1.0, True, None)), (given(), (1.0, True, False))]
    launches = [keep(*call) for call in calls]
    asked = by_key(monkeypatch)
    for _ in range(3):
        for call, launch in zip(calls, launches, strict=True):
            assert kept.find("f", call[0], 3, call[1])[1] is launch
    assert not asked


@pytest.mark.parametrize("name", ["shape", "strides", "dtype"])
def test_of_kinds_that_only_tensors_tell_one_is_remembered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = given(), UNLIKE[name]
    launches = [keep(call) for call in calls]
    asked = by_key(monkeypatch)

    def keys(*turns: int) -> int:
        asked.clear()
        for turn in turns:
            assert kept.find("f", calls[turn], 3, (1.0, True, None))[1] is launches[turn]
        return len(asked)

    assert keys(*[0, 1] * 20) == 20
    assert keys(*[0], *[1] * 20) == 8
    assert keys(*[1, 0] * 20) == 20


def test_under_autocast_calls_go_by_keys_and_none_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = keep(given())
    asked = by_key(monkeypatch)
    monkeypatch.setattr(kept, "casts", lambda *given: False)
    monkeypatch.setattr(kept, "_remember", lambda *given: pytest.fail("remembered"))
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            assert kept.find("f", given(), 3, (1.0, True, None))[1] is launch
    assert len(asked) == 10
    assert kept.find("f", given(), 3, (1.0, True, None))[1] is launch and len(asked) == 10


def test_the_last_call_is_remembered_without_its_tensors() -> None:
    tensors = given()
    refs = [weakref.ref(t) for t in tensors if t is not None]
    keep(tensors)
    del tensors
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


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
