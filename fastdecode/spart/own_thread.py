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

    OpenMP keeps a team of threads for each thread that has computed. GCC's puts the threads of all teams to sleep after
    each product once there are more of them than CPUs. A model that the main thread had loaded would slow down the
    thread that decodes by 25 us a product.
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
