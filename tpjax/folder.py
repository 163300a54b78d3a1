"""A run's folder: whose it is, what is in it, and its records brought back to a step."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import socket
import struct
import time
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboardX.proto import event_pb2

from tpjax.config import ConfigError, TrainConfig

METRICS, CHECKPOINTS, _LOCK = "metrics.jsonl", "checkpoints", "lock"
OLD_METRICS = "metrics.old.jsonl"  # of a run that has begun again


class RunFolder:
    """A context in which a run has its folder to itself.

    The lock is the operating system's on an open file, so that it ends with the process,
    however that ends. A dry run takes none and writes nothing.

    Raises:
        ConfigError: another run has it, it cannot be written, or (`resume` never) it holds a
            run already.
    """

    def __init__(self, config: TrainConfig):
        self.path = Path(config.out or f"runs/{config.model.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        self.checkpoints = self.path / CHECKPOINTS
        self._config, self._lock, self._made = config, None, False

    def __enter__(self) -> RunFolder:
        there = next(f for f in (self.path, *self.path.absolute().parents) if f.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ConfigError(
                f"out {self.path} cannot be written: {there} is no folder to write to."
            )
        if not self._config.dry_run:
            self._take()
        try:
            self._check()
        except ConfigError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        """Lets go of it; a folder made for a run that never started goes again."""
        if self._lock is None:
            return
        lock = self.path / _LOCK
        if self._made and os.listdir(self.path) == [_LOCK]:
            with contextlib.suppress(OSError):
                lock.unlink()
                self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def _take(self) -> None:
        try:
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise ConfigError(f"out {self.path} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._lock, 0)
            os.write(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            holder = os.read(self._lock, 200).decode(errors="replace")
            os.close(self._lock)
            self._lock = None
            raise ConfigError(
                f"out {self.path} is in use by another run ({holder}); wait for its end, stop it, "
                "or name another folder."
            ) from None
        except OSError as error:
            self.__exit__()
            raise ConfigError(
                f"out {self.path} cannot be locked for this run: {error.strerror}; make room, or "
                "name a folder on another file system."
            ) from error

    def _check(self) -> None:
        """A folder with a run in it is for going on with that run."""
        if not (self.path / METRICS).exists() and not self.checkpoints.exists():
            return
        if self._config.recovery.resume == "never":
            raise ConfigError(
                f"out {self.path} holds a run already; name another folder, or --resume=auto to "
                "go on with it."
            )
        if not self.checkpoints.exists():
            raise ConfigError(
                f"out {self.path} holds a run already, without checkpoints; name another folder."
            )

    def open(self, config: TrainConfig) -> None:
        """Makes it ready for the first step, with the run's configuration in it."""
        try:
            self.checkpoints.mkdir(exist_ok=True)
            text = json.dumps(dataclasses.asdict(config), indent=2) + "\n"
            write_whole(self.path / "config.json", text)
        except OSError as error:
            raise ConfigError(f"out {self.path} cannot be written: {error.strerror}.") from error


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there with all of its text, or as it was."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def rewind(folder: Path, step: int, evaluated: bool = True) -> None:
    """Takes away what metrics.jsonl and the event files have beyond a step, and what a crash
    left half-written, so that a run that goes on from there holds each step once. A run that
    begins again (step 0) leaves its old lines in another file.

    Args:
        evaluated: whether the step's evaluation is done; if not, it is taken away too.
    """
    metrics = folder / METRICS
    if metrics.exists():
        if step == 0:
            shutil.copyfile(metrics, folder / OLD_METRICS)
        lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines()
        last = (step, evaluated)
        kept = [line for line in lines if (at := _place_of(line)) is not None and at <= last]
        write_whole(metrics, "".join(f"{line}\n" for line in kept))
    for events in sorted(folder.glob("events.out.tfevents.*")):
        if events.is_file() and not events.is_symlink():
            os.truncate(events, _events_until(events, (step, evaluated)))


def _place_of(line: str) -> tuple[int, bool] | None:
    """The step of a line of metrics, and whether it is of the evaluation after it."""
    try:
        values = json.loads(line)
        step, evaluation = values["step"], "eval_loss" in values
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (step, evaluation) if isinstance(step, int) else None


def _events_until(path: Path, last: tuple[int, bool]) -> int:
    """Length in bytes of an event file's records up to a step (and its evaluation), whole ones
    only.

    A record is the length of its data (8 bytes) and a checksum (4), the data, and a checksum (4);
    a writer's steps never go back (TFRecord format, tensorflow/core/lib/io/record_writer.h).
    """
    size, end = path.stat().st_size, 0
    with path.open("rb") as file:
        while end + 16 <= size:
            (length,) = struct.unpack("<Q", file.read(8))
            after = end + 16 + length
            if after > size:
                break
            try:
                event = event_pb2.Event.FromString(  # type: ignore[attr-defined] # made at import
                    file.read(4 + length)[4:]
                )
            except DecodeError:
                break
            evaluation = any(value.tag == "eval_loss" for value in event.summary.value)
            if (event.step, evaluation) > last:
                break
            end = after
            file.seek(end)
    return end
