"""NVIDIA's management library: opened once, every answer either a value or a reason. The only importer of pynvml.

One thread uses it: the one that opened it. `KVSCOPE_NVML_LIBRARY=/path/to/lib.so` loads another library instead of the
driver's, for tests and to show the dashboard without a GPU; whatever comes from such a library is called fake.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

from backend.telemetry.readings import DeviceLost, LibraryGone, ReadError

LIBRARY = "KVSCOPE_NVML_LIBRARY"
READY, ABSENT, MISMATCH, NO_PERMISSION, ERROR = "ready", "absent", "mismatch", "no_permission", "error"

# NVML's numbers, so that nothing of pynvml is needed to know them.
_LASTING = {
    2: "the driver does not know this question",  # INVALID_ARGUMENT
    3: "this GPU does not report it",  # NOT_SUPPORTED
    4: "this user may not read it (no permission)",
    13: "this driver does not know this question yet",  # FUNCTION_NOT_FOUND
    25: "this driver speaks another version of this question",  # ARGUMENT_VERSION_MISMATCH
    26: "this driver no longer answers this question",  # DEPRECATED
}
_LOST = {
    6: "the driver no longer finds it",  # NOT_FOUND
    15: "it fell off the bus (GPU is lost)",
    16: "it must be reset",  # RESET_REQUIRED
    28: "the driver no longer finds it",  # GPU_NOT_FOUND
}
_GONE = {1: "NVML is not open", 9: "the NVIDIA kernel module was unloaded", 18: "the driver was updated meanwhile"}
_TICK = {
    10: "timeout", 11: "interrupt trouble", 17: "the operating system refused", 19: "in use by something else",
    20: "out of memory", 21: "no data yet", 27: "the system is not ready", 999: "unknown error",
}  # fmt: skip


class Nvml:
    """`state` and `message` say how opening went, for people. Not thread-safe."""

    def __init__(self) -> None:
        self.state, self.message, self.driver = ABSENT, "not asked yet", ""
        self.fake = bool(os.environ.get(LIBRARY))
        self.lasting = False  # opening again cannot help before something is installed
        self._pynvml: Any = None
        self._pid = 0

    @property
    def is_open(self) -> bool:
        return self.state == READY and self._pid == os.getpid()

    def open(self) -> str:
        """Returns the state. Opening what is open does nothing."""
        if self.is_open:
            return self.state
        self._pid = 0
        try:
            self._import()
            self._load()
            self._pynvml.nvmlInit()
        except _Unusable as error:
            self.state, self.message, self.lasting = error.state, str(error), error.lasting
        except Exception as error:  # whatever the driver or its binding does, the engine goes on without it
            self.state, self.message = self._explain(error)
        else:
            self.state, self.message, self._pid = READY, "", os.getpid()
            try:
                self.driver = _text(self.ask("nvmlSystemGetDriverVersion"))
            except ReadError:
                self.driver = ""
        return self.state

    def close(self) -> None:
        if not self.is_open:
            return
        self.state, self.message, self._pid = ABSENT, "closed", 0
        try:
            self._pynvml.nvmlShutdown()
        except Exception:  # nothing is left to be done about it
            pass

    def ask(self, function: str, *arguments: object) -> Any:
        """Calls pynvml's `function`. Raises ReadError, DeviceLost or LibraryGone, whatever it was that went wrong."""
        if not self.is_open:
            raise LibraryGone(_GONE[1])
        call: Callable | None = getattr(self._pynvml, function, None)
        if call is None:
            raise ReadError("the installed nvidia-ml-py is too old for it", lasting=True)
        try:
            return call(*arguments)
        except self._pynvml.NVMLError as error:
            raise self.error(error.value) from None
        except UnicodeDecodeError:
            raise ReadError("the driver's text cannot be read") from None

    def error(self, code: int) -> ReadError:
        """What an NVML return code means for who asked."""
        if code in _LASTING:
            return ReadError(_LASTING[code], lasting=True)
        if code in _LOST:
            return DeviceLost(_LOST[code])
        if code in _GONE:
            return LibraryGone(_GONE[code])
        return ReadError(_TICK.get(code, f"NVML error {code}"))

    def fields(self, handle: object, *ids: int | tuple[int, int]) -> list[int | float | ReadError]:
        """Field values. The call succeeds while single fields fail: each is a number or its error."""
        values = self.ask("nvmlDeviceGetFieldValues", handle, list(ids))
        return [_field(v) if v.nvmlReturn == 0 else self.error(v.nvmlReturn) for v in values]

    def text(self, function: str, *arguments: object, default: str = "") -> str:
        """A text, or `default` where there is none that can be read. Raises DeviceLost, LibraryGone."""
        try:
            return _text(self.ask(function, *arguments))
        except (DeviceLost, LibraryGone):
            raise
        except ReadError:
            return default

    def number(self, function: str, *arguments: object) -> int | None:
        """A whole number, or None where there is none. Raises DeviceLost, LibraryGone."""
        try:
            value = self.ask(function, *arguments)
            return int(value[0] if isinstance(value, list | tuple) else getattr(value, "value", value))
        except (DeviceLost, LibraryGone):
            raise
        except ReadError:
            return None

    @property
    def api(self) -> Any:
        """pynvml itself, for its structures and constants."""
        return self._pynvml

    def _import(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise _Unusable(
                ABSENT, "the package nvidia-ml-py is not installed: pip install nvidia-ml-py", lasting=True
            ) from None
        if not hasattr(pynvml, "nvmlGpmSampleGet"):
            owners = importlib.metadata.packages_distributions().get("pynvml", [])
            wrong = " ".join(sorted({name for name in owners if name != "nvidia-ml-py"})) or "an old package"
            raise _Unusable(
                ERROR,
                f"the module pynvml comes from {wrong} and hides nvidia-ml-py: "
                f"pip uninstall {wrong}, then pip install --force-reinstall nvidia-ml-py",
                lasting=True,
            )
        self._pynvml = pynvml

    def _load(self) -> None:
        path = os.environ.get(LIBRARY)
        self.fake = bool(path)
        if not path or getattr(self._pynvml.nvmlLib, "_name", None) == path:
            return
        try:
            self._pynvml.nvmlLib = ctypes.CDLL(path)
        except OSError as error:
            raise _Unusable(ABSENT, f"{LIBRARY}={path} cannot be loaded: {error}") from None
        self._pynvml._nvmlGetFunctionPointer_cache.clear()

    def _explain(self, error: Exception) -> tuple[str, str]:
        code = getattr(error, "value", None)
        if code == 12:
            return ABSENT, (
                "no NVIDIA driver was found (libnvidia-ml.so.1): a machine without an NVIDIA GPU, or a container "
                "without the driver's 'utility' capability"
            )
        if code == 9:
            return ABSENT, "NVIDIA's library is here, but its kernel module is not loaded"
        if code == 18:
            return MISMATCH, (
                "driver and library versions differ: the driver was updated and the kernel still runs the old one. "
                "Reboot, or reload the nvidia kernel module"
            )
        if code == 4:
            return NO_PERMISSION, "this user may not talk to the NVIDIA driver (no permission on /dev/nvidia*)"
        hint = ". In a container that had the GPU before: restart the container" if code == 999 else ""
        return ERROR, f"NVML cannot be opened: {error}{hint}"


class _Unusable(Exception):
    def __init__(self, state: str, message: str, *, lasting: bool = False):
        super().__init__(message)
        self.state, self.lasting = state, lasting


def _text(value: str | bytes) -> str:
    """Bindings before 11.5 gave bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _field(value: Any) -> int | float:
    """By the type that the driver names: double, unsigned int, unsigned long, unsigned long long, signed …"""
    kinds = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    kind = value.valueType
    return getattr(value.value, kinds[kind] if 0 <= kind < len(kinds) else "ullVal")
