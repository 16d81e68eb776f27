"""The mask of a command line, such as `Document([1000, 3096]) & Causal()`: read, never evaluated."""

from __future__ import annotations

import ast
from typing import Any

from warploom import masks
from warploom.runtime.suggest import meant


def builders() -> dict[str, type]:
    """The mask builders by name, but for ColumnMask: it takes tensors, which a command line cannot hold."""
    public = [getattr(masks, name) for name in masks.__all__]
    classes = [item for item in public if isinstance(item, type) and issubclass(item, masks.Mask)]
    return {item.__name__: item for item in classes if item not in (masks.Mask, masks.ColumnMask)}


def parse_mask(text: str) -> Any:
    """The mask that `text` describes.

    Args:
        text: a builder of `warploom.masks` called with numbers, booleans, None and lists of them, or several
            joined by `&` and `|`.

    Raises:
        ValueError: the text is anything else, or the builder refuses its arguments.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"--mask: {text!r} cannot be read: {error.msg}") from None
    return _build(tree.body, text)


def _build(node: ast.expr, text: str) -> Any:
    known = builders()
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return _build(node.left, text) & _build(node.right, text)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _build(node.left, text) | _build(node.right, text)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in known:
        names = ", ".join(sorted(known))
        near = meant(ast.unparse(node).partition("(")[0], known, "{}(...)")
        raise ValueError(f"--mask: {ast.unparse(node)!r} is no mask; the builders are {names}{near}")
    name = node.func.id
    try:
        positional = [ast.literal_eval(argument) for argument in node.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except ValueError:
        message = f"--mask: {name} takes numbers, booleans, None and lists of them, got {text!r}"
        raise ValueError(message) from None
    try:
        return known[name](*positional, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--mask: {name}: {error}") from None
