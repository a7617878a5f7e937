"""Probes for load balancers and Kubernetes: does this process run, and do its stores answer?"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from aiopersist.fastapi.attached import attached
from aiopersist.fastapi.problems import NOT_READY, RETRY_AFTER_S, problem_response

READY_S = 5.0  # longer than a store takes under load; a probe may give up sooner and ask again
NO_STORE = {"Cache-Control": "no-store"}

health = APIRouter()
"""`app.include_router(apf.health)` adds two paths, which are not in the API's schema.

- `GET /livez`: 200 while the process answers. No request to the stores, since restarting a process does not
  repair a store.
- `GET /readyz`: 200 if both stores answer within 5 s, otherwise 503 with `Retry-After`; also 503 as soon as
  the server is ending. Two or three requests to the stores, shared by concurrent probes.
"""


async def livez() -> Response:
    return JSONResponse({"status": "ok"}, headers=NO_STORE)


async def readyz(request: Request) -> Response:
    attached_client = attached(request)
    if attached_client.ending.has_begun or not await attached_client.is_ready(READY_S):
        return problem_response(NOT_READY, {**NO_STORE, "Retry-After": str(RETRY_AFTER_S)})
    return JSONResponse({"status": "ok"}, headers=NO_STORE)


for path, endpoint in (("/livez", livez), ("/readyz", readyz)):
    health.add_api_route(path, endpoint, include_in_schema=False)
