"""Saving while training goes on: one checkpoint at a time, the newest and the best kept."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import jax
import orbax.checkpoint as ocp
from jax import Array
from orbax.checkpoint import type_handlers

from tpjax import checkpoint
from tpjax.checkpoint import About
from tpjax.config import RecoveryConfig
from tpjax.state import TrainState, leaf_name

_DAY_SECONDS = 86_400  # Orbax gives up a save after that


class SaveFailed(Exception):
    """A checkpoint that could not be written, in one line."""


class Saver:
    """A context that writes checkpoints into a folder, one at a time, and removes old ones.

    With `checkpoint_copy`, `save` returns when the state is in the host's memory; without, when
    it is on the disk, and no more than two shards of it are on their way at once. (Simulated
    devices' arrays are looked at, not copied then; where Orbax still does so at the next step,
    that one takes new buffers.)

    Attributes:
        last: the newest checkpoint known to be whole.
        state_bytes: of one state, over all devices.
    """

    def __init__(
        self, folder: Path, config: RecoveryConfig, state: TrainState, last: Path | None = None
    ):
        """
        Args:
            state: abstract, for its sizes.
            last: the checkpoint that the run goes on from.
        """
        self._folder, self._config, self.last = folder, config, last
        self._pending: tuple[Path, About] | None = None
        leaves = jax.tree.leaves(state)
        self.state_bytes = sum(x.size * x.dtype.itemsize for x in leaves)
        largest_shard = max(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves
        )
        self._checkpointer = _checkpointer(config, largest_shard, self._describe)

    def __enter__(self) -> Saver:
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(_said_once())
        if _is_first():
            checkpoint.clear(self._folder)
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        """Waits for what is being written; an error of it is not raised over another."""
        try:
            self.wait()
        except SaveFailed:
            if kind is None:
                raise
        finally:
            self._checkpointer.close()
            self._quiet.close()

    def save(self, state: TrainState, about: About) -> None:
        """Begins to write a checkpoint, after the end of the one before.

        Raises:
            SaveFailed: that one or this one cannot be written.
        """
        self.wait()
        path = self._folder / f"{about.progress.step:08d}"
        named = {leaf_name(keys): leaf for keys, leaf in jax.tree.leaves_with_path(state)}
        try:
            checkpoint.check_space(self._folder, self.state_bytes)
            if self._config.checkpoint_copy:
                named = {name: _copied_in_host(leaf) for name, leaf in named.items()}
            self._pending = (path, about)
            # Orbax takes absolute paths only.
            self._checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(named))
        except Exception as error:
            self._fail(path, error)
        if not self._config.checkpoint_copy:
            self.wait()

    def poll(self) -> None:
        """Sees whether the checkpoint being written is whole, and removes old ones then.

        Raises:
            SaveFailed: it cannot be written.
        """
        if self._pending is None:
            return
        path, _ = self._pending
        try:
            if path.exists():
                self._checkpointer.wait_until_finished()  # it has a word to say yet
            self._checkpointer.check_for_errors()
        except Exception as error:
            self._fail(path, error)
        if path.exists():
            self._pending, self.last = None, path
            if _is_first():
                self._drop_old()

    def wait(self) -> None:
        """`poll`, when it is written."""
        if self._pending is None:
            return
        try:
            self._checkpointer.wait_until_finished()
        except Exception as error:
            self._fail(self._pending[0], error)
        self.poll()

    def _fail(self, path: Path, error: Exception) -> NoReturn:
        self._pending = None
        with contextlib.suppress(OSError):
            if _is_first():
                checkpoint.clear(self._folder)
        last = f"the last whole one is {self.last}" if self.last else "there is none before it"
        text = (str(error).splitlines() or [type(error).__name__])[0]
        reason = text.rsplit('": ', 1)[-1][:300]  # after the names of files: what the system said
        raise SaveFailed(f"checkpoint {path} could not be written: {reason}; {last}.") from None

    def _describe(self) -> None:
        """Orbax calls this in the folder's last moment under its temporary name."""
        assert self._pending is not None
        path, about = self._pending
        about.write(checkpoint.temporary(path))

    def _drop_old(self) -> None:
        """All but the newest ones and the one with the lowest validation loss."""
        losses: dict[Path, float | None] = {}
        for path in checkpoint.steps_in(self._folder):
            with contextlib.suppress(checkpoint.Damaged):
                losses[path] = About.read(path)[0].progress.eval_loss
        kept = set(list(losses)[-self._config.keep :])
        known = {path: loss for path, loss in losses.items() if loss is not None}
        if known:
            kept.add(min(known, key=lambda path: (known[path], path)))
        for path in losses.keys() - kept:
            with contextlib.suppress(OSError):  # tried again after the next one
                checkpoint.drop(path)


def _copied_in_host(leaf: Array) -> Array:
    """A copy of what is in the host's memory already: Orbax would write from it while the next
    step changes it. What is on a device it copies itself."""
    if leaf.sharding.memory_kind != "pinned_host":
        return leaf
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def _is_first() -> bool:
    """Whether this process is the one that removes folders for all."""
    return jax.process_index() == 0


def _checkpointer(
    config: RecoveryConfig, largest_shard_bytes: int, describe: Callable[[], None]
) -> ocp.AsyncCheckpointer:
    # Each shard is written by one of the devices that have it: Orbax's other way, a slice by
    # each, makes slices of the whole state on the devices.
    arrays = type_handlers.ArrayHandler(use_replica_parallel=False)
    handler = ocp.BasePyTreeCheckpointHandler(
        use_compression=False,  # weights and moments are noise: four times slower for 8 %
        type_handler_registry=type_handlers.create_type_handler_registry((jax.Array, arrays)),
        # The copy is in pinned memory for simulated devices too, whose arrays NumPy would only
        # look at: then the next step could not take their buffers.
        enable_pinned_host_transfer=config.checkpoint_copy,
        save_device_host_concurrent_bytes=None if config.checkpoint_copy else largest_shard_bytes,
    )
    options = ocp.AsyncOptions(timeout_secs=_DAY_SECONDS, post_finalization_callback=describe)
    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(handler_impl=handler), async_options=options
    )


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """A failed save is an error that we raise; Orbax would log its stack as well."""

    def keeps(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)
