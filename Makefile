# Two commands: `make demo` sets up and shows the main job, `make test` sets up and runs the tests.
READY := .venv/.ready

demo: $(READY)
	.venv/bin/memcorr demo

test: $(READY)
	.venv/bin/python -m pytest

$(READY): pyproject.toml scripts/setup.sh
	bash scripts/setup.sh
	touch $@

.PHONY: demo test
