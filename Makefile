# docs/contribute.md says what each target does.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

export NO_MKDOCS_2_WARNING = 1

# Groups of tests are processes of their own: Triton reads TRITON_INTERPRET
# when a kernel is defined, and the site is built once for all its tests. They
# run side by side, the longest first, and on one thread each: threads of
# several processes that share the cores wait for each other.
GROUPS := test-site test-package test-notebooks test-kernels
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
test test-all $(GROUPS): export OMP_NUM_THREADS = 1
PYTEST := $(BIN)/python -m pytest

# make test PROCESSOR=default: PyTorch computes as on a processor without AVX, which
# adds the same terms in another order.
ifdef PROCESSOR
$(if $(filter default avx2 avx512,$(PROCESSOR)),,$(error PROCESSOR is default, avx2 or avx512))
export ATEN_CPU_CAPABILITY = $(PROCESSOR)
export MKL_CBWR = COMPATIBLE
endif

.PHONY: site serve test test-all $(GROUPS) notebooks figures bench reproduce lint clean

site: $(READY)
	$(BIN)/python docs/tools/npm.py
	$(BIN)/mkdocs build --strict
	@echo "The site is in $(CURDIR)/site"
	@echo "To look at it: make serve, or $(PYTHON) -m http.server --directory site"

serve: $(READY)
	$(BIN)/python docs/tools/npm.py
	$(BIN)/mkdocs serve

# Every group runs to its end, with its slowest tests.
test test-all: $(READY)
	$(MAKE) --no-print-directory --keep-going --jobs $(JOBS) --output-sync $(GROUPS)

test-all: export PYTEST_ADDOPTS := $(PYTEST_ADDOPTS) -m ""

test-site: $(READY)
	$(BIN)/python docs/tools/npm.py
	$(PYTEST) tests/site

test-package: $(READY)
	$(PYTEST) tests --ignore tests/site --ignore tests/interpreter --ignore tests/test_notebooks.py

# With a file of tests, for what tests/conftest.py sets.
test-notebooks: $(READY)
	$(PYTEST) tests/test_notebooks.py notebooks

test-kernels: $(READY)
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter

# make notebooks [FILES=notebooks/00_start_here.ipynb]; nobody answers their questions
notebooks: FILES ?= notebooks/*.ipynb
notebooks: $(READY)
	FWLAB_PROGRESS= $(BIN)/jupyter nbconvert --config docs/tools/nbconvert_config.py --to notebook --execute --inplace $(FILES)

figures: site
	$(BIN)/python docs/tools/keep_figures.py

bench: $(READY)
	$(BIN)/fwlab bench
	$(BIN)/python docs/tools/peers.py

# make reproduce NAME=capacity [ARGS=--quick]
reproduce: $(READY)
	$(if $(NAME),,$(error say make reproduce NAME=capacity, or another script of docs/reproduce))
	$(BIN)/python docs/reproduce/$(NAME).py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files -z | xargs -0 $(BIN)/codespell
	$(BIN)/python docs/tools/scripts.py

clean:
	rm -rf .venv .cache site

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --upgrade --target .venv/peer fla-core
	touch $@
