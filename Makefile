# `make demo` sets up what the package itself needs and shows the main job. `make test` sets up the test tools and runs the
# short tests, `make test-long` those marked `long`, `make lint` style, types and imports. `make torture` (half an hour)
# kills, damages and races it, and prints how often.
CORE := .venv/.ready-core
DEV := .venv/.ready-dev

demo: $(CORE)
	.venv/bin/memcorr demo

test: $(DEV)
	.venv/bin/python -m pytest -m 'not long'

test-long: $(DEV)
	.venv/bin/python -m pytest -m long

lint: $(DEV)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports

torture: $(DEV)
	.venv/bin/python -m tests.torture

$(CORE): pyproject.toml scripts/setup.sh
	bash scripts/setup.sh core
	touch $@

$(DEV): pyproject.toml scripts/setup.sh
	bash scripts/setup.sh dev
	touch $(CORE) $@

.PHONY: demo test test-long lint torture
