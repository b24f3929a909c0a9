"""numpy and scipy arrays as JAX arrays; JAX is imported when these are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["jax_converter"]

_INT32 = np.iinfo(np.int32)


def jax_converter() -> Callable[[Any], Any]:
    """A function that makes JAX arrays on JAX's default device, BCSR of scipy CSR.

    As JAX does unless ``jax_enable_x64`` is set, it makes 32-bit numbers of 64-bit ones, but no wrong ones: integers
    that 32 bits do not hold are refused.

    Raises
    ------
    ImportError
        If JAX is not installed.
    """
    try:
        import jax
        import jax.numpy as jnp
        from jax.experimental.sparse import BCSR
    except ImportError as error:
        raise ImportError("to='jax' needs JAX. Install it with: pip install 'donorloader[jax]'.") from error

    def dense(array: Any) -> Any:
        narrow = not jax.config.jax_enable_x64 and array.dtype.kind in "iu" and array.dtype.itemsize == 8
        if narrow and array.size and (array.max() > _INT32.max or array.min() < _INT32.min):
            raise ValueError(
                f"JAX holds integers in 32 bits, but a batch has {array.max()}. Allow 64 with "
                "jax.config.update('jax_enable_x64', True)."
            )
        return jnp.asarray(array)

    def convert(array: Any) -> Any:
        if not sp.issparse(array):
            return dense(array)
        return BCSR((dense(array.data), dense(array.indices), dense(array.indptr)), shape=array.shape)

    return convert
