"""Execute Python snippets in one namespace: JSON [[name, source], ...] in, [[printed, error], ...] out.

A snippet that ends in a dense mask shows it: one line a query, ■ visible, · hidden.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
import traceback


def run(source: str, name: str, namespace: dict[str, object]) -> None:
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        if str(getattr(value, "dtype", None)) == "torch.bool":
            for row in value[0, 0].tolist():  # type: ignore[index]
                print(" ".join("■" if seen else "·" for seen in row))


def main() -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    outputs = []
    for name, source in json.load(sys.stdin):
        printed, error = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            try:
                run(source, name, namespace)
            except Exception:
                error = traceback.format_exc()
        outputs.append([printed.getvalue(), error])
        if error:
            break
    json.dump(outputs, sys.stdout)


if __name__ == "__main__":
    main()
