# Needs Python 3.11 or newer with pip, and a C++ compiler (torch.compile calls it).
#   make demo     train a small model with 8-bit optimizer state beside fp32
#   make test     the tests, those that are slow aside
#   make help     everything else

PYTHON      ?= python3
# Another version of torch than that of constraints.txt, in an environment of its own.
TORCH       ?=
VENV        ?= .venv$(if $(TORCH),-torch-$(TORCH))
PARITY_VENV ?= .venv-parity
PIP_FLAGS   ?=
DEMO_ARGS   ?=
PYTEST_ARGS ?=
BENCH_ARGS  ?=
# Processes that `make test` spreads the test files over.
JOBS        ?= 2

# Threads that wait sleep instead of spinning: several ranks on few cores otherwise keep each other from working.
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help demo test test-all parity hosts bench lint format types wheel-check clean distclean

help:
	@echo 'make demo [DEMO_ARGS="--steps 20"]    train a small model, 8-bit beside fp32; writes demo.png'
	@echo 'make test [PYTEST_ARGS="-k adam -x"]  tests and doctests, those that are marked slow aside'
	@echo 'make test-all [PYTEST_ARGS=...]       all of them'
	@echo 'make test TORCH=2.14.1                the same with another torch, in an environment of its own'
	@echo 'make parity [PYTEST_ARGS=...]         compare with optax, torchao and bitsandbytes (own environment)'
	@echo 'make hosts [PYTEST_ARGS=...]          train with Trainer, Accelerate, Lightning, torchtitan, DDP, FSDP2 (same one)'
	@echo 'make bench [BENCH_ARGS=...]           time a step beside torch fused AdamW and torchao (own environment)'
	@echo 'make lint | format | types            ruff check, ruff format, pyright'
	@echo 'make wheel-check                      build the wheel and try it from another folder'
	@echo 'make clean | distclean                remove build leftovers | and the environments too'
	@echo 'Variables: JOBS, PYTHON, TORCH, VENV, PARITY_VENV, PIP_FLAGS (for example an index that has CPU builds of torch)'

demo: $(VENV)/.installed-demo
	$(VENV)/bin/python examples/byte_lm.py $(DEMO_ARGS)

PYTEST = $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test
	$(PYTEST) $(PYTEST_ARGS)

parity: $(PARITY_VENV)/.installed-parity
	$(PARITY_VENV)/bin/python -m pytest tests/parity $(PYTEST_ARGS)

hosts: $(PARITY_VENV)/.installed-torchtitan
	$(PARITY_VENV)/bin/python -m pytest tests/hosts tests/core/report/test_plan_files.py tests/cli/test_cli_plan.py $(PYTEST_ARGS)

bench: $(PARITY_VENV)/.installed-parity
	$(PARITY_VENV)/bin/python benchmarks/step_time.py $(BENCH_ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(VENV)/.installed-dev
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

wheel-check: $(VENV)/.installed-dev
	$(VENV)/bin/python scripts/check_wheel.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find functional_lowbit transforms tests examples benchmarks scripts -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(PARITY_VENV) .venv-torch-*

CONSTRAINTS = $(if $(TORCH),$(VENV)/constraints-torch-$(TORCH).txt,constraints.txt)

# One environment, one stamp for each extra in it: a second call installs nothing until pyproject.toml
# or constraints.txt changes. The same two recipes serve both environments; the second argument names its constraints.
define environment
$(1)/.created:
	@$$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "functional-lowbit needs Python 3.11 or newer; $$(PYTHON) is " + sys.version.split()[0] + ". Say which to use: make PYTHON=python3.12 ...")'
	@# Some distributions ship pip but not venv's bundled copy of it (ensurepip): then lend it ours.
	$$(PYTHON) -m venv $(1) || { $$(PYTHON) -m venv --clear --without-pip $(1) && $$(PYTHON) -m pip --python $(1)/bin/python install pip; }
	@touch $$@

$(1)/.installed-%: pyproject.toml $(2) | $(1)/.created
	$(1)/bin/python -m pip install --progress-bar off $$(PIP_FLAGS) -c $(2) -e '.[$$*]'
	@touch $$@
endef
$(eval $(call environment,$(VENV),$(CONSTRAINTS)))
$(eval $(call environment,$(PARITY_VENV),constraints.txt))

ifdef TORCH
$(CONSTRAINTS): constraints.txt | $(VENV)/.created
	sed 's/^torch==.*/torch==$(TORCH)/' $< > $@
endif

# Without its dependencies: loggers and data sets of 400 MB, which the optimizer's part does not import.
$(PARITY_VENV)/.installed-torchtitan: $(PARITY_VENV)/.installed-hosts
	$(PARITY_VENV)/bin/python -m pip install --progress-bar off $(PIP_FLAGS) -c constraints.txt --no-deps torchtitan
	@touch $@
