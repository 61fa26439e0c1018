"""What a new thread does not inherit from the thread that starts it, and a rank's function must not miss.

torch keeps grad mode, inference mode, autocast and the default device per thread: a rank thread started under
`no_grad()` would record graphs. Context variables likewise.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch


class ThreadState:
    """The launching thread's modes, to be entered by every rank thread."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._device = torch.get_default_device()
        self._context = contextvars.copy_context()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The same modes, in the calling thread."""
        for variable, value in self._context.items():
            variable.set(value)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, enabled, dtype in self._autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._cache))
            if self._device != torch.device("cpu"):
                stack.enter_context(self._device)
            yield
