# `make demo` and `make test` work on a fresh checkout: each makes .venv, installs the pinned packages, does its job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= runs

.PHONY: demo test check docs format bench lock oldest clean

# The stamp is made last, so that an install that was cut off is done again.
$(READY): requirements-torch.txt requirements.lock pyproject.toml paper/pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements-torch.txt
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable . --editable paper
	touch $(READY)

demo: $(READY)
	$(BIN)/fedda run digits --out $(OUT)/digits --overwrite --no-summary
	$(BIN)/fedda run breast-cancer --out $(OUT)/breast-cancer --overwrite --no-summary
	$(BIN)/fedda report $(OUT)/digits $(OUT)/breast-cancer

test: $(READY)
	sh tests/all.sh $(BIN)/python

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	sh tests/all.sh $(BIN)/python

# The site is opened from its folder: build/site/index.html
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/fedda bench --out $(OUT)/bench.json

# Versions and hashes of all packages for development, for every system; torch is not among them (requirements-torch.txt).
lock:
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv
	.venv-lock/bin/uv pip compile pyproject.toml --quiet --extra dev --constraint requirements-torch.txt \
	  --universal --python-version 3.11 --generate-hashes --no-emit-package torch --no-emit-package fedda \
	  --no-annotate --custom-compile-command "make lock" --output-file requirements.lock
	rm -rf .venv-lock

# The oldest versions that pyproject.toml admits, but for torch and Flower: made anew, installed, and tried by some tests.
OLDEST := tests/test_packaging.py tests/test_config.py tests/test_report.py tests/test_sweep.py tests/test_tables.py \
  tests/test_data.py tests/test_export.py tests/test_stopping.py tests/test_files.py tests/test_own_models.py
oldest:
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet uv --requirement requirements-torch.txt
	.venv-oldest/bin/uv pip compile pyproject.toml --quiet --extra report --extra data --extra tables --extra privacy \
	  --extra onnx --extra tensorboard --constraint requirements-torch.txt --python-version 3.11 \
	  --resolution lowest-direct --no-emit-package torch --no-annotate --custom-compile-command "make oldest" \
	  --output-file requirements-oldest.txt
	.venv-oldest/bin/python -m pip install --quiet --no-deps --requirement requirements-oldest.txt
	.venv-oldest/bin/python -m pip install --quiet --constraint requirements-oldest.txt \
	  pytest pytest-xdist hypothesis scikit-learn hatchling editables
	.venv-oldest/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable . --editable paper
	.venv-oldest/bin/python -m pytest -p no:cacheprovider $(OLDEST)

clean:
	rm -rf $(VENV) .venv-lock .venv-oldest build dist
