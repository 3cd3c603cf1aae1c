# Two commands: `make demo` sets up and shows the main job, `make test` sets up and runs the tests.
# `make torture` (half an hour) kills, damages and races it, and prints how often.
READY := .venv/.ready

demo: $(READY)
	.venv/bin/memcorr demo

test: $(READY)
	.venv/bin/python -m pytest

torture: $(READY)
	.venv/bin/python -m tests.torture

$(READY): pyproject.toml scripts/setup.sh
	bash scripts/setup.sh
	touch $@

.PHONY: demo test torture
