#!/usr/bin/env bash
# Test examples/my_engine the way its author would: from an empty folder, against an installed wheel of this package.
# The environment is new; torch and the other dependencies are borrowed from the one that PYTHON belongs to.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

rm -rf build # what an earlier build left would get into the wheel
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder/dist" .
"$python" -m venv --without-pip "$folder/venv"
user=$folder/venv/bin/python
install=("$python" -m pip --python "$user" install --quiet --disable-pip-version-check)
"${install[@]}" --no-deps "$folder"/dist/*.whl
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$user" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
"${install[@]}" './examples/my_engine[test]' # its requirements are there already
cp -r examples/my_engine/tests "$folder/tests"
mkdir "$folder/empty"

cd "$folder/empty"
"$user" -c 'import conformance, sys; assert conformance.__file__.startswith(sys.prefix), conformance.__file__'
echo "--- the engine's own test"
"$user" -m pytest -q ../tests
echo "--- the whole suite, by the name of the class"
"$user" -m pytest -q --pyargs conformance --backend my_engine.attention:MyBackend
echo "--- the command, by the name that the entry point announces"
"$user" -m conformance run --backend my-engine
