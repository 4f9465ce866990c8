# Sourced by the other scripts: makes .venv beside this checkout if needed, and puts it first on the path.
# PYTHON picks the interpreter (default: the first of python3.13, 3.12, 3.11, python3 that is 3.11 or newer).
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

fail() { echo "flowrl: $*" >&2; exit 2; }

if [ ! -x .venv/bin/flowrl ]; then
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && python=$candidate && break
    done
    [ -n "${python:-}" ] || fail "Python 3.11 or newer is needed (Debian, Ubuntu: apt install python3 python3-venv)."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv: install it (Debian, Ubuntu: apt install python3-venv) and run this again."
    echo "making .venv with $("$python" --version); torch and diffusers take a few minutes"
    [ -x .venv/bin/python ] || "$python" -m venv .venv || exit 1
    install=".venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt"
    if ! command -v nvidia-smi >/dev/null 2>&1; then # the CPU build is a tenth of the size, where its index is reachable
        $install --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu torch torchvision \
            >/dev/null 2>&1 || echo "no CPU build of torch within reach; taking the standard one"
    fi
    $install torch torchvision || exit 1
    $install --editable '.[dev]' || exit 1
fi
export PATH="$PWD/.venv/bin:$PATH"
# Several one-thread processes are faster than one process with several threads at these sizes.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
