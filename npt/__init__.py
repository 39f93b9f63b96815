"""NPT (Neuro-Plastic Transformer): distil adapters into quantised language models, with a guard
that keeps NaN and Inf out of the weights.

`__init__.pyi` lists the public names. They are imported on first use, so that `npt --help` and a
wrong flag do not wait for torch.
"""

import logging
import warnings

from npt.extras import PublicNames
from npt.version import __version__ as __version__

# On some CPUs bitsandbytes warns that the optional package `kernels`, unused here, is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# bitsandbytes before 0.50 calls a function that torch has deprecated, in every product.
warnings.filterwarnings("ignore", message="_check_is_size will be removed", category=FutureWarning)

_NAMES = PublicNames(__name__, __file__)

__all__ = sorted(["__version__", *_NAMES.homes])
__getattr__ = _NAMES.read
__dir__ = _NAMES.listed
