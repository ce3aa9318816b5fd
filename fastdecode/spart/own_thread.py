"""Computing in a thread that ends, so that the threads that OpenMP made for it end too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread of its own and wait for it. Raises what it raises.

    OpenMP keeps a team of threads for each thread that has computed. Once all teams together have more threads than
    there are CPUs, GCC's OpenMP lets its threads sleep after each product instead of waiting for the next one. So a
    team that is left over from loading a model slows down the thread that decodes.
    """
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function(*args, **kwargs))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=call, daemon=True)  # ctrl-C ends the process without it
    thread.start()
    thread.join()
    return result.result()
