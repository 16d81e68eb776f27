"""One model class, eager against warploom: what is equal, refused, wrong."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import inputs as make
from .judges import MUTANT, ZEROING
from .tiny import LEVELS, tiny_config

EQUAL, REFUSED, WRONG, CRASHED, SKIPPED, UNBUILT = "equal", "refused", "WRONG", "crashed", "skipped", "cannot be built"
WORST_FIRST = (WRONG, CRASHED, REFUSED, EQUAL)
MAX_PARAMETERS = 60_000_000
TOLERANCE = 2e-4  # of the largest value compared; fp32 on both sides
NEW_TOKENS = 4

BODIES = ("Model", "ForCausalLM", "ForConditionalGeneration")

calls = 0


def sweep(model_class: type, name: str = "warploom") -> dict[str, Any]:
    """Compare the class; JSON-able: outcome, reason, stages."""
    try:
        eager, example, level = build(model_class)
    except Unbuilt as error:
        return {"outcome": UNBUILT, "reason": str(error)}
    record: dict[str, Any] = {"model_type": eager.config.model_type, "shrunk": level, "stages": {}}
    stages = record["stages"]
    try:
        ours = twin(eager, name)
    except Exception as error:
        stages["build"] = failure(error, eager)
        return record | verdict(stages)
    global calls
    calls = 0
    whole = model_class.__name__.endswith(BODIES)  # other heads stand on the same layers
    for length in (make.LENGTH, make.SHORT) if whole else (make.LENGTH,):
        for kind in ("none", "right", "left"):
            stages[f"forward {kind} {length}"] = attempt(forward_stage, eager, ours, example, kind, length)
    stages["gradients"] = attempt(gradient_stage, eager, ours, example)
    record["calls"] = calls
    for mode, options in GENERATE.items():
        if whole and eager.can_generate():
            stages[f"generate {mode}"] = attempt(generate_stage, eager, ours, example, options)
    stages["output_attentions"] = attempt(output_attentions_stage, eager, ours, example)
    stages["config.output_attentions"] = attempt(config_output_attentions_stage, eager, ours, example, name)
    if whole and calls:
        stages["mutant"] = attempt(mutant_stage, eager, example)
    return record | verdict(stages)


class Unbuilt(Exception):
    """No tiny model of this class, or no inputs for it, could be made."""


class Mismatch(AssertionError):
    """Warploom's numbers are not eager's."""


class Skip(Exception):
    """Eager itself cannot do this."""


def verdict(stages: dict[str, dict[str, str]]) -> dict[str, Any]:
    optional = ("output_attentions", "config.output_attentions", "mutant")
    main = {n: s for n, s in stages.items() if n not in optional}
    outcomes = {s["outcome"] for s in main.values()} | (
        {stages[n]["outcome"] for n in optional if n in stages} & {WRONG, CRASHED}
    )
    outcome = next((o for o in WORST_FIRST if o in outcomes), UNBUILT)
    first = next((s for s in stages.values() if s["outcome"] == outcome), {})
    return {"outcome": outcome, "reason": first.get("reason", "")}


def attempt(stage: Callable, eager: nn.Module, *args: Any) -> dict[str, str]:
    try:
        judge = stage(eager, *args)
    except Skip as error:
        return {"outcome": SKIPPED, "reason": str(error)[:300]}
    except Mismatch as error:
        return {"outcome": WRONG, "reason": str(error)[:300]}
    except Exception as error:
        return failure(error, eager)
    return {"outcome": EQUAL} | ({"judge": judge} if judge else {})


def failure(error: Exception, model: nn.Module) -> dict[str, str]:
    """A refusal is a ValueError that names the model and another implementation; anything else is a crash."""
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    names = {c.__name__ for c in type(model).__mro__} | {type(m).__name__ for m in model.modules()}
    configs = {type(getattr(m, "config", None)).__name__ for m in model.modules()}
    in_words = type(error) is ValueError and any(n in text for n in names | configs) and "attn_implementation=" in text
    outcome = REFUSED if in_words else CRASHED
    where = "" if in_words or not frames else f" ({frames[-1].filename.rsplit('site-packages/')[-1]}:{frames[-1].lineno})"
    return {"outcome": outcome, "reason": f"{type(error).__name__}: {text[:300]}{where}"}


# --- building -------------------------------------------------------------------------------------------------------


def build(model_class: type) -> tuple[nn.Module, Callable[[int], dict[str, Tensor]], str]:
    """An eager model with weights that make attention matter, and a maker of its inputs of a given length."""
    reasons = []
    for level in LEVELS:
        try:
            config = tiny_config(model_class.config_class, level)
            with torch.device("meta"):
                size = sum(p.numel() for p in construct(model_class, config, "eager").parameters())
            if size > MAX_PARAMETERS:
                raise ValueError(f"{size / 1e6:.0f} million parameters")
        except Exception as error:
            if "meta" not in str(error):
                reasons.append(f"{level}: {type(error).__name__}: {str(error)[:160]}")
                continue
        try:
            torch.manual_seed(0)
            model = construct(model_class, config, "eager").float().eval()
            enliven(model)
            return model, example_maker(model), level
        except Exception as error:
            reasons.append(f"{level}: {type(error).__name__}: {str(error)[:200]}")
    raise Unbuilt("; ".join(reasons))


def construct(model_class: Any, config: Any, implementation: str) -> nn.Module:
    return model_class._from_config(copy.deepcopy(config), attn_implementation=implementation, experts_implementation="eager")


def twin(model: nn.Module, implementation: str, config: Any = None) -> nn.Module:
    torch.manual_seed(0)
    other = construct(type(model), model.config if config is None else config, implementation).float().eval()
    other.load_state_dict(model.state_dict())
    for (_, theirs), (_, mine) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        mine.copy_(theirs)
    return other


@torch.no_grad()
def enliven(model: nn.Module) -> None:
    """Weights so large that attention is far from uniform: the usual 0.02 would hide a wrong mask."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) or type(module).__name__ == "Conv1D":
            fan_in = module.weight[0].numel() if type(module).__name__ != "Conv1D" else module.weight.shape[0]
            module.weight.normal_(0, 1 / math.sqrt(max(fan_in, 1)))
            if module.bias is not None:
                module.bias.normal_(0, 0.1)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0, 1)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and not tensor.isfinite().all():
            tensor.normal_(0, 0.1)
    model.tie_weights()


