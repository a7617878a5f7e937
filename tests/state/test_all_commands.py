"""Goal: any commands, in any order, with any clock: none fails otherwise than by a refusal, a refused
command changes nothing, and each version reads back as the state that its writer has: by its bytes, and by
a rollup of it. Commands are drawn by a seed; a failure names it."""

import os

import pytest

from aiopersist.state import (
    compaction,
    consuming,
    lifecycle,
    reading,
    retention,
    subscriptions,
    tagging,
    writing,
)
from aiopersist.state.compaction import Replace, TakeClaim
from aiopersist.state.consuming import MarkConsumed
from aiopersist.state.lifecycle import Finalize
from aiopersist.state.retention import ApplyRetention, DowngradeCritical, ForgetHistory
from aiopersist.state.subscriptions import Acknowledge, DropSubscription, LeaveSubscription, OpenSubscription
from aiopersist.state.tagging import AddTag, DropTag
from aiopersist.state.writing import AppendHollow, CloseTo, Write
from tests.state import command_game
from tests.state.command_game import play

LONG_SEEDS = int(os.environ.get("AIOPERSIST_TEST_STATES", "5000"))


def test_no_command_is_forgotten() -> None:
    """Goal: the game has every command, also the next new one."""
    modules = (writing, consuming, reading, subscriptions, compaction, retention, lifecycle, tagging)
    commands = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and "__call__" in vars(value)
    }
    assert commands - vars(command_game).keys() == {"Create"}  # the first version, before the game begins


def test_lives_of_shards() -> None:
    counts = play(range(50))
    wanted = (
        AppendHollow,
        Write,
        CloseTo,
        Replace,
        TakeClaim,
        ApplyRetention,
        ForgetHistory,
        DowngradeCritical,
        MarkConsumed,
        Finalize,
        OpenSubscription,
        Acknowledge,
        LeaveSubscription,
        DropSubscription,
        AddTag,
        DropTag,
    )
    assert all(counts[command.__name__] for command in wanted), counts
    assert counts["once"] and counts["repeat"] and counts["moved"] and counts["expired"], counts
    assert counts["tag expired"], counts


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_lives_of_shards() -> None:
    """`AIOPERSIST_TEST_STATES` says how many."""
    play(range(1000, 1000 + LONG_SEEDS))
