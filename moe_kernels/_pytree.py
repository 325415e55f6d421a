"""Registers dataclasses with tensors as pytrees, for torch.export, torch.compile, FSDP, checkpointing and hooks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node


def register(cls: type[Any], constants: tuple[str, ...] = ()) -> None:
    """Makes cls a pytree node. The fields in `constants` are the node's context, all other fields its children.

    torch's register_dataclass would drop the constants: a rebuilt instance has their defaults (torch 2.13).
    """
    children = [field.name for field in fields(cls) if field.name not in constants]

    def flatten(each: Any) -> tuple[list[Any], list[Any]]:
        return [getattr(each, name) for name in children], [getattr(each, name) for name in constants]

    def flatten_with_keys(each: Any) -> tuple[list[tuple[KeyEntry, Any]], list[Any]]:
        values, context = flatten(each)
        return [(GetAttrKey(name), value) for name, value in zip(children, values, strict=True)], context

    def unflatten(values: Iterable[Any], context: list[Any]) -> Any:
        return cls(**dict(zip(children, values, strict=True)), **dict(zip(constants, context, strict=True)))

    register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
