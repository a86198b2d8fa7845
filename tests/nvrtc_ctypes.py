"""An NVRTC library of any CUDA version, driven through ctypes: compiles for architectures that NVRTC 13 dropped."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from haloconv.jit.compile import COMPILE_FLAGS, Resources, parse_resources
from haloconv.jit.source import KernelSource

ROOT = Path(__file__).resolve().parent.parent


def library_folder(major: int) -> Path | None:
    """Where NVRTC ``major`` lies: under HALOCONV_TEST_NVRTC<major>, else under .nvrtc/<major>; None if it does not."""
    folder = Path(os.environ.get(f"HALOCONV_TEST_NVRTC{major}") or ROOT / ".nvrtc" / str(major))
    found = sorted(folder.glob(f"**/libnvrtc.so.{major}*"))
    return found[0].parent if found else None


@contextmanager
def _own_locale() -> Iterator[None]:
    """Put the thread's locale back: NVRTC 11 leaves C behind, and files would be read as ASCII from then on."""
    uselocale = ctypes.CDLL(None).uselocale
    uselocale.argtypes, uselocale.restype = [ctypes.c_void_p], ctypes.c_void_p
    before = uselocale(None)
    try:
        yield
    finally:
        uselocale(before)


class Nvrtc:
    """The NVRTC library in ``folder``.

    Raises OSError if there is none, RuntimeError from ``compile`` with NVRTC's log if a source does not compile.
    """

    def __init__(self, folder: Path) -> None:
        (path,) = sorted(folder.glob("libnvrtc.so.*"))
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: KernelSource, arch: str) -> tuple[bytes, Resources]:
        """The cubin of ``source`` for ``arch``, and what ptxas reports about its entry."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.code.encode(), b"joined.cu", 0, None, None)
        try:
            flags = [f"--gpu-architecture={arch}".encode(), *(flag.encode() for flag in COMPILE_FLAGS)]
            with _own_locale():
                status = self._library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            log = self._bytes("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program).rstrip(b"\0").decode()
            if status:
                raise RuntimeError(f"NVRTC {self.version}, {arch}, {source.entry}, {source.constants}:\n{log}")
            image = self._bytes("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))
        return image, parse_resources(log, source.entry)

    def _bytes(self, size_name: str, content_name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_name, program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(content_name, program, content)
        return content.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}")
