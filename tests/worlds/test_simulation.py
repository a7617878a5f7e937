"""Goal: a world is honest: a crash ends everything at once, what was sent may still happen, clocks are
wrong, no time is waited for, and a world that fails is found, made smaller and told so that it can be
played again."""

import asyncio
import gc
import warnings
from contextlib import suppress
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.simulation import CALM, Crashed, Failure, Weather, World, search, simulate
from aiopersist.testing.simulation.loop import Stuck
from tests.worlds.programs.beside import NOTES


async def naive(client: ap.Client) -> None:
    orders, mails = client.table("orders", str, int), client.table("mails", str, str)
    if await orders.get("o1") is None:
        await orders.put("o1", 20)
        await mails.put("o1", "thank you")  # a crash before it, and no mail is ever sent


async def outbox(world: World) -> None:
    world.size("orders", 1, 5)
    await world.machine("shop").supervise(naive)
    await world.heal()
    async with world.open() as client:
        assert await client.table("mails", str, str).get("o1") == "thank you"


def test_a_bug_is_found_and_the_world_made_smaller() -> None:
    with pytest.raises(Failure) as failed:
        search(outbox, range(200, 400))
    found = failed.value
    assert found.weather.kinds == ["crashes"] and found.sizes == {"orders": 1}
    assert f"simulate(scenario, {found.seed}, Weather(crashes=0.5), {{'orders': 1}})" in str(found)
    with pytest.raises(AssertionError):
        simulate(outbox, found.seed, found.weather, found.sizes)


def test_all_of_the_weather_is_told() -> None:
    weather = Weather(latency_s=3.0, slow=0.1, slow_s=7.0)

    async def late(world: World) -> None:
        async with world.machine("a").open() as client:
            await client.table("t", str, int).put("k", 1)
        assert world.now_s < 3.0

    with pytest.raises(Failure, match=r"Weather\(latency_s=3\.0, slow_s=7\.0\)") as failed:
        search(late, range(20), weather)
    with pytest.raises(AssertionError):
        simulate(late, failed.value.seed, Weather(latency_s=3.0, slow_s=7.0), failed.value.sizes)


def test_what_fails_by_pytest_is_found_as_well() -> None:
    async def failing(world: World) -> None:
        if world.size("one", 0, 3) > 1:
            pytest.fail("as a test does")

    with pytest.raises(Failure, match="Failed: as a test does") as failed:
        search(failing, range(20))
    assert failed.value.sizes == {"one": 2} and failed.value.weather == CALM


def test_a_scenario_that_does_not_repeat_is_told() -> None:
    ran: list[int] = []

    async def once(world: World) -> None:
        ran.append(world.seed)
        assert len(ran) != 3

    with pytest.raises(Failure, match="did not fail a second time"):
        search(once, range(20))


def test_an_error_that_nobody_was_told_fails_the_world_unless_its_machine_crashed() -> None:
    async def scenario(world: World) -> None:
        kept: list[Any] = []

        async def failing() -> None:
            raise KeyError("nobody awaits it")

        async def program() -> None:
            kept.append(asyncio.create_task(failing()))
            await world.sleep(1.0)

        running = world.machine("a").start(program())
        await world.sleep(0.5)
        if crashes:
            world.machine("a").crash()
        with suppress(Crashed):
            await running

    crashes = True
    simulate(scenario, 1, CALM)
    crashes = False
    with pytest.raises(KeyError) as raised:
        simulate(scenario, 1, CALM)
    assert any("nobody was told" in note for note in raised.value.__notes__)


def test_a_crash_runs_nothing_any_more() -> None:
    cleaned_up: list[float] = []

    async def scenario(world: World) -> None:
        async def program() -> None:
            try:
                await world.sleep(10)
            finally:
                cleaned_up.append(world.now_s)

        running = world.machine("a").start(program())
        await world.sleep(1)
        world.machine("a").crash()
        with pytest.raises(Crashed):
            await running
        await world.sleep(20)
        assert not cleaned_up  # only the end of the world takes it down

    simulate(scenario, 1, CALM)


def test_what_was_sent_may_happen_after_the_crash() -> None:
    ends: set[Any] = set()

    async def scenario(world: World) -> None:
        async with world.open() as honest:
            table = honest.table("t", str, int)
            await table.put("k", 0)

            async def program() -> None:
                async with world.machine("a").open() as client:
                    await client.table("t", str, int).put("k", 1)

            world.machine("a").start(program())
            await world.sleep(world.dice.uniform(0, 0.05))
            world.machine("a").crash()
            await world.network.settle()
            ends.add(await table.get("k"))

    for seed in range(20):
        simulate(scenario, seed, CALM)
    assert ends == {0, 1}


