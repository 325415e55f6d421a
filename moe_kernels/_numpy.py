"""Loads the part of torch that warns if numpy is missing, without the warning: nothing here needs numpy."""

import contextlib
import importlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):  # a private module, which torch may rename
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    importlib.import_module("torch._subclasses.functional_tensor")  # torch.library loads it anyway
