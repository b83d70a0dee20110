"""A thread that launches for one engine alone is prepared for that once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from common.ops.launching import OwnThread


def test_only_the_thread_that_was_taken_is_ready_at_any_time() -> None:
    owner = OwnThread(torch.device("cpu"), None)
    with ThreadPoolExecutor(1) as taken, ThreadPoolExecutor(1) as other:
        taken.submit(owner.take).result()
        assert taken.submit(torch.is_inference_mode_enabled).result()
        assert not other.submit(torch.is_inference_mode_enabled).result()

        def inside() -> bool:
            with owner.launching():
                return torch.is_inference_mode_enabled()

        assert taken.submit(inside).result() and other.submit(inside).result() and inside()
        assert taken.submit(torch.is_inference_mode_enabled).result()
        assert not other.submit(torch.is_inference_mode_enabled).result()
