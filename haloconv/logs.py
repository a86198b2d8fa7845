"""What the package tells through Python's logging: choices, compilations, the kernel cache. Silent unless asked.

The loggers are ``haloconv.choice``, ``haloconv.compile`` and ``haloconv.cache``; all their lines have the level INFO.
"""

from __future__ import annotations

import logging

from haloconv import env

choice = logging.getLogger("haloconv.choice")
compile = logging.getLogger("haloconv.compile")
cache = logging.getLogger("haloconv.cache")

_FORMAT = "%(asctime)s %(process)d %(name)s: %(message)s"

names_layers = False
"""Whether calls of layers note which layer they are of, so that lines about choices can name it."""


def set_logs(*, choice: bool | None = None, compile: bool | None = None, cache: bool | None = None) -> None:
    """Switch lines about one topic on (True) or off (False); None leaves the topic as it is.

    ``choice``: for each new form of tensors the layer, the problem, the family, the kernel, its config and the reason.
    ``compile``: each compilation with its seconds, each kernel found on disk, each failure. ``cache``: what is read
    from the folder of compiled kernels, written to it, and removed from it.

    Lines go to stderr, or to the handlers of the root logger where there are some. ``HALOCONV_LOGS=choice,compile``
    does the same from the start.
    """
    global names_layers
    for name, wanted in (("choice", choice), ("compile", compile), ("cache", cache)):
        if wanted is not None:
            logging.getLogger(f"haloconv.{name}").setLevel(logging.INFO if wanted else logging.WARNING)
    if choice is not None:
        names_layers = choice
    package = logging.getLogger("haloconv")
    if any((choice, compile, cache)) and not any(isinstance(each, _ToStderr) for each in package.handlers):
        package.addHandler(_ToStderr())


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]  # no subscripts before Python 3.11
    """Writes lines where nobody else does: without handlers of the root logger they would be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT))

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger().handlers and bool(super().filter(record))


def _follow_environment() -> None:
    topics = env.log_topics()
    if topics:
        set_logs(**dict.fromkeys(topics, True))


_follow_environment()
