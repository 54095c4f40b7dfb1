"""What the options of several methods are checked for."""

from __future__ import annotations

from typing import get_args, get_type_hints

from rcir.errors import InvalidConfig


def require_at_least(options: object, **least: float) -> None:
    """Raise `InvalidConfig` of the first named option of a method that is too small."""
    for name, value in least.items():
        if getattr(options, name) < value:
            raise InvalidConfig(
                f"encoder.options.{name} is {getattr(options, name)}; at least {value}"
            )


def require_choices(options: object, *names: str) -> None:
    """Raise `InvalidConfig` of the first named option, a `Literal`, that is none of its values."""
    hints = get_type_hints(type(options))
    for name in names:
        choices = get_args(hints[name])
        if getattr(options, name) not in choices:
            raise InvalidConfig(
                f"encoder.options.{name} {getattr(options, name)!r} is unknown; choose one of "
                f"{', '.join(choices)}"
            )
