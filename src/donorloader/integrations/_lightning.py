"""What joins us to Lightning, under either of its names, without needing it: base classes, device copies, epochs."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["EpochLoader", "ResumableLoader", "is_on", "leave_to_lightning", "make_with_lightning"]

# The same package under two names: instances of one are not instances of the other.
_NAMES = ("lightning.pytorch", "pytorch_lightning")


def make_with_lightning(cls: type[Any], base: str) -> Any:
    """A new, uninitialised instance of `cls` that Lightning takes for one of its own classes, called `base`.

    It inherits from that class of each of Lightning's packages that is imported, else of the first that is installed.

    Raises
    ------
    ImportError
        If none is installed.
    """
    names = tuple(name for name in _NAMES if name in sys.modules)
    if not names:
        for name in _NAMES:
            try:
                importlib.import_module(name)
            except ImportError:
                continue
            names = (name,)
            break
        else:
            raise ImportError(
                f"{cls.__name__} needs Lightning. Install it with: pip install 'donorloader[lightning]' "
                "(or pytorch-lightning)."
            )
    return object.__new__(_joined(cls, base, names))  # type: ignore[arg-type] # classes can be hashed


@cache
def _joined(cls: type[Any], base: str, names: tuple[str, ...]) -> type[Any]:
    bases = [getattr(sys.modules[name], base) for name in names]
    missing = tuple(b for b in bases if not issubclass(cls, b))
    if not missing:
        return cls
    # by itself, pickle would look for the new class under the name of `cls`
    inner = {"__reduce_ex__": lambda self, protocol: (_made_again, (cls,), self.__getstate__())}
    return type(cls.__name__, (cls, *missing), {"__module__": cls.__module__, "__doc__": cls.__doc__, **inner})


def _made_again(cls: Any) -> Any:
    """In another process: an instance like the one that was sent, without its contents."""
    return cls.__new__(cls)


def leave_to_lightning(module: Any, method: str, trainer: Any) -> None:
    """Let an instance have a method of Lightning's in place of ours, so that the Trainer sees that it has none."""
    for name in _NAMES:
        package = sys.modules.get(name)
        if package is not None and isinstance(trainer, package.Trainer):
            setattr(module, method, MethodType(getattr(package.LightningDataModule, method), module))


def is_on(batch: Any, device: torch.device) -> bool:
    """Whether all tensors of a batch are on a device already."""
    if isinstance(batch, torch.Tensor):
        same = batch.device.type == device.type
        return same and (device.index is None or batch.device.index in (None, device.index))
    if isinstance(batch, dict):
        return all(is_on(value, device) for value in batch.values())
    if isinstance(batch, list | tuple):
        return all(is_on(value, device) for value in batch)
    return True


class EpochLoader:
    """A loader as a Trainer takes it: each pass is of the Trainer's epoch, whatever passes were begun before.

    It is no torch ``DataLoader``, so Lightning puts no distributed sampler into it.

    Parameters
    ----------
    loader
        Has ``set_epoch`` and a length, and yields batches.
    epoch
        Gives the epoch of the next pass; `None` from it: leave the count to the loader.
    """

    def __init__(self, loader: Any, epoch: Callable[[], int]):
        self.loader = loader
        self._epoch = epoch

    def __len__(self) -> int:
        """Number of batches of a pass."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass when its first batch is taken: Lightning makes iterators that it does not use."""
        self.loader.set_epoch(self._epoch())
        yield from self.loader


class ResumableLoader(EpochLoader):
    """The same, with a place in the epoch that the Trainer saves with its checkpoints and goes on from."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass be the rest of the epoch: the Trainer, which is in that epoch, then names it again."""
        self.loader.load_state_dict(state_dict)
