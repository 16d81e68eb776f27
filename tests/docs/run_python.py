"""Execute Python snippets in one namespace: JSON [[name, source], ...] in, [[printed, error], ...] out."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback


def main() -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    outputs = []
    for name, source in json.load(sys.stdin):
        printed, error = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(source, name, "exec"), namespace)
            except Exception:
                error = traceback.format_exc()
        outputs.append([printed.getvalue(), error])
        if error:
            break
    json.dump(outputs, sys.stdout)


if __name__ == "__main__":
    main()
