"""Public names, for type checkers and for `__getattr__` of the package."""

from hf_parallel.evaluation.results import format_table as format_table
from hf_parallel.evaluation.results import read_results as read_results
from hf_parallel.evaluation.results import table as table
from hf_parallel.evaluation.runs import Finisher as Finisher
from hf_parallel.evaluation.runs import Run as Run
from hf_parallel.evaluation.tasks import GENERATED as GENERATED
from hf_parallel.evaluation.tasks import TASKS as TASKS
from hf_parallel.evaluation.tasks import load_problems as load_problems
from hf_parallel.evaluation.tasks.base import Problem as Problem
from hf_parallel.evaluation.tasks.code import CodeProblem as CodeProblem
from hf_parallel.evaluation.tasks.code import Test as Test
from hf_parallel.evaluation.tasks.generated import ArithmeticProblem as ArithmeticProblem
from hf_parallel.evaluation.tasks.generated import PlanningProblem as PlanningProblem
from hf_parallel.evaluation.tasks.generated import RetrievalProblem as RetrievalProblem
