"""What somebody may have meant by a name that is none: the nearest of those that there are."""

from __future__ import annotations

from collections.abc import Iterable


def meant(got: object, names: Iterable[object], form: str = "{}") -> str:
    """The end of an error about an unknown name, "; did you mean 'causal'?", or "" where no name is near.

    Args:
        got: what stands in the name's place.
        names: those that there are; case makes no difference.
        form: how a name is written there.
    """
    from difflib import get_close_matches  # only what is wrong needs it

    known = {str(name).casefold(): str(name) for name in names}
    found = get_close_matches(str(got).casefold(), known, n=1, cutoff=0.7)
    return f"; did you mean {form.format(known[found[0]])!r}?" if found else ""
