"""What differs between two recordings, in lines that can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# Only help to read a difference, or repeat what is beside them.
_UNCOMPARED = ("digest", "names")
PARTS = ("plans", "triton", "modules", "bits", "host")


def compare(before: dict[str, Any], after: dict[str, Any], most: int = 20) -> tuple[list[str], bool]:
    """Lines to print, and whether all but host times is equal; of each part at most `most` kinds of difference are named."""
    lines = [f"note: {line}" for line in differences(before.get("made"), after.get("made"), "made with")]
    equal = True
    for part in PARTS:
        a, b = before.get(part), after.get(part)
        if a is None and b is None:
            continue
        if a is None or b is None:
            lines.append(f"{part}: recorded in {'AFTER' if a is None else 'BEFORE'} alone")
            equal = False
        elif part == "host":
            lines += _ratios(a, b)
        else:
            found = _part(part, a, b, most)
            equal = equal and found[0].endswith("equal")
            lines += found
    if not any(part in before for part in PARTS):
        return [*lines, "BEFORE holds no part"], False
    return lines, equal


def _part(part: str, a: dict[str, Any], b: dict[str, Any], most: int) -> list[str]:
    """The first line says how much differs; the kinds of difference follow, the most frequent first."""
    outer = [list(differences({n: v for n, v in a.items() if n != "entries"}, {n: v for n, v in b.items() if n != "entries"}))]
    ours, theirs = a["entries"], b["entries"]
    kinds: dict[str, list[str]] = {}
    differing = 0
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            found = [f"only {'AFTER' if name not in ours else 'BEFORE'}"]
        else:
            found = list(differences(ours[name], theirs[name]))
        differing += bool(found)
        for kind in dict.fromkeys(found):
            kinds.setdefault(kind, []).append(name)
    if not differing and not outer[0]:
        return [f"{part}: {len(ours)} equal"]
    lines = [f"{part}: {differing} of {len({*ours, *theirs})} differ", *(f"    {line}" for line in outer[0])]
    ordered = sorted(kinds.items(), key=lambda item: -len(item[1]))
    for kind, names in ordered[:most]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"    {kind}   [{names[0]}{more}]")
    if len(ordered) > most:
        lines.append(f"    … and {len(ordered) - most} more kinds of difference (--most)")
    return lines


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """A line for each value that is another, with the way to it."""
    if isinstance(a, dict) and isinstance(b, dict):
        if "digest" in a and a["digest"] == b.get("digest"):
            return
        yield from _of_dicts(a, b, path)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            label = f"{n} ({x['kernel']})" if isinstance(x, dict) and "kernel" in x else str(n)
            yield from differences(x, y, _joined(path, label))
    elif json.dumps(a) != json.dumps(b):  # NaN equals itself
        if isinstance(a, list) and isinstance(b, list):
            yield f"{path}: {len(a)} [{_short(a)}] → {len(b)} [{_short(b)}]"
        else:
            yield f"{path}: {_short(a)} → {_short(b)}"


def _of_dicts(a: dict[str, Any], b: dict[str, Any], path: str) -> Iterator[str]:
    for name in dict.fromkeys([*a, *b]):
        if name in _UNCOMPARED:
            continue
        if name not in a or name not in b:
            yield f"{_joined(path, name)}: only {'AFTER' if name not in a else 'BEFORE'}"
            continue
        x, y, names = a[name], b[name], a.get("names")
        if name == "values" and names and isinstance(y, list) and len(names) == len(x) == len(y):
            for parameter, u, v in zip(names, x, y, strict=True):
                yield from differences(u, v, _joined(path, parameter))
        else:
            yield from differences(x, y, _joined(path, name))


def _joined(path: str, name: str) -> str:
    return f"{path}, {name}" if path else name


def _short(value: Any) -> str:
    """In one line: of launches the kernels' names."""
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        return ", ".join(str(v.get("kernel", v.get("sass", v))) for v in value)
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 160 else f"{text[:157]}…"


def _ratios(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    lines = [f"host: microseconds on {a['device']} → on {b['device']}"]
    for name in dict.fromkeys([*a["entries"], *b["entries"]]):
        x, y = a["entries"].get(name), b["entries"].get(name)
        ratio = f"  ×{y / x:.2f}" if x and y else ""
        lines.append(f"    {name:<32} {x} → {y}{ratio}")
    return lines
