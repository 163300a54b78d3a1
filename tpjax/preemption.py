"""Being told to stop: a first SIGTERM or SIGINT asks, a second one ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOPPED_STATUS = 75  # exit status of a run that can go on: EX_TEMPFAIL of sysexits.h, "try again"


class Preemption:
    """A context that takes note of signals in place of their own ways.

    A thread reads them from a pipe, since Python's own handlers wait for the main thread, which
    may be in the compiler for minutes. Outside of the main thread (where Python allows no
    handlers) signals stay what they are.

    Attributes:
        signal: the name of the first that came, or None.
    """

    def __init__(self) -> None:
        self.signal: str | None = None

    def __enter__(self) -> Preemption:
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            # Python's handlers do nothing, but without one the signal would end the process.
            # One that is ignored (by a job in a script's background) stays ignored.
            heeded = [n for n in SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)]
            self._old = {number: signal.signal(number, lambda *_: None) for number in heeded}
            self._old_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        if self._is_main:
            signal.set_wakeup_fd(self._old_pipe)
            for number, handler in self._old.items():
                signal.signal(number, handler)
            os.close(self._write)
            self._thread.join()
            os.close(self._read)

    def _watch(self) -> None:
        while number := os.read(self._read, 1):
            name = _name(number[0])
            if name is None:
                continue
            if self.signal is not None:
                _say(f"{name} again: stopped at once, without saving.")
                os._exit(128 + number[0])
            self.signal = name
            _say(f"{name}: the run finishes its step, saves and stops; once more stops it at once.")


def _name(number: int) -> str | None:
    return signal.Signals(number).name if number in SIGNALS else None


def _say(message: str) -> None:
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides it
    print(f"{show_cursor}{message}", file=sys.stderr, flush=True)
