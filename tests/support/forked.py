"""Work in a child of a fork, perhaps as another user."""

import asyncio
import faulthandler
import os
import pickle
import signal
from collections.abc import Callable, Coroutine
from typing import Any

END_S = 60  # a child that hangs ends then


def forked(work: Callable[[], Coroutine[Any, Any, Any]], begin: Callable[[], object] = lambda: None) -> Any:
    """The outcome of `work` in a child, after `begin`; an error as its type, its kind and its text."""
    return fork(work, begin)()


def fork(
    work: Callable[[], Coroutine[Any, Any, Any]],
    begin: Callable[[], object] = lambda: None,
    *,
    end_s: int = END_S,
) -> Callable[[], Any]:
    """Begin a child; the result waits for its outcome."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            faulthandler.register(signal.SIGALRM, file=2, chain=True)  # says where it hangs, and ends it
            signal.alarm(end_s)
            os.write(there, pickle.dumps(_outcome(work, begin)))
        finally:  # also where nobody reads any more
            os._exit(0)
    os.close(there)

    def told() -> Any:
        with open(here, "rb") as file:
            found = file.read()
        _, status = os.waitpid(child, 0)
        return pickle.loads(found) if status == 0 else ("Ended", None, f"the child ended by signal {status}")

    return told


def _outcome(work: Callable[[], Coroutine[Any, Any, Any]], begin: Callable[[], object]) -> Any:
    try:
        begin()
        return asyncio.run(work())
    except BaseException as error:
        return type(error).__name__, getattr(error, "kind", None), str(error)
