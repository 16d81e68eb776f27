"""The CuTe DSL modules that the GPU tests load, named and built without a GPU: `python -m tests.gpu_modules --cache FOLDER`.

The tests run on a GPU that is pretended (`tools/frozen/pretend.py`): calls take the way of CUDA tensors, nothing is computed or
compared, and a module that would be loaded is written down. `--list` only names them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.attention import harness, packed
from tests.delta import delta_model
from tests.distributed import drawn, test_gpu_ranks
from tools.frozen.pretend import Recorder, hopper
from warploom.attention import judge, reference
from warploom.commands import build
from warploom.delta import reference as delta_reference
from warploom.delta.problem import DeltaCall
from warploom.runtime import modules
from warploom.runtime.module_spec import ModuleSpec


def _forward(args) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """Of the reference the shapes and who takes part in gradients."""
    out = (args.q.sum(-1, keepdim=True) * 0).expand(*args.q.shape[:-1], args.v.shape[-1]) + 0 * (args.k.sum() + args.v.sum())
    if args.sink is not None:
        out = out + 0 * args.sink.sum()
    lse = out[..., 0]
    return out, (lse.transpose(1, 2) if args.q.ndim == 4 else lse.transpose(0, 1))


def _delta(call: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor]:
    """Of the gated delta rule's reference the shapes."""
    shape = (call.sequences, call.v.shape[2], call.q.shape[3], call.v.shape[3])
    return torch.zeros_like(call.v), call.v.new_zeros(shape, dtype=call.accumulator)


def _delta_backward(call: DeltaCall, dout: Tensor, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    """As ``_delta``, of gradients."""
    return call.q, call.k, call.v, call.beta, call.decay, call.state


def _delta_model(call: DeltaCall, dout: Tensor, dstate: Tensor | None, *, exact: bool) -> delta_model.Results:
    """As ``_delta``, of its model."""
    return delta_model.Results(*_delta(call, True), call.q, call.k, call.v, call.beta, call.decay, call.state)


class _Generator(torch.Generator):
    """Of a device that is not there: the CPU's."""

    def __new__(cls, device: object = None) -> torch.Generator:
        return super().__new__(cls)


def loaded(expression: str = "", *paths: str) -> list[ModuleSpec]:
    """Modules of the tests marked gpu that pytest's ``-k`` expression chooses; what the tests print goes to stderr."""
    found: dict[str, ModuleSpec] = {}

    def load(spec: ModuleSpec) -> Callable[..., None]:
        found[spec.name] = spec
        return lambda *arguments: None

    options = ["-m", "gpu", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(hopper(Recorder()))
        for target, name, value in (
            (reference.BACKEND, "forward", _forward),
            (delta_reference.BACKEND, "forward", _delta),
            (delta_reference.BACKEND, "backward", _delta_backward),
            (delta_model, "results", _delta_model),
            (harness, "check", harness.results),
            (packed.Packed, "check", lambda case, *arguments: case.results(*arguments)),  # of its own class
            (torch, "equal", lambda *tensors: True),
            (torch.testing, "assert_close", lambda *tensors, **options: None),
            (judge.Verdict, "passed", property(lambda verdict: True)),
            (torch, "Generator", _Generator),
            (torch.cuda, "device_count", lambda: 2),
            (test_gpu_ranks, "run", drawn.played),
            (modules, "load", load),
        ):
            stack.enter_context(patch.object(target, name, value))
        code = pytest.main([*options, *(["-k", expression] if expression else []), *paths])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # what looks at numbers fails, after it has loaded
        raise RuntimeError(f"pytest ended with {code!r}")
    return [found[name] for name in sorted(found)]


def main(arguments: list[str] | None = None) -> int:
    """Name the modules, and build those that the cache lacks."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_modules", description=__doc__.split("\n")[0])
    parser.add_argument("--cache", metavar="FOLDER", help="WARPLOOM_CACHE of the machine that has the GPU")
    parser.add_argument("--list", action="store_true", help="name the modules and build none")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="as pytest's: of these tests only")
    parser.add_argument("paths", nargs="*", default=["tests"], help="as pytest's (default: all tests)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not options.list and not options.cache:
        parser.error("--cache names the folder to build into; --list builds nothing")
    if options.cache:
        os.environ["WARPLOOM_CACHE"] = os.path.abspath(options.cache)
    specs = loaded(options.k, *options.paths)
    missing = [spec for spec in specs if not options.cache or not modules.built(spec)]
    if options.list:
        print("\n".join(spec.name for spec in missing))
        return 0
    rows = build.build_all(missing, options.jobs, quiet=False)
    errors = [row for row in rows if "error" in row]
    print(f"{len(specs)} modules, {len(missing) - len(errors)} built, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
