"""Definitions: what steps and flows are, their options, verdicts and retry policies."""
