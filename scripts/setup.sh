#!/usr/bin/env bash
# `setup.sh core`: virtual environment, the package, and the OpenGL libraries for headless rendering.
# `setup.sh dev`: also every extra, the test tools, and a browser for the tests of `memcorr lab`.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
    core) package=. ;;
    dev) package='.[dev]' ;;
    *) echo "setup: say what for: setup.sh core (to use it) or setup.sh dev (to test it)" >&2; exit 2 ;;
esac

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: Python 3.11 or newer is needed (set PYTHON=...)" >&2; exit 2; }
[ -x .venv/bin/pip ] || "$python" -m venv .venv || { echo "setup: venv is missing: apt-get install python3-venv" >&2; exit 2; }
# Bytecode is compiled when it is needed. torch 2.13.0 is the build that the committed results were made with; any from 2.11 on will do.
.venv/bin/pip install --quiet --no-compile --editable "$package" "${TORCH:-torch==2.13.0}"

if [ "$(id -u)" = 0 ]; then as=; elif sudo -n true 2>/dev/null; then as=sudo; else as=no; fi
command -v apt-get >/dev/null || as=no

gl() { .venv/bin/python -c 'import memcorr.worlds.gl' 2>/dev/null; }
if [ "$(uname)" = Linux ] && ! gl; then
    packages="libegl1 libgl1-mesa-dri libopengl0"
    if [ "$as" = no ]; then
        echo "setup: OpenGL libraries are missing; run: sudo apt-get install -y $packages" >&2
        exit 2
    fi
    $as apt-get update -qq
    $as apt-get install -y -qq $packages >/dev/null
    gl || { .venv/bin/memcorr doctor; exit 2; }
fi

browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
if [ "$1" = dev ] && [ "$(uname)" = Linux ] && ! browser >/dev/null; then
    # Without one nothing is lost but a test: it skips itself.
    { [ "$as" != no ] && $as apt-get update -qq && $as apt-get install -y -qq chromium; } >/dev/null 2>&1 ||
        echo "setup: no Chromium, so the lab's page stays untested; to change that: sudo apt-get install -y chromium"
fi
.venv/bin/memcorr doctor
