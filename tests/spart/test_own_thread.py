"""Computing in a thread that ends."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from fastdecode.spart.linears.dense16 import Linear16, keeps16
from fastdecode.spart.own_thread import in_own_thread


def test_a_function_gets_its_arguments_and_answers_from_another_thread():
    assert in_own_thread(lambda x, *, y: (x, y, threading.get_ident()), 1, y=2)[:2] == (1, 2)
    assert in_own_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 / 0)


@pytest.mark.skipif(not keeps16(torch.device("cpu")), reason="an ISA without vectors")
def test_a_forked_process_has_a_pool_of_threads_of_its_own():
    linear, x = Linear16(torch.randn(2000, 200).bfloat16()), torch.randn(4, 200)
    torch.set_num_threads(2)
    want = linear(x)
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(linear(x), want) for _ in range(100)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