def example_maker(model: nn.Module) -> Callable[[int], dict[str, Tensor]]:
    errors = []
    for index, _ in enumerate(make.candidates(model, make.LENGTH)):

        def maker(length: int, index: int = index) -> dict[str, Tensor]:
            torch.manual_seed(1)
            return list(make.candidates(model, length))[index]

        try:
            found = run(model, maker(make.LENGTH))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            errors.append(f"{type(error).__name__}: {str(error)[:120]} ({frames[-1].name}:{frames[-1].lineno})")
            continue
        if found and any(t.isfinite().any() for t in found.values()):
            return maker
        errors.append("no finite outputs")
    raise RuntimeError("no inputs run: " + " | ".join(errors[:3] or ["none known"]))


# --- stages ---------------------------------------------------------------------------------------------------------


def run(model: nn.Module, inputs: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(2)
    with torch.no_grad():
        return flat(model(**cast(inputs, model), **options))


def cast(inputs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Floating point inputs in the model's dtype."""
    dtype = next(model.parameters()).dtype
    return {n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in inputs.items()}


def flat(value: Any, name: str = "") -> dict[str, Tensor]:
    """The floating point tensors of a model's output, caches left out."""
    if isinstance(value, Tensor):
        return {name: value} if value.is_floating_point() else {}
    if isinstance(value, dict):
        items = [(k, v) for k, v in value.items() if k not in ("past_key_values", "attentions", "cache_params")]
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return {}
    found: dict[str, Tensor] = {}
    for key, inner in items:
        found |= flat(inner, f"{name}.{key}")
    return found


def real_rows(outputs: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Rows of padding left out: a padded query that sees no key is 0 here and an average in eager."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return outputs
    mask = mask.bool()
    return {n: t[mask] if t.dim() >= 2 and t.shape[:2] == mask.shape else t for n, t in outputs.items()}


def close(result: dict[str, Tensor], expected: dict[str, Tensor], what: str, slack: dict[str, float] | None = None) -> None:
    if result.keys() != expected.keys():
        raise Mismatch(f"{what}: outputs {sorted(result)} for {sorted(expected)}")
    for name, good in expected.items():
        got = result[name]
        if got.shape != good.shape:
            raise Mismatch(f"{what}: {name} has shape {tuple(got.shape)} for {tuple(good.shape)}")
        good, got = good.double().nan_to_num(0.0, 0.0, 0.0), got.double().nan_to_num(1e30, 0.0, 0.0)
        if not good.numel():
            continue
        error, size = (got - good).abs().max().item(), good.abs().max().item()
        if error > TOLERANCE * (size + 1e-3) + (slack or {}).get(name, 0.0):
            raise Mismatch(f"{what}: {name} differs by {error:.2g} of {size:.2g}")


def forward_stage(eager, ours, example, kind, length):
    inputs = padded(eager, example(length), kind)
    try:
        expected = run(eager, inputs)
    except Exception as error:
        raise Skip(f"eager: {type(error).__name__}: {error}") from error
    finite(expected)
    with counting():
        result = run(ours, inputs)
    return same(eager, result, expected, lambda model: run(model, inputs), lambda out: real_rows(out, inputs))


def same(eager, result, expected, again: Callable, rows: Callable = lambda out: out) -> str | None:
    """Equal to eager, or else to `judges.zeroing`: its name then. Rows that see no key can reach pooled outputs.

    Where the model itself enlarges rounding errors (a GroupNorm over one pixel, say), the bar is how far fp32 is from fp64 in
    that judge: "rounding".
    """
    try:
        close(rows(result), rows(expected), "eager")
        return None
    except Mismatch as error:
        try:
            judge = twin(eager, ZEROING)
            single = rows(again(judge))
            try:
                close(rows(result), single, "zeroing")
                return "zeroing"
            except Mismatch:
                double = rows(again(judge.double()))
                noise = {
                    n: (t.double() - double[n]).nan_to_num(0.0, 0.0, 0.0).abs().max().item()
                    for n, t in single.items()
                    if t.numel()
                }
                close(rows(result), double, "rounding", {n: 10 * x for n, x in noise.items()})
                return "rounding"
        except Exception:
            raise error from None


def padded(model, inputs, kind):
    if kind == "none":
        return inputs
    masked = make.with_padding(model, inputs, kind)
    if masked is None:
        raise Skip("takes no attention_mask")
    return masked


def finite(outputs: dict[str, Tensor]) -> None:
    if not any(tensor.isfinite().any() for tensor in outputs.values()):
        raise Skip("eager: nothing but NaN")


def gradient_stage(eager, ours, example):
    inputs = example(make.LENGTH)
    for kind in ("right", "none"):
        masked = make.with_padding(eager, inputs, kind) if kind != "none" else inputs
        if masked is None:
            continue
        try:
            expected = gradients(eager, masked)
        except Exception as error:
            failed = f"eager: {type(error).__name__}: {error}"
            continue
        with counting():
            result = gradients(ours, masked)
        return same_gradients(eager, result, expected, masked)
    raise Skip(failed)


def same_gradients(eager, result, expected, inputs) -> str | None:
    try:
        close_gradients(result, expected)
        return None
    except Mismatch as error:
        try:
            judge = twin(eager, ZEROING)
            single = gradients(judge, inputs)
            try:
                close_gradients(result, single)
                return "zeroing"
            except Mismatch:
                double = gradients(judge.double(), inputs)
                close_gradients(result, double, {n: 10 * (g.double() - double[n]).norm().item() for n, g in single.items()})
                return "rounding"
        except Exception:
            raise error from None


def close_gradients(result, expected, slack: dict[str, float] | None = None) -> None:
    largest = max((g.norm().item() for g in expected.values()), default=0.0)
    for name, good in expected.items():
        if name not in result:
            raise Mismatch(f"gradients: {name} has none")
        error, size = (result[name].double() - good.double()).norm().item(), good.norm().item()
        if not error <= 1e-3 * size + 1e-5 * largest + (slack or {}).get(name, 0.0):
            raise Mismatch(f"gradients: {name} differs by {error:.2g} of {size:.2g}")


def gradients(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    outputs = real_rows({n: t for n, t in flat(model(**cast(inputs, model))).items() if t.requires_grad}, inputs)
    generator = torch.Generator().manual_seed(3)
    loss = sum((t * torch.randn(t.shape, generator=generator)).nan_to_num(0.0, 0.0, 0.0).sum() for t in outputs.values())
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


GENERATE: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "offloaded": {"cache_implementation": "offloaded"},
    "quantised": {"cache_implementation": "quantized"},
    "beams": {"num_beams": 3},
    "assisted": {"assistant": True},
}


def generate_stage(eager, ours, example, options):
    inputs = example(make.LENGTH)
    inputs = make.with_padding(eager, inputs, "left") or inputs
    inputs = {k: v for k, v in inputs.items() if not k.startswith("decoder_")}
    options = dict(options)
    assisted = options.pop("assistant", False)
    if assisted:
        inputs = {k: v[1:] for k, v in inputs.items()}

    def generated(model):
        torch.manual_seed(2)
        extra = {"assistant_model": twin(eager, model.config._attn_implementation)} if assisted else {}
        return model.generate(
            **inputs,
            **options,
            **extra,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=not assisted,
            return_dict_in_generate=True,
            disable_compile=True,
        )

    def parts(model):
        made = generated(model)
        if isinstance(made, Tensor):
            return {"sequences": made.double()}
        steps = {f"logits of step {i}": t for i, t in enumerate(getattr(made, "logits", None) or ())}
        return steps | {"sequences": made.sequences.double()}

    try:
        expected = parts(eager)
    except Exception as error:
        raise Skip(f"eager: {type(error).__name__}: {error}") from error
    with counting():
        result = parts(ours)
    return same(eager, result, expected, parts)


def output_attentions_stage(eager, ours, example):
    inputs = example(make.LENGTH)
    try:
        expected = eager(**inputs, output_attentions=True)
    except Exception as error:
        raise Skip(f"eager: {type(error).__name__}: {error}") from error
    weights = [v for n, v in expected.items() if "attentions" in n] if isinstance(expected, dict) else []
    if not any(
        (isinstance(w, (tuple, list)) and any(isinstance(x, Tensor) for x in w)) or isinstance(w, Tensor) for w in weights
    ):
        raise Skip("eager gives none")
    ours(**inputs, output_attentions=True)
    raise Mismatch("output_attentions=True is not refused")


def config_output_attentions_stage(eager, ours, example, name):
    inputs = example(make.LENGTH)
    try:
        config = copy.deepcopy(eager.config)
        config._attn_implementation = "eager"
        config.output_attentions = True
        other = twin(eager, "eager", config)
        expected = other(**inputs)
    except Exception as error:
        raise Skip(f"eager: {type(error).__name__}: {error}") from error
    if not isinstance(expected, dict) or not any("attentions" in n for n in expected):
        raise Skip("eager gives none")
    other = twin(eager, name, config)
    other(**inputs)
    raise Mismatch("config.output_attentions=True is not refused")


def mutant_stage(eager, example):
    """An attention that is wrong must be seen to be wrong, or equality says nothing."""
    inputs = example(make.LENGTH)
    inputs = make.with_padding(eager, inputs, "right") or inputs
    try:
        close(real_rows(run(twin(eager, MUTANT), inputs), inputs), real_rows(run(eager, inputs), inputs), "mutant")
    except Exception:
        return
    raise Skip("a wrong attention changes no output")


class counting:
    """Counts the calls of warploom's attention function."""

    def __enter__(self):
        from transformers import AttentionInterface

        self.interface, self.kept = AttentionInterface, AttentionInterface._global_mapping["warploom"]

        def counted(*args: Any, **kwargs: Any) -> Any:
            global calls
            calls += 1
            return self.kept(*args, **kwargs)

        AttentionInterface.register("warploom", counted)

    def __exit__(self, *error):
        self.interface.register("warploom", self.kept)
