#!/usr/bin/env bash
# Try this checkout on a machine with a GPU that it has never run on, in less than 8 minutes.
#
# Usage: tools/device_check.sh [WHEELS] [JSON]
#
# WHEELS: a folder of wheels, for a machine without a network; default: tools/wheels, if it is
#         there. They are installed into a temporary environment. Without them, the packages of
#         the current python3 are used.
# JSON:   the file to write; default: device-check.json. It must not exist.
#
# Environment: PYTHON (default python3), LIMIT_S (default 470 seconds, with the installation).
#
# The parts are those of `your_ai doctor --report`, and the last ones are dropped when time runs out.
# The exit status is 0 if none failed, 1 if one failed (the file is written), 2 for wrong arguments.
#
# To collect the wheels for Linux with an NVIDIA card and Python 3.12, where there is a network
# (this list is of x86_64; mlx-cuda-13 needs a driver for CUDA 13):
#
#   pip download --dest tools/wheels --only-binary=:all: --python-version 3.12 \
#       --platform manylinux_2_35_x86_64 --platform manylinux_2_28_x86_64 \
#       --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
#       --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 \
#       'mlx[cuda13]==0.32.4' mlx-lm==0.32.2 psutil pyarrow pyyaml regex rich typer \
#       pytest hypothesis pip
#
# With --no-deps and NAME==VERSION, pip downloads one wheel. pytest and hypothesis are for the runs
# of tests/budget.py. A wheel that is too large to carry may come in parts, which are joined here:
#
#   split -b 45M NAME.whl NAME.whl.part-
set -euo pipefail
began=$SECONDS
root=$(cd "$(dirname "$0")/.." && pwd)
wheels=${1:-}
json=${2:-device-check.json}
python=${PYTHON:-python3}

fail() {
    echo "error: $1" >&2
    exit 2
}

[ $# -le 2 ] || fail "$3: is one argument too many; see the first lines of tools/device_check.sh"
[ ! -e "$json" ] || fail "$json: exists already; remove it, or name another file"
if [ -z "$wheels" ] && [ -d "$root/tools/wheels" ]; then wheels=$root/tools/wheels; fi
[ -z "$wheels" ] || [ -d "$wheels" ] || fail "$wheels: there is no such folder of wheels"
command -v "$python" >/dev/null || fail "$python: not found; set PYTHON"

if [ -n "$wheels" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/wheels"
    for wheel in "$wheels"/*.whl; do
        [ ! -e "$wheel" ] || ln -s "$(cd "$wheels" && pwd)/$(basename "$wheel")" "$work/wheels/"
    done
    for first in "$wheels"/*.whl.part-aa; do
        [ ! -e "$first" ] || cat "${first%aa}"* >"$work/wheels/$(basename "${first%.part-aa}")"
    done
    [ -n "$(ls -A "$work/wheels")" ] || fail "$wheels: has no wheels"
    "$python" -m venv --without-pip "$work/environment"
    pip=("$python" -m pip)
    for carried in "$work"/wheels/pip-*.whl; do # the system may have none
        [ ! -e "$carried" ] || pip=("$python" "$carried/pip")
    done
    "${pip[@]}" --python "$work/environment/bin/python" install --quiet --no-index --no-deps \
        --disable-pip-version-check "$work"/wheels/*.whl
    python=$work/environment/bin/python
    echo "installed $(find "$work/wheels" -name '*.whl' | wc -l) wheels in $((SECONDS - began)) s"
fi

left_s=$((${LIMIT_S:-470} - (SECONDS - began)))
[ "$left_s" -ge 30 ] || left_s=30 # to say at least what the machine is
minutes=$(awk "BEGIN { print $left_s / 60 }")
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
status=0
"$python" -m your_ai doctor --report "$json" --yes --minutes "$minutes" || status=$?
echo "$((SECONDS - began)) s in total"
exit "$status"
