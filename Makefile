# Start here on a fresh machine: `make pretrain`, `make real` or `make test`. Each target creates .venv and installs what it needs.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
WORKERS ?= 2
STAMP  := $(shell date +%Y%m%d-%H%M%S)

# pytest keeps rewritten asserts in __pycache__; rewriting them takes longer than many tests.
export PYTHONDONTWRITEBYTECODE =

.PHONY: pretrain real stability test test-slow test-all test-gpu lint docs clean

# Train the embedded model, a 4-bit Llama, to an NPT student and measure it on held-out text.
pretrain: $(VENV)/.core
	$(BIN)/python pretrain_npt_safe.py --config tiny --output_dir outputs/pretrain-$(STAMP)

# The same with SmolLM2-135M-Instruct (93 MB, downloaded once), on prose and on chats that it writes itself, then measured on its answers to
# questions. `make real REAL_MODEL=PATH` uses another GGUF file, or a folder with one, and downloads nothing.
real: $(VENV)/.real
	model=$$($(BIN)/python benchmarks/fetch_model.py) && \
	text=$$($(BIN)/python benchmarks/real_data.py --model "$$model") && \
	$(BIN)/python pretrain_npt_safe.py --config real --model_name "$$model" --dataset_name "$$text" --output_dir outputs/real-$(STAMP) && \
	$(BIN)/npt evaluate --adapter outputs/real-$(STAMP) --model_name "$$model" --use_quantization --dataset_name "$$(dirname "$$text")/questions.jsonl"

# Find out which settings train the embedded model, with some 300 short runs shared by two workers. Run it again to continue a killed study;
# remove outputs/stability to start from scratch.
stability: $(VENV)/.sweep
	$(BIN)/npt sweep stability --study outputs/stability --workers 2

# Fast tests; test-slow runs the others. test-all runs both and fails if a test is skipped, so it needs a browser.
test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=5 $(STRICT)

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --slow -m slow $(STRICT)

test-all:
	$(MAKE) test STRICT=--no-skips
	$(MAKE) test-slow STRICT=--no-skips

# Run it in an existing environment on a machine with a GPU: `make test-gpu BIN=/path/to/its/bin`.
test-gpu:
	$(BIN)/python -m pytest -m gpu tests/gpu

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Build the documentation in site/ (a dead link is an error). Search needs a server: python -m http.server -d site
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "NPT needs Python 3.11 or newer, but this is Python " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[distill,hub,wandb,tensorboard]'
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

# Everything that .ci/run needs. pip installs torch, the CPU build where there is one; uv installs the rest in a fifth of pip's time.
$(VENV)/.ci: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[test,dev,docs]'
	touch $(VENV)/.test $(VENV)/.dev $(VENV)/.docs $@

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
