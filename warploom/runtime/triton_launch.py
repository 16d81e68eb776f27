"""Launching a compiled Triton kernel without Triton's own launch path.

That path looks at every argument again at every call; where the caller knows that the binary fits, skipping it saves
several launches' time, and the host bounds a small step of decoding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

# The launcher behind CompiledKernel is internal to Triton; these versions take the arguments below, the later ones a kernel's
# own as one tuple.
_TUPLE = triton.__version__.startswith(("3.8.", "3.9."))
_DIRECT = _TUPLE or triton.__version__.startswith("3.6.")
# How kernels are compiled, unless the user says otherwise. Without line numbers, as ptxas allocates registers by them too: a
# forward pass took ten more when its source lines moved, the PTX being the same but for those (docs/lab-notes/compiler.md).
# With fused multiply-adds, the default up to Triton 3.9, which warns that it will change.
_SETTINGS = ("TRITON_DISABLE_LINE_INFO", "TRITON_DEFAULT_FP_FUSION")
_PLAIN = frozenset((int, float, bool, type(None)))  # what is no tensor, sooner told than by isinstance


class Launch:
    """One kernel with its constants: the first launch on a device compiles through Triton, later ones go straight.

    Args:
        kernel: a triton.jit function whose scalars are not specialised and whose constexprs come last.
        constants: its constexprs and compile options.
        direct: every later launch passes tensors of the same dtypes, None in the same places, and 16-byte aligned pointers
            where the kernel specialises on them; otherwise each goes through Triton.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], direct: bool) -> None:
        self._kernel = kernel
        self._constants = constants
        self._raw: dict[int, RawLaunch] = {}
        self._direct = direct and _DIRECT and hasattr(kernel, "params")

    def __call__(self, grid: tuple[int, int], *arguments: Any) -> None:
        """Launch a grid of programs on the current device and stream."""
        raw = self.raw()
        if raw is not None:
            stream = torch._C._cuda_getCurrentRawStream(raw.device)
            raw(grid, stream, *[a if type(a) in _PLAIN else a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])
            return
        with settings():
            compiled = self._kernel[grid](*arguments, **self._constants)
        if self._direct:
            self._remember(compiled)

    def kept(self, grid: tuple[int, int], rest: tuple[Any, ...]) -> Callable[..., None]:
        """A launch of one grid by its first arguments, tensors or what stands for them; all others stay as they are now.

        There are several dozens of those: what they are is not asked again at every launch.
        """

        def launch(*first: Any) -> None:
            raw = self.raw()
            if raw is None:
                self(grid, *first, *rest)
                return
            pointers = [None if a is None else a.data_ptr() if isinstance(a, Tensor) else a for a in first]
            # As raw(...) does: one call less, and the arguments are gathered once.
            raw.launch(*grid, 1, torch._C._cuda_getCurrentRawStream(raw.device), *raw.before, *pointers, *rest, *raw.nones)

        return launch

    def raw(self) -> RawLaunch | None:
        """The launch on the current device with pointers in place of tensors, once it is compiled."""
        if not self._direct or watched():
            return None
        return self._raw.get(torch._C._cuda_getDevice())

    def _remember(self, compiled: Any) -> None:
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
            self._direct = False
            return
        constexprs = sum(p.is_constexpr for p in self._kernel.params)
        device = torch._C._cuda_getDevice()
        self._raw[device] = RawLaunch(launcher, compiled, device, constexprs)


class RawLaunch:
    """A compiled kernel's C launcher with all but grid, stream and run-time arguments filled in."""

    __slots__ = ("before", "device", "launch", "nones")

    def __init__(self, launcher: Any, compiled: Any, device: int, constexprs: int) -> None:
        self.device = device
        self.launch = launcher.launch
        # Function, cooperative, programmatic; no scratch, metadata, no hooks.
        flags = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
        self.before = () if _TUPLE else (*flags, None, None, compiled.packed_metadata, None, None, None)
        if _TUPLE:
            self.launch = tupled(launcher, (*flags, compiled.packed_metadata, None, None, None, None, None))
        # Constexprs are baked in: the launcher takes their places and ignores them.
        self.nones = (None,) * constexprs

    def __call__(self, grid: tuple[int, int], stream: int, *arguments: Any) -> None:
        self.launch(*grid, 1, stream, *self.before, *arguments, *self.nones)

    def bound(self, grid: tuple[int, int], rest: tuple[Any, ...]) -> Callable[..., None]:
        """A launch of one grid by its first arguments, tensors, addresses or None; all others stay."""
        launch, device, before, after = self.launch, self.device, (*grid, 1), (*rest, *self.nones)
        between, stream = self.before, torch._C._cuda_getCurrentRawStream

        def run(*first: Any) -> None:
            pointers = [a if a is None or type(a) is int else a.data_ptr() for a in first]
            launch(*before, stream(device), *between, *pointers, *after)

        return run


def tupled(launcher: Any, before: tuple[Any, ...]) -> Callable[..., None]:
    """The C launcher of Triton 3.8 and later by grid, stream and the kernel's arguments."""
    launch, before = launcher.launch, (*before, launcher.arg_annotations, launcher.kernel_signature)

    def run(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        launch(x, y, z, stream, *before, arguments)

    return run


class Chain:
    """Launches of one call, which may be given addresses of memory that nobody else sees in place of tensors.

    Args:
        steps: each launch with its grid and, as `Launch.kept` has it, its last arguments.
    """

    def __init__(self, *steps: tuple[Launch, tuple[int, int], tuple[Any, ...]]) -> None:
        self._steps = steps
        self._kept = tuple([launch.kept(grid, rest) for launch, grid, rest in steps])
        self._raw: dict[int, tuple[Callable[..., None], ...]] = {}

    def launches(self) -> tuple[tuple[Callable[..., None], ...], bool]:
        """Each launch on the current device by its first arguments, and whether these may be addresses: not before all ran."""
        if self._raw and not watched():
            found = self._raw.get(torch._C._cuda_getDevice())
            if found is not None:
                return found, True
        raw = [launch.raw() for launch, _, _ in self._steps]
        if None not in raw:
            bound = [r.bound(grid, rest) for r, (_, grid, rest) in zip(raw, self._steps, strict=True) if r is not None]
            self._raw[torch._C._cuda_getDevice()] = tuple(bound)
        return self._kept, False


@contextmanager
def settings() -> Iterator[None]:
    """Compile as `_SETTINGS` say; what is in the environment already stays."""
    ours = [name for name in _SETTINGS if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "1"))
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def watched() -> bool:
    """Whether a profiler asks Triton to report launches."""
    hook = triton.knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))
