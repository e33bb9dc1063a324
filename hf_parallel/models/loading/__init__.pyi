"""Public names, for type checkers and for `__getattr__` of the package."""

from hf_parallel.models.loading.load import check_model_folder as check_model_folder
from hf_parallel.models.loading.load import load_model as load_model
from hf_parallel.models.loading.load import load_processor as load_processor

__all__: list[str]
