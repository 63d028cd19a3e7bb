# Shell functions that the scripts share; sourced, not run.
# shellcheck shell=bash

# The checkout, whatever the current directory.
headwater_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Where install-deps puts PyTorch if the distribution has no package of it.
headwater_venv=$headwater_root/build/venv
export headwater_root headwater_venv

say() { printf '%s\n' "$*" >&2; }

die() {
  say "$(basename "$0"): $*"
  exit 1
}

# find_python MODULE...: prints the first interpreter that imports numpy, grpc, google.protobuf and MODULE...: HEADWATER_PYTHON alone if
# it is set, else `python3` on the PATH, else the distribution's, else that of the environment that install-deps made. Answers 1 when
# there is none.
find_python() {
  local candidates=(python3 /usr/bin/python3 "$headwater_venv/bin/python3") candidate path
  if [[ -n ${HEADWATER_PYTHON:-} ]]; then candidates=("$HEADWATER_PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    path=$(command -v "$candidate") || continue
    # A real import, not a look at the folders: a module that is there but cannot be loaded does not help.
    if "$path" -c 'import importlib, sys
for name in sys.argv[1:]: importlib.import_module(name)' numpy grpc google.protobuf "$@" >/dev/null 2>&1; then
      printf '%s\n' "$path"
      return 0
    fi
  done
  return 1
}

# build_jobs: how many compilers to run at once: a core each, and at least 2 GB of memory for each.
build_jobs() {
  local cores by_memory
  cores=$(nproc)
  by_memory=$(awk '/^MemAvailable:/ { print int($2 / 2000000) }' /proc/meminfo)
  if ((by_memory < 1)); then by_memory=1; fi
  echo $((cores < by_memory ? cores : by_memory))
}
