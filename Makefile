# make demo | make test: both build .venv first when it is missing or out of date.

PYTHON ?=
VERSIONS ?=
VENV_PYTHON := .venv/bin/python

# Tests of the chain from measurement to weights, whose coverage `make coverage` holds to 95 %.
PIPELINE_TESTS := $(addprefix tests/test_,access.py additive_search.py bucketize.py calibration.py collective_model.py \
	collectives.py costs.py evaluate.py gpu_models.py gpu_pipeline.py host_memory.py hosts.py measure.py offloading.py plan_groups.py \
	plan_uncertainty.py pretraining.py row_wise.py search.py spread.py store.py training.py two_hosts.py)

.PHONY: setup demo test test-slow test-versions coverage lint clean

setup:
	@command -v python3 >/dev/null 2>&1 || { echo "[setup] ERROR: there is no python3 on PATH; install Python 3.10 to 3.13" >&2; exit 1; }
	@python3 scripts/setup_venv.py $(if $(PYTHON),--python "$(PYTHON)")

demo: setup
	@$(VENV_PYTHON) -m examples.demo

test: setup
	@$(VENV_PYTHON) -m pytest -m "not slow"

test-slow: setup
	@$(VENV_PYTHON) -m pytest -m slow

test-versions: setup
	@$(VENV_PYTHON) scripts/test_versions.py $(if $(VERSIONS),--versions $(VERSIONS))

coverage: setup
	@$(VENV_PYTHON) -m coverage erase
	@$(VENV_PYTHON) -m coverage run -m pytest -m "not slow" $(PIPELINE_TESTS)
	@$(VENV_PYTHON) -m coverage combine -q
	@$(VENV_PYTHON) -m coverage report

lint: setup
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m mypy

clean:
	rm -rf .venv build dist .coverage* *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
