"""Plain classes of what a role of a kernel works on."""

from __future__ import annotations

import inspect
from typing import Any, Self, dataclass_transform


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Fields:
    """A class that declares its fields and takes each by name; TypeError for one that is missing or not declared.

    No dataclass and no namespace: the DSL would carry the fields of either through every loop.
    """

    def __init__(self, **values: Any) -> None:
        declared = [name for kind in type(self).__mro__ for name in inspect.get_annotations(kind)]
        if sorted(values) != sorted(declared):
            missing, unknown = set(declared) - set(values), set(values) - set(declared)
            raise TypeError(f"{type(self).__name__}: missing {sorted(missing)}, not declared {sorted(unknown)}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is given once; `but` makes another")

    def but(self, **values: Any) -> Self:
        """The same with other values."""
        return type(self)(**{**self.__dict__, **values})
