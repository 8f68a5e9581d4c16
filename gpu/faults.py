"""What may fail here besides a request: a load, device memory, the device itself.

Who calls it: everything that loads raises `ModelLoadError`; the runner translates with `as_runner_error`; the executor latches on `DeviceFault`.
What must stay true: no torch at import; `MemoryError` is the only error that asks for a smaller batch.
"""

from __future__ import annotations

from schemas.errors import NonFinite, ZeroVector


class ModelLoadError(Exception):
    """A model cannot be served. One line for the operator, naming what to change."""


class DeviceFault(RuntimeError):
    """The device's context is broken (a CUDA assertion, an illegal access): no later call can pass."""


class DeviceMemoryError(MemoryError):
    """Device memory ran out; a smaller batch may pass."""


_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "could not create a memory object",
    "bad allocation",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_LOST = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "unspecified launch failure",
    "misaligned address",
    "uncorrectable ECC",
    "device is lost",
    "CUDA error",
)


def as_runner_error(error: Exception) -> Exception:
    """torch's error as `DeviceMemoryError`, `DeviceFault`, or unchanged."""
    if isinstance(error, MemoryError):
        return error
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or any(mark in text for mark in _OUT_OF_MEMORY):
        return DeviceMemoryError(text.split("\n")[0][:300])
    if type(error).__name__ == "AcceleratorError" or any(mark in text for mark in _LOST):
        return DeviceFault(text.split("\n")[0][:300])
    return error


def zero_vector() -> ZeroVector:
    """The error of an item whose vector was to have length 1 and cannot."""
    return ZeroVector(
        "the model gave a vector of zeros for this item, which has no direction; `normalize: false` "
        "gives it as it is"
    )


def non_finite() -> NonFinite:
    """The error of an item for which the model gave NaN or infinity."""
    return NonFinite("the model gave NaN or infinity for this item")
