"""Goal: a browser keeps its stream through an outage."""

from fastapi import FastAPI, Request

import aiopersist as ap
from aiopersist import fastapi as apf
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.fastapi.caller import Caller


async def test_a_browser_comes_back_while_a_store_does_not_answer() -> None:
    """Goal: it would not after another status than 200; for others it is 503."""
    faults = Faults()
    stores = FaultyBlob(ap.open_blob("mem://"), faults), FaultyConsensus(ap.open_consensus("mem://"), faults)
    settings = ap.Settings(retry_timeout_s=0.0)
    app = FastAPI()
    apf.add_exception_handlers(app)
    async with ap.open(blob=stores[0], consensus=stores[1], settings=settings) as client:
        table = client.table("t", key=str, val=int)
        await table.put("a", 1)

        @app.get("/changes")
        async def changes(request: Request) -> apf.EventStream:
            return apf.event_stream(request, table.changes)

        faults.rates = {Outcome.REFUSED: 1.0}
        async with Caller(app, "/changes") as caller:
            await caller.done()
            assert caller.status == 503
        async with Caller(app, "/changes", accept="text/event-stream") as caller:
            await caller.done()
            (problem,) = caller.seen()
            assert (caller.status, problem.name, problem.data["status"]) == (200, "problem", 503)
            assert caller.ended
        faults.heal()
        async with Caller(app, "/changes", accept="text/event-stream") as caller:
            await caller.events(1)
