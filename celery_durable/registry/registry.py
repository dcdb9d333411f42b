"""The steps and flows that one application knows, by name and alias."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from celery_durable.errors import DefinitionError, UnknownDefinition
from celery_durable.registry import shared
from celery_durable.registry.definitions import Flow, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_durable.registry.context import Home
    from celery_durable.registry.definitions import Definition


class Registry:
    """Names to definitions. Two definitions of one name are refused."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._own: list[Definition[..., Any]] = []
        self._by_name: dict[str, Definition[..., Any]] | None = None
        self._digest: str | None = None

    def add(self, definition: Definition[..., Any]) -> None:
        """Take a definition in."""
        definition.bind(self._home)
        self._own.append(definition)
        self._by_name = self._digest = None

    def finalize(self) -> dict[str, Definition[..., Any]]:
        """Check names, with those of shared definitions.

        Raises:
            DefinitionError: two definitions claim one name or alias.
        """
        names: dict[str, Definition[..., Any]] = {}
        for definition in [*self._own, *shared.definitions()]:
            for name in (definition.name, *definition.aliases):
                other = names.setdefault(name, definition)
                if other is not definition:
                    raise DefinitionError(
                        f"two definitions are named {name!r}: {_where(other)} and {_where(definition)}. "
                        "Give one of them another name=."
                    )
        self._by_name = names
        return names

    def _names(self) -> dict[str, Definition[..., Any]]:
        shared_count = len(shared.definitions())
        if self._by_name is None or shared_count != getattr(self, "_shared_seen", -1):
            self._shared_seen = shared_count
            self._digest = None
            return self.finalize()
        return self._by_name

    def __iter__(self) -> Iterator[Definition[..., Any]]:
        return iter(dict.fromkeys(self._names().values()))

    def find(self, name: str) -> Definition[..., Any]:
        """The definition of this name or alias.

        Raises:
            UnknownDefinition: this process has none.
        """
        found = self._names().get(name)
        if found is None:
            raise UnknownDefinition(
                f"this process knows no step or flow named {name!r}. Import the module that defines it in the "
                "worker's app (include= or autodiscover_tasks), or give its successor aliases=(…)."
            )
        return found

    def flow(self, name: str) -> Flow[..., Any]:
        """As `find`, for a flow."""
        found = self.find(name)
        if not isinstance(found, Flow):
            raise UnknownDefinition(f"{name!r} is a {found.kind}, not a flow")
        return found

    def step(self, name: str) -> Step[..., Any]:
        """As `find`, for a step."""
        found = self.find(name)
        if not isinstance(found, Step):
            raise UnknownDefinition(f"{name!r} is a {found.kind}, not a step")
        return found

    @property
    def digest(self) -> str:
        """Digest of every step's name and effect mode: which code a claim was made with."""
        if self._digest is None or self._by_name is None:
            modes = sorted(f"{d.name}={d.effect}" for d in self if isinstance(d, Step))
            self._digest = hashlib.sha256("\n".join(modes).encode()).hexdigest()[:16]
        return self._digest


def _where(definition: Definition[..., Any]) -> str:
    return f"{definition.__module__}.{definition.__qualname__}"
