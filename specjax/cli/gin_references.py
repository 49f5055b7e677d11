"""Which bindings of gin's configuration a call will read, found before the call."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import gin

_MACRO = "gin.macro"
Key = tuple[tuple[str, ...], str]


def check_references(root: str, overrides: Sequence[str], registered: Collection[str]) -> None:
    """Follows all references from a function that will be called.

    Args:
      root: the function's name in gin, with its module.
      overrides: names that were bound on the command line, such as `OPT.alpha`.
      registered: names in gin, with their modules, that nothing but references calls. A user's own
        configurable may be called in Python too.

    Raises:
      ValueError: a name refers to itself, a name without a definition is used, or an override binds
        what nothing uses.
    """
    used: set[tuple[str, str]] = set()
    done: set[Key] = set()
    unevaluated: list[Key] = [((), root)]
    while unevaluated:  # each by itself: handing over a function does not call it
        _follow(unevaluated.pop(), [], done, used, unevaluated)
    for name in overrides:
        if "." not in name:
            continue
        key = gin.config.ParsedBindingKey.parse(name)
        selector = key.complete_selector
        if selector in registered and (key.scope, selector) not in used:
            scope = f" in the scope {key.scope}" if key.scope else ""
            raise ValueError(
                f"--gin.{name}: nothing here uses {key.given_selector}{scope}: leave it out, or "
                "choose what it belongs to"
            )


def _follow(
    key: Key, path: list[Key], done: set[Key], used: set[tuple[str, str]], unevaluated: list[Key]
) -> None:
    if key in path:
        circle = [*path[path.index(key) :], key]
        raise ValueError(
            f"the gin files define {_name(key)} by itself ({' -> '.join(map(_name, circle))}): "
            "give one of them another value"
        )
    if key in done:
        return
    done.add(key)
    scopes, selector = key
    bindings: dict[str, Any] = {}
    for i in range(len(scopes) + 1):  # as gin looks them up: the inner scope overrides
        place = "/".join(scopes[:i]), selector
        used.add(place)
        bindings.update(gin.config._CONFIG.get(place, {}))
    for reference in _references(list(bindings.values())):
        scope, target = tuple(reference.scopes) or scopes, reference.configurable.selector
        if target == _MACRO and ("/".join(scope), target) not in gin.config._CONFIG:
            raise ValueError(
                f"the gin files use %{'/'.join(scope)}, but none defines it; add the file "
                f"that does, or --gin.{'/'.join(scope)}=..."
            )
        if reference.evaluate:
            _follow((scope, target), [*path, key], done, used, unevaluated)
        else:
            unevaluated.append((scope, target))


def _references(value: Any) -> Iterator[gin.config.ConfigurableReference]:
    if isinstance(value, gin.config.ConfigurableReference):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _references(pair)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _references(item)


def _name(key: Key) -> str:
    scopes, selector = key
    return "%" + "/".join(scopes) if selector == _MACRO else selector.rpartition(".")[2]
