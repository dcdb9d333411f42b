"""The ledger: rows with verbs.

Every verb takes a `Connection` and never commits: a caller composes several in one transaction
(`ledger.transaction()`), and publishes only after its commit.

The one lock order, for every transaction (five deadlocks without it):

    user rows, conversations, runs (ascending id), steps, attempts, waits, signals, deliveries, events

Rows of `workers` and `sweeps` are never locked together with any of these. Only `FOR NO KEY UPDATE`.
"""
