from collections.abc import Callable
from typing import Any, overload

@overload
def tree_flatten(
    tree: Any,
    prefix: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
    destination: None = None,
) -> list[tuple[str, Any]]: ...
@overload
def tree_flatten(
    tree: Any,
    prefix: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
    *,
    destination: dict[str, Any],
) -> dict[str, Any]: ...
def tree_unflatten(tree: list[tuple[str, Any]] | dict[str, Any]) -> Any: ...
def tree_map(
    fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any: ...
def tree_map_with_path(
    fn: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    path: str | None = None,
) -> Any: ...
