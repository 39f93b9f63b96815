# Commands for a fresh machine: `make pretrain`, `make real`, `make test`. Each makes .venv and installs what it needs.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
WORKERS ?= 2
STAMP  := $(shell date +%Y%m%d-%H%M%S)

# What pytest makes of the tests' asserts is kept in __pycache__, whatever the environment says: making it takes longer than many tests.
export PYTHONDONTWRITEBYTECODE =

.PHONY: pretrain real stability test test-slow test-all test-gpu lint docs clean

# The main job on the embedded model: a 4-bit Llama becomes an NPT student, measured on held-out text.
pretrain: $(VENV)/.core
	$(BIN)/python pretrain_npt_safe.py --config tiny --output_dir outputs/pretrain-$(STAMP)

# The same with a real language model, SmolLM2-135M-Instruct (93 MB, downloaded once). `make real REAL_MODEL=FILE.gguf` takes another one, or a
# folder with one, and downloads nothing.
real: $(VENV)/.real
	model=$$($(BIN)/python benchmarks/fetch_model.py) && \
	$(BIN)/python pretrain_npt_safe.py --config real --model_name "$$model" --output_dir outputs/real-$(STAMP)

# Which settings train the embedded model, and where that ends: some 320 short runs, shared by two workers. Started again after a kill it
# goes on where it was; with outputs/stability removed it begins anew.
stability: $(VENV)/.sweep
	$(BIN)/npt sweep stability --study outputs/stability --workers 2

# The fast tests; test-slow has those that they leave out, test-all is both, and skips nothing: a browser has to be there.
test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=5 $(STRICT)

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --slow -m slow $(STRICT)

test-all:
	$(MAKE) test STRICT=--no-skips
	$(MAKE) test-slow STRICT=--no-skips

# In an environment that is there already, on a machine with a GPU: `make test-gpu BIN=/path/to/its/bin`.
test-gpu:
	$(BIN)/python -m pytest -m gpu tests/gpu

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation as a site, in site/; its search needs a server: python -m http.server -d site. A dead link is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hub,wandb,tensorboard]'
	touch $@

$(VENV)/.real: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	touch $@

$(VENV)/.sweep: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[sweep]'
	touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# All that .ci/run needs: torch by pip, which takes its CPU build where one is offered, the rest by uv in a fifth of pip's time.
$(VENV)/.ci: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[test,dev,docs]'
	touch $(VENV)/.test $(VENV)/.dev $(VENV)/.docs $@

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
