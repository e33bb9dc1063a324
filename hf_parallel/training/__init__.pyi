"""Public names, for type checkers and for `__getattr__` of the package."""

from hf_parallel.training.agent_rollouts import make_agent_rollout_func as make_agent_rollout_func
from hf_parallel.training.attention import prepare_model as prepare_model
from hf_parallel.training.attention import teacher_forced_logits as teacher_forced_logits
from hf_parallel.training.collator import DataCollatorForParallel as DataCollatorForParallel
from hf_parallel.training.dialects import Dialect as Dialect
from hf_parallel.training.dialects import SkeletonDialect as SkeletonDialect
from hf_parallel.training.example import ParallelExample as ParallelExample
from hf_parallel.training.grpo import SharedPrefixGRPOTrainer as SharedPrefixGRPOTrainer
from hf_parallel.training.grpo import SharedPrefixLossMixin as SharedPrefixLossMixin
from hf_parallel.training.masks import stock_mask as stock_mask
from hf_parallel.training.rollout_stream import Rollout as Rollout
from hf_parallel.training.rollout_stream import RolloutStream as RolloutStream
from hf_parallel.training.rollout_tree import RolloutTree as RolloutTree
from hf_parallel.training.rollout_tree import sample_tree as sample_tree
from hf_parallel.training.rollout_tree import tree_loss as tree_loss
from hf_parallel.training.rollouts import make_rollout_func as make_rollout_func
from hf_parallel.training.tree import tree_logprobs as tree_logprobs
from hf_parallel.training.tree_rollouts import make_tree_rollout_func as make_tree_rollout_func

__all__: list[str]