def test_no_time_is_waited_for_and_clocks_of_machines_are_wrong() -> None:
    async def scenario(world: World) -> None:
        ahead = [world.machine(name).runtime.wall() - world.runtime.wall() for name in "ab"]
        await world.sleep(86400)
        drifted = [world.machine(name).runtime.wall() - world.runtime.wall() for name in "ab"]
        assert ahead[0] != ahead[1] and drifted != ahead

    assert simulate(scenario, 1, CALM).seconds > 86400


def test_ready_tasks_run_in_any_order() -> None:
    orders = set()

    async def scenario(world: World) -> None:
        ran: list[int] = []

        async def one(number: int) -> None:
            ran.append(number)

        await asyncio.gather(*(one(number) for number in range(3)))
        orders.add(tuple(ran))

    for seed in range(60):
        simulate(scenario, seed, CALM)
    assert len(orders) == 6


def test_a_world_in_which_nothing_will_happen_says_so() -> None:
    async def scenario(world: World) -> None:
        world.runtime = None  # type: ignore[assignment]
        raise Stuck("as the loop does")

    with pytest.raises(Stuck) as stuck:
        simulate(scenario, 5, CALM)
    assert "seed 5" in stuck.value.__notes__[0]


def test_a_machine_that_is_cut_off_is_refused() -> None:
    async def scenario(world: World) -> None:
        machine = world.machine("a")

        async def program() -> None:
            async with machine.open(settings=ap.Settings(retry_timeout_s=0.1)) as client:
                await client.table("t", str, int).put("k", 1)
                machine.cut_off(60)
                with pytest.raises((ap.StorageUnavailable, ap.Indeterminate)):
                    await client.table("t", str, int).put("k", 2)

        await machine.start(program())

    simulate(scenario, 1, CALM)


async def test_a_world_may_be_played_where_a_loop_runs() -> None:
    async def scenario(world: World) -> None:
        await world.sleep(1)

    assert simulate(scenario, 1, Weather()).seconds >= 1


def test_objects_are_frozen_afterwards_if_they_were_before() -> None:
    async def scenario(world: World) -> None:
        await world.sleep(1)

    try:
        gc.unfreeze()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what worlds that failed before were about to await
            gc.collect()
        simulate(scenario, 1, CALM)
        assert gc.get_freeze_count() == 0
    finally:
        gc.collect()
        gc.freeze()  # as `conftest.py` does
    simulate(scenario, 1, CALM)
    assert gc.get_freeze_count() > 0


def test_a_backup_is_put_back() -> None:
    """Goal: what was committed after the backup is gone, in a stash, too; a client that goes on is told."""

    async def scenario(world: World) -> None:
        machine = world.machine("a")

        async def program(val: int) -> None:
            async with machine.open() as client, machine.stash() as stash:
                await client.table("t", str, int).put("k", val)
                await NOTES.upsert_key(stash, "k", val)

        async with world.open() as onlooker:
            await machine.start(program(1))
            backup = world.backup()
            await machine.start(program(2))
            assert await onlooker.table("t", str, int).get("k") == 2
            world.restore(backup)
            with pytest.raises(ap.Corruption):
                await onlooker.table("t", str, int).get("k")
        async with world.open() as client, machine.stash() as stash:
            assert await client.table("t", str, int).get("k") == 1
            assert await NOTES.peek_one(stash) == {"k": 1}

    simulate(scenario, 1, CALM)


def test_a_machine_may_be_cut_off_from_one_store() -> None:
    async def scenario(world: World) -> None:
        machine, brief = world.machine("a"), ap.Settings(retry_timeout_s=0.1)

        async def program() -> None:
            async with machine.open(settings=brief) as client, machine.stash() as stash:
                await NOTES.upsert_key(stash, "k", 1)
                machine.cut_off(60, ["blob"])
                await NOTES.upsert_key(stash, "k", 2)
                assert await client.list_shards() == {}
                machine.cut_off(60, ["consensus"])
                with pytest.raises((ap.StorageUnavailable, ap.Indeterminate)):
                    await client.list_shards()

        await machine.start(program())

    simulate(scenario, 1, CALM)
