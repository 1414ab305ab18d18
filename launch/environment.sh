# Makes, or finds again, a virtual environment with this checkout installed.
# Sourced by the scripts that people run. The system's Python is never touched.
#
#   PYTHON      the Python to build on              (python3)
#   JASGD_VENV  where the environment lives         (.venv in the checkout)

# Prints a command, then runs it.
run() { echo "+ $*"; "$@"; }

# prepare_environment EXTRA: afterwards "$VENV/bin/python" has jasgd[EXTRA].
prepare_environment() {
  local extra=$1 python=${PYTHON:-python3}
  VENV=${JASGD_VENV:-.venv}
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "jasgd needs Python 3.11 or newer; '$python' is" \
        "$("$python" --version 2>&1). Set PYTHON to a newer one." >&2
      return 1
    fi
    # Some systems ship venv without a copy of pip: install pip with theirs.
    run "$python" -m venv "$VENV" 2>/dev/null ||
      { run "$python" -m venv --without-pip --clear "$VENV" &&
        run "$python" -m pip --python "$VENV/bin/python" install --quiet pip; }
  fi
  # Nothing to install unless the requirements have changed since the last time.
  local stamp=$VENV/installed-$extra.toml
  if ! cmp -s pyproject.toml "$stamp"; then
    run "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
      --editable ".[$extra]"
    cp pyproject.toml "$stamp"
  fi
}
