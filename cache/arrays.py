"""The array types that the cache's books are kept in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
