"""Definitions of reusable apps, which are written before any Celery app exists.

`@shared_step` and `@shared_flow` add to this list, as Celery's `shared_task` does; every `Durable(app)`
takes them over when it is finalised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_durable.registry.context import Home
    from celery_durable.registry.definitions import Definition

_definitions: list[Definition[..., object]] = []
_locator: Callable[[], Home | None] = lambda: None  # noqa: E731 - replaced by the composition root


def add(definition: Definition[..., object]) -> None:
    """Offer a definition to every app of this process."""
    _definitions.append(definition)


def definitions() -> list[Definition[..., object]]:
    """All definitions offered so far."""
    return list(_definitions)


def locate_by(locator: Callable[[], Home | None]) -> None:
    """Set how the application that is current right now is found."""
    global _locator  # noqa: PLW0603 - one seam, set once by the composition root
    _locator = locator


def home() -> Home | None:
    """The application that is current right now."""
    return _locator()
