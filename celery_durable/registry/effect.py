"""The three effect modes."""

from __future__ import annotations

from enum import StrEnum


class Effect(StrEnum):
    """What running a step twice would mean, and so how it is recorded.

    transactional: its writes and its completion are one transaction in the ledger's Postgres.
    at_most_once: recorded before it starts; an unknown outcome goes to a person.
    idempotent: the remote side drops repeats of its effect id; it may run again.
    """

    TRANSACTIONAL = "transactional"
    AT_MOST_ONCE = "at_most_once"
    IDEMPOTENT = "idempotent"
