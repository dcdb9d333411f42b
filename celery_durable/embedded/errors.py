"""What can go wrong with embedded servers."""

from __future__ import annotations

from celery_durable.errors import ConfigurationError, TryAgain


class EmbeddedUnavailable(ConfigurationError):
    """The machine cannot run an embedded server as things are; the message says what to change."""


class ServerFailed(TryAgain):
    """A server did not start or did not end; the message holds the end of its log."""
