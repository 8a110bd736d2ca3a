"""Which threads work in a step: the kernels' or PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model.native.library import NativeLibrary


class Cores:
    """Lends the cores that PyTorch would use in this thread to the kernels.

    PyTorch's small operators between them would wake OpenMP's threads and wait until all have come, for work
    that one thread does sooner. The kernels' own pool waits for nobody who has not begun.
    """

    def __init__(self, library: NativeLibrary | str) -> None:
        self._library = library if isinstance(library, NativeLibrary) else None
        # Not asked for in a step: a thread that first uses PyTorch in the step of another would be told 1.
        self._count = torch.get_num_threads()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While it lasts, PyTorch's operators stay in this thread, and the kernels have all cores. Without a
        library nothing changes."""
        if self._library is None:
            yield
            return
        try:
            self._library.ops.lend_threads(self._count)
            torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(self._count)
            self._library.ops.lend_threads(0)
