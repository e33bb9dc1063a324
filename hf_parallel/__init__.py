"""Parallel generation over a shared KV cache, for Hugging Face Transformers.

Public names are imported when they are first used, as the import of torch takes seconds. `__init__.pyi` lists them with
their modules. CONTRIBUTING.md describes the folders, and the path of a call from `generate` to a kernel.
"""

from hf_parallel.lazy import lazy_names
from hf_parallel.registration import register_pipeline_once_imported

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

register_pipeline_once_imported()
