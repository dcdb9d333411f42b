"""States of runs, steps and waits, and the transitions between them.

The tables' CHECKs, the conditional statements of the verbs and the docs' diagram are made from what
stands here. A state is written with the transition that leads to it.
"""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """Life of a run."""

    READY = "ready"  # start, wake, hand-over, rescue: owed a wake-up
    RUNNING = "running"  # claim: a process replays and runs steps
    PARKED = "parked"  # park: nothing is held, something else will wake it
    CANCELLING = "cancelling"  # cancel with steps in flight: they settle first
    COMPLETED = "completed"  # finish; final
    FAILED = "failed"  # finish, crash limit; `retry` reopens it
    CANCELLED = "cancelled"  # cancel; final


class StepState(StrEnum):
    """Life of a step."""

    QUEUED = "queued"  # published to a queue, no process has it
    STARTED = "started"  # intent, or claimed by the process that performs it
    WAITING = "waiting"  # a timer, a child run, or the branches of a gather
    RETRYING = "retrying"  # an attempt failed, the next has a committed deadline
    IN_DOUBT = "in_doubt"  # outcome unknown; a person decides
    COMPLETED = "completed"  # outcome recorded; final
    FAILED = "failed"  # failed for good; `retry` of its run may reopen it
    REJECTED = "rejected"  # its run was cancelled before it started; final


class WaitState(StrEnum):
    """Life of a wait."""

    OPEN = "open"  # somebody or something still owes an answer
    DECIDED = "decided"  # answered: verdict, due timer, last branch
    EXPIRED = "expired"  # its time to live passed first
    CLOSED = "closed"  # its run ended without it


class StepKind(StrEnum):
    """What a row of `steps` stands for."""

    STEP = "step"  # a decorated step
    CHILD = "child"  # a child run
    GATHER = "gather"  # the branches that follow it, all of them
    FIRST = "first"  # the branches that follow it, the first of them
    SLEEP = "sleep"  # a durable timer
    RECORD = "record"  # now, uuid4, random, patched: a value read once


class WaitKind(StrEnum):
    """What a run can wait for."""

    TIMER = "timer"  # flow.sleep
    RETRY = "retry"  # the deadline of a step's next attempt
    STEPS = "steps"  # every branch of a gather, or one queued step
    FIRST = "first"  # any branch of a flow.first
    DOUBT = "doubt"  # a verdict on an ambiguous step
    CODE = "code"  # a deploy or an operator: history and code disagree


class AttemptOutcome(StrEnum):
    """How an attempt ended when it was not a plain success."""

    FAILED = "failed"  # an exception that says it did not work
    AMBIGUOUS = "ambiguous"  # an exception that does not say
    LOST = "lost"  # its process died
    NOT_EXECUTED = "not_executed"  # a reconcile hook or a person says it had no effect


RUN_TRANSITIONS: dict[RunState, dict[str, RunState]] = {
    RunState.READY: {"claim": RunState.RUNNING, "cancel": RunState.CANCELLED, "crash limit": RunState.FAILED},
    RunState.RUNNING: {
        "hand over": RunState.READY,
        "rescue": RunState.READY,
        "park": RunState.PARKED,
        "complete": RunState.COMPLETED,
        "fail": RunState.FAILED,
        "cancel": RunState.CANCELLING,
    },
    RunState.PARKED: {
        "wake": RunState.READY,
        "cancel": RunState.CANCELLED,
        "cancel, steps in flight": RunState.CANCELLING,
    },
    RunState.CANCELLING: {"last step settled": RunState.CANCELLED},
    RunState.COMPLETED: {},
    RunState.FAILED: {"retry": RunState.READY},
    RunState.CANCELLED: {},
}

STEP_TRANSITIONS: dict[StepState, dict[str, StepState]] = {
    StepState.QUEUED: {"claim": StepState.STARTED, "cancel": StepState.REJECTED},
    StepState.STARTED: {
        "complete": StepState.COMPLETED,
        "fail": StepState.FAILED,
        "retry later": StepState.RETRYING,
        "ambiguous": StepState.IN_DOUBT,
        "rescue": StepState.QUEUED,
        "cancel": StepState.REJECTED,
    },
    StepState.WAITING: {
        "complete": StepState.COMPLETED,
        "fail": StepState.FAILED,
        "cancel": StepState.REJECTED,
    },
    StepState.RETRYING: {
        "due": StepState.QUEUED,
        "start": StepState.STARTED,
        "complete": StepState.COMPLETED,
        "fail": StepState.FAILED,
        "ambiguous": StepState.IN_DOUBT,
        "cancel": StepState.REJECTED,
    },
    StepState.IN_DOUBT: {
        "verdict completed": StepState.COMPLETED,
        "verdict failed": StepState.FAILED,
        "expire": StepState.FAILED,
        "verdict not executed": StepState.RETRYING,
        "verdict not executed, queued": StepState.QUEUED,
        "cancel": StepState.REJECTED,
    },
    StepState.COMPLETED: {},
    StepState.FAILED: {
        "retry": StepState.RETRYING,
        "retry, queued": StepState.QUEUED,
        "retry, child": StepState.WAITING,
        "retry of an expired doubt": StepState.IN_DOUBT,
    },
    StepState.REJECTED: {},
}

RUN_ENDED = (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED)
STEP_SETTLED = (StepState.COMPLETED, StepState.FAILED, StepState.REJECTED)


def quoted(*states: StrEnum) -> str:
    """SQL list of states, for a CHECK, an index predicate or an IN."""
    return ", ".join(f"'{state.value}'" for state in states)
