#!/usr/bin/env bash
# Make the environment if needed and run the tests.  Arguments are passed on to pytest.
set -eu
. "$(dirname "$0")/environment.sh"
exec python -m pytest -n 2 --dist worksteal -q -m "not slow and not gpu" "$@"
