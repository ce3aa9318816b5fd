"""fastdecode-node with its S-Part on a lying device (lying_device.py), for which --gpu-kv has the kernels of
late_pages.py. The arguments are the node's; the API must be in the engine's process (--api-processes 0)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from fastdecode.daemon import device_plan, snode, weights
from fastdecode.daemon.node import main
from fastdecode.engine.engine import Engine
from fastdecode.spart.backend import Backend
from fastdecode.spart.own_thread import in_own_thread
from fastdecode.spart.resident.link import ResidentLink
from gpu.late_pages import late_kernels
from gpu.lying_device import NAME, LyingDevice, take_torchs_place
from gpu.lying_engine import OnDevice


def run() -> None:
    take_torchs_place()
    device = OnDevice.device = LyingDevice()

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with torch's operations on the device, in whatever thread it is called."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with device.in_thread():
                return function(*args, **kwargs)

        return call

    make_spart = Backend.make_spart

    def made(*args: Any) -> Any:
        with torch.inference_mode():  # torch makes no view of another tensor of the device without that mode
            return make_spart(*args)

    def link(*args: Any) -> ResidentLink:
        return ResidentLink(*args, late_kernels)

    patches = {
        (Backend, "make_spart"): made,
        (snode, "node_device"): lambda config: torch.device(NAME),
        (snode, "free_memory"): lambda device: 1 << 40,
        (weights, "free_memory"): lambda device: 1 << 40,
        (snode, "in_own_thread"): lambda function, *args: in_own_thread(within(function), *args),
        (snode, "open_gpu_kv"): within(device_plan.open_gpu_kv),
        (snode, "Engine"): partial(Engine, start_runner=OnDevice),
        (device_plan, "unsupported"): lambda layer: None,
        (device_plan, "ResidentLink"): link,
    }
    for (module, name), replacement in patches.items():
        mock.patch.object(module, name, replacement).start()
    with device:
        main(sys.argv[1:])


if __name__ == "__main__":
    run()
