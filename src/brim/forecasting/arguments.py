"""The tensors in the arguments and results of an operation, and what its schema says about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["pick", "replaced", "returned_arguments", "tensors_in"]


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among arguments or results: single ones, and those in lists and tuples."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(value, {}))
    return found


def replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], news: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each tensor replaced, in the order of `tensors_in`."""
    following = iter(news)
    return (
        tuple(_replaced_one(value, following) for value in args),
        {key: _replaced_one(value, following) for key, value in kwargs.items()},
    )


def returned_arguments(schema: Any) -> tuple[int | str, ...] | None:
    """For each result the position or name of the argument that it is, for `pick`; None if some result is new."""
    where: dict[str, int | str] = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for name in argument.alias_info.before_set:
                where[name] = argument.name if argument.kwarg_only else position
    found: list[int | str] = []
    for returned in schema.returns:
        names = () if returned.alias_info is None else returned.alias_info.before_set
        name = next((name for name in names if name in where), None)
        if name is None:
            return None
        found.append(where[name])
    return tuple(found)


def pick(where: tuple[int | str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of an operation that returns its own arguments."""
    found = [args[place] if isinstance(place, int) else kwargs[place] for place in where]
    if not found:
        return None
    return found[0] if len(found) == 1 else tuple(found)


def _replaced_one(value: Any, following: Iterator[Any]) -> Any:
    # Not a closure that calls itself: such a function is a reference cycle, and would keep tensors alive until the
    # garbage collector runs.
    if isinstance(value, torch.Tensor):
        return next(following)
    if isinstance(value, (list, tuple)):
        return type(value)([_replaced_one(member, following) for member in value])
    return value
